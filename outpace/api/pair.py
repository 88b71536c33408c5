"""A target and a draft for it, by what a user calls them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from dataclasses import fields, replace
from functools import partial
from threading import Event
from typing import Any

from outpace.core.errors import UserError
from outpace.models.devices import check_pair
from outpace.models.files.find import locate, shipped_model
from outpace.models.files.pairs import NO_DRAFT, shipped_draft
from outpace.models.load import LAYERS, Progress, fitted, load_draft, load_model, open_draft
from outpace.models.options import LoadOptions
from outpace.models.runtimes import Loaded

_LOOK_SECONDS = 0.1


def load_pair(
    target: Any,
    draft: Any,
    options: LoadOptions,
    *,
    draft_device: str | None,
    draft_dtype: str | None,
    tokenizer: Any,
    progress: Progress,
    may_draft: bool,
    same_tokens: bool = True,
) -> tuple[Loaded, Loaded | None]:
    """What is not loaded yet is loaded. The shipped target brings its own draft where a draft `may_draft`; the
    draft may have other tokens where they need not be the `same_tokens`. A list names several drafts: the first, and
    `others` that it holds."""
    if isinstance(draft, list | tuple):
        named = {"draft_device": draft_device, "draft_dtype": draft_dtype, "progress": progress, "may_draft": may_draft}
        return _load_several(target, draft, options, tokenizer=tokenizer, same_tokens=same_tokens, **named)
    is_alone = draft is None or draft == NO_DRAFT
    if isinstance(target, Loaded) and (is_alone or isinstance(draft, Loaded)):
        given = {"draft_device": draft_device, "draft_dtype": draft_dtype, "tokenizer": tokenizer}
        _refuse_all(options, given)
        return target, None if is_alone else draft
    of_draft = options.of_draft(draft_device, draft_dtype)
    if str(draft).startswith(LAYERS) and of_draft != options.of_draft():
        said = "has the target's own weights, with their device and dtype"
        raise UserError(f"{draft} {said}: leave out draft_device and draft_dtype")
    if target is None and draft is None and may_draft:
        draft = shipped_draft(shipped_model().stem)
        if draft is not None:
            return _shipped(draft, options, of_draft, progress, same_tokens)
    if not isinstance(target, Loaded):
        check_pair(options, None if is_alone or isinstance(draft, Loaded) else draft_device)
        target = load_model(target, options, tokenizer=tokenizer, progress=progress)
    if draft is None or draft == NO_DRAFT or isinstance(draft, Loaded):
        return target, draft if isinstance(draft, Loaded) else None
    return target, load_draft(draft, target, of_draft, progress=progress, same_tokens=same_tokens)


def _load_several(
    target: Any, drafts: Sequence[Any], options: LoadOptions, *, tokenizer: Any, same_tokens: bool, **named: Any
) -> tuple[Loaded, Loaded | None]:
    """The target, and the first draft with the others. UserError where one is missing, named twice, or has other
    tokens."""
    for place, draft in enumerate(drafts):
        if draft is None or draft == NO_DRAFT:
            raise UserError("several drafts are named, and one of them is none: leave it out")
        if isinstance(draft, str) and draft in drafts[:place]:
            raise UserError(f"the draft {draft} is named twice")
    if len(drafts) > 1 and not same_tokens:
        raise UserError("drafter translated takes one draft model, these are several: name one")
    first, *others = drafts or [None]
    target, draft = load_pair(target, first, options, tokenizer=tokenizer, same_tokens=same_tokens, **named)
    if not others or draft is None:
        return target, draft
    of_draft = options.of_draft(named["draft_device"], named["draft_dtype"])
    loaded = [
        other if isinstance(other, Loaded) else load_draft(other, target, of_draft, progress=named["progress"])
        for other in others
    ]
    return target, replace(draft, others=tuple(loaded))


def _shipped(
    draft: str, options: LoadOptions, of_draft: LoadOptions, progress: Progress, same_tokens: bool
) -> tuple[Loaded, Loaded]:
    """The shipped pair, both loaded at once. What ends the one, an interrupt above all, ends the other at its next
    stage."""
    ended = Event()

    def go_on(stage: str, fraction: float) -> None:
        if ended.is_set():
            raise CancelledError

    with ThreadPoolExecutor(1) as pool:
        files = partial(locate, None)
        other = pool.submit(open_draft, draft, shipped_model().stem, files, of_draft, progress=go_on)
        try:
            target = load_model(None, options, progress=progress)
            while not wait([other], _LOOK_SECONDS).done:
                progress("loading", 1.0)  # which takes interrupts
        except BaseException:
            ended.set()
            raise
        return target, fitted(other.result(), target) if same_tokens else other.result()


def _refuse_all(options: LoadOptions, given: dict[str, Any]) -> None:
    """UserError for an option of loading where nothing is left to load."""
    default = LoadOptions()
    changed = [f.name for f in fields(options) if getattr(options, f.name) != getattr(default, f.name)]
    for name in [*changed, *(name for name, value in given.items() if value is not None)]:
        raise UserError(f"{name} is for models that are loaded by name, these are loaded already: leave it out")
