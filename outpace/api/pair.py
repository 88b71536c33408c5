"""A target and a draft for it, by what a user calls them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from outpace.core.errors import UserError
from outpace.models.files.pairs import NO_DRAFT, shipped_draft
from outpace.models.load import LAYERS, Progress, load_draft, load_model
from outpace.models.options import LoadOptions
from outpace.models.runtimes import Loaded


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
    draft may have other tokens where they need not be the `same_tokens`."""
    is_alone = draft is None or draft == NO_DRAFT
    if isinstance(target, Loaded) and (is_alone or isinstance(draft, Loaded)):
        given = {"draft_device": draft_device, "draft_dtype": draft_dtype, "tokenizer": tokenizer}
        _refuse_all(options, given)
        return target, None if is_alone else draft
    of_draft = options.of_draft(draft_device, draft_dtype)
    if str(draft).startswith(LAYERS) and of_draft != options.of_draft():
        said = "has the target's own weights, with their device and dtype"
        raise UserError(f"{draft} {said}: leave out draft_device and draft_dtype")
    is_shipped = target is None and draft is None
    if not isinstance(target, Loaded):
        target = load_model(target, options, tokenizer=tokenizer, progress=progress)
    if is_shipped and may_draft:
        draft = shipped_draft(target.name)
    if draft is None or draft == NO_DRAFT or isinstance(draft, Loaded):
        return target, draft if isinstance(draft, Loaded) else None
    return target, load_draft(draft, target, of_draft, progress=progress, same_tokens=same_tokens)


def _refuse_all(options: LoadOptions, given: dict[str, Any]) -> None:
    """UserError for an option of loading where nothing is left to load."""
    default = LoadOptions()
    changed = [f.name for f in fields(options) if getattr(options, f.name) != getattr(default, f.name)]
    for name in [*changed, *(name for name, value in given.items() if value is not None)]:
        raise UserError(f"{name} is for models that are loaded by name, these are loaded already: leave it out")
