"""`outpace.load`: models by what a user calls them, ready to write."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from outpace.api.llm import LLM
from outpace.core.errors import UserError
from outpace.engine.build import may_draft
from outpace.models.files.pairs import NO_DRAFT, shipped_draft
from outpace.models.load import LAYERS, Progress, load_draft, load_model, silent
from outpace.models.options import LoadOptions


def load(
    target: Any = None,
    draft: Any = None,
    options: LoadOptions | None = None,
    *,
    draft_device: str | None = None,
    draft_dtype: str | None = None,
    tokenizer: Any = None,
    progress: Progress = silent,
    **more: Any,
) -> LLM:
    """Loads a target (None: the shipped model) and a draft for it.

    A model is a hub id, a folder of safetensors, a .gguf file, or a causal LM of transformers that is loaded already,
    with its `tokenizer`. A draft may also be "auto", the small sibling that is known for the target, or some of the
    target's own layers, as in "layers:0,1,28,29". The shipped target has the shipped draft with it, unless `draft` is
    "none" or the method or the drafter needs no model.

    `options` say how the models are loaded, and `more` are fields of `LoadOptions` by name (device, dtype, exact,
    runtime, trust_remote_code, device_map, inflate) and the options of `LLM`. The draft is loaded as the target is,
    unless it has a device or a dtype of its own; a device map and an inflation are the target's alone.
    """
    changes = {field.name: more.pop(field.name) for field in fields(LoadOptions) if field.name in more}
    options = replace(options or LoadOptions(), **changes)
    of_draft = options.of_draft(draft_device, draft_dtype)
    if str(draft).startswith(LAYERS) and of_draft != options.of_draft():
        said = "has the target's own weights, with their device and dtype"
        raise UserError(f"{draft} {said}: leave out draft_device and draft_dtype")
    loaded = load_model(target, options, tokenizer=tokenizer, progress=progress)
    if target is None and draft is None and may_draft(more.get("method", "auto"), more.get("drafter")):
        draft = shipped_draft(loaded.name)
    is_alone = draft is None or draft == NO_DRAFT
    small = None if is_alone else load_draft(draft, loaded, of_draft, progress=progress)
    return LLM(loaded, small, **more)
