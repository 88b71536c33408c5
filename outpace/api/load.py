"""`outpace.load`: models by what a user calls them, ready to write."""

from __future__ import annotations

from typing import Any

from outpace.api.llm import LLM
from outpace.engine.build import may_draft
from outpace.models.files.pairs import NO_DRAFT, shipped_draft
from outpace.models.load import Progress, load_draft, load_model, silent


def load(
    target: Any = None,
    draft: Any = None,
    *,
    device: str = "cpu",
    draft_device: str | None = None,
    dtype: str = "auto",
    exact: bool | None = None,
    runtime: str = "auto",
    trust_remote_code: bool = False,
    device_map: Any = None,
    tokenizer: Any = None,
    inflate: int = 1,
    progress: Progress = silent,
    **options: Any,
) -> LLM:
    """Loads a target (None: the shipped model) and a draft for it; `options` as for `LLM`.

    A model is a hub id, a folder of safetensors, a .gguf file, or a causal LM of transformers that is loaded already,
    with its `tokenizer`. A draft may also be "auto", the small sibling that is known for the target, or some of the
    target's own layers, as in "layers:0,1,28,29". The shipped target has the shipped draft with it, unless `draft` is
    "none" or the method or the drafter needs no model. `runtime` "auto": our own for the architectures that it knows,
    else transformers, which takes `device_map` too.
    """
    common: dict[str, Any] = {"dtype": dtype, "exact": exact, "trust_remote_code": trust_remote_code}
    common |= {"runtime": runtime, "progress": progress}
    loaded = load_model(target, device=device, tokenizer=tokenizer, device_map=device_map, inflate=inflate, **common)
    if target is None and draft is None and may_draft(options.get("method", "auto"), options.get("drafter")):
        draft = shipped_draft(loaded.name)
    is_alone = draft is None or draft == NO_DRAFT
    small = None if is_alone else load_draft(draft, loaded, device=draft_device or device, **common)
    return LLM(loaded, small, **options)
