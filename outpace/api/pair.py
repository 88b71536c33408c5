"""Load a target and a draft for it, as users name them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

from outpace.core.errors import UserError
from outpace.engine.options import BuildOptions
from outpace.models.devices import check_pair
from outpace.models.files.find import locate, shipped_model
from outpace.models.files.pairs import NO_DRAFT, shipped_draft
from outpace.models.load import Progress, check_tokens, find_head, fit_draft, load_draft, load_model, open_draft, silent
from outpace.models.options import LoadOptions
from outpace.models.runtimes import Loaded

_POLL_SECONDS = 0.1


def load_pair(
    target: Any,
    draft: Any,
    options: LoadOptions,
    build: BuildOptions,
    *,
    tokenizer: Any = None,
    progress: Progress = silent,
) -> tuple[Loaded, Loaded | None]:
    """Load what is not loaded yet. The shipped target brings its own draft if a draft can be used. Of a list of drafts,
    the first is returned, with the rest in its `others`."""
    if isinstance(draft, list | tuple):
        return _load_several(target, draft, options, build, tokenizer, progress)
    has_default = draft is None
    draft = None if draft == NO_DRAFT else draft
    if target is None and (head := find_head(draft, progress)) is not None:
        from outpace.models.heads.files import target_of_head

        target = target_of_head(head)
    if isinstance(target, Loaded) and (draft is None or isinstance(draft, Loaded)):
        _refuse_load_options(options, tokenizer)
        return target, draft
    draft_options = options.of_draft()
    if target is None and has_default and options.pp_plan is not None and build.may_draft:
        draft = shipped_draft(shipped_model().stem)  # loaded after the target, from whose loading only rank 0 returns
    elif target is None and has_default and build.may_draft and (shipped := shipped_draft(shipped_model().stem)):
        return _load_shipped(shipped, options, draft_options, progress, build.needs_same_tokens)
    if draft is None and options.num_output_tokens:
        raise UserError(
            f"draft_vocab {options.draft_vocab} reduces the output layer of a draft model, and there is none: name one"
            " with --draft (or draft=...), or leave it out"
        )
    if not isinstance(target, Loaded):
        check_pair(options, None if draft is None or isinstance(draft, Loaded) else options.draft_device)
        with _checked_early(target, draft, build.needs_same_tokens, progress) as checked:
            target = load_model(target, options, tokenizer=tokenizer, progress=checked)
    if draft is not None and not isinstance(draft, Loaded):
        same_tokens = build.needs_same_tokens
        draft = load_draft(draft, target, draft_options, progress=progress, same_tokens=same_tokens)
    return target, draft


@contextmanager
def _checked_early(target: Any, draft: Any, same_tokens: bool, progress: Progress) -> Iterator[Progress]:
    """Compare the tokens of a pair's files in another thread while the target loads; the progress function that is
    yielded raises UserError as soon as they are known to differ."""
    if not (same_tokens and _is_local_model(target) and _is_local_model(draft)):
        yield progress
        return
    pool = ThreadPoolExecutor(1)
    reason = pool.submit(check_tokens, target, draft)

    def checked(stage: str, fraction: float) -> None:
        if reason.done() and (message := reason.result()):
            raise UserError(message)
        progress(stage, fraction)

    try:
        yield checked
    finally:
        pool.shutdown(wait=False)
    checked("loading", 1.0)


def _is_local_model(spec: Any) -> bool:
    return isinstance(spec, str | Path) and Path(spec).expanduser().exists()


def _load_several(
    target: Any, drafts: Sequence[Any], options: LoadOptions, build: BuildOptions, tokenizer: Any, progress: Progress
) -> tuple[Loaded, Loaded | None]:
    """Load the target and several drafts. UserError if one is "none", named twice, or has other tokens."""
    for place, draft in enumerate(drafts):
        if draft is None or draft == NO_DRAFT:
            raise UserError("several drafts are named, and one of them is none: leave it out")
        if isinstance(draft, str) and draft in drafts[:place]:
            raise UserError(f"the draft {draft} is named twice")
    if len(drafts) > 1 and not build.needs_same_tokens:
        raise UserError("drafter translated takes one draft model, these are several: name one")
    first, *others = drafts or [None]
    target, draft = load_pair(target, first, options, build, tokenizer=tokenizer, progress=progress)
    if not others or draft is None:
        return target, draft
    draft_options = options.of_draft()
    loaded = [
        other if isinstance(other, Loaded) else load_draft(other, target, draft_options, progress=progress)
        for other in others
    ]
    if other := next((one for one in (draft, *loaded) if one.drafter != "model"), None):
        raise UserError(
            f"{other.name} needs drafter {other.drafter}, but only drafter model chooses among drafts: name it alone"
        )
    return target, replace(draft, others=tuple(loaded))


def _load_shipped(
    draft: str, options: LoadOptions, draft_options: LoadOptions, progress: Progress, same_tokens: bool
) -> tuple[Loaded, Loaded]:
    """Load the shipped pair, both models concurrently. If one fails or is interrupted, the other stops at its next
    stage."""
    ended = Event()

    def go_on(stage: str, fraction: float) -> None:
        if ended.is_set():
            raise CancelledError

    with ThreadPoolExecutor(1) as pool:
        files = partial(locate, None)
        other = pool.submit(open_draft, draft, shipped_model().stem, files, draft_options, progress=go_on)
        try:
            target = load_model(None, options, progress=progress)
            while not wait([other], _POLL_SECONDS).done:
                progress("loading", 1.0)  # a chance to raise an interrupt
        except BaseException:
            ended.set()
            raise
        return target, fit_draft(other.result(), target) if same_tokens else other.result()


def _refuse_load_options(options: LoadOptions, tokenizer: Any) -> None:
    """Raise UserError for a loading option if nothing is left to load."""
    default = LoadOptions()
    given = [f.name for f in fields(options) if getattr(options, f.name) != getattr(default, f.name)]
    for name in [*given, *(["tokenizer"] if tokenizer is not None else [])]:
        raise UserError(f"{name} is for models that are loaded by name, these are loaded already: leave it out")
