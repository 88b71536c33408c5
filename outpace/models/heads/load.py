"""Loads a head for a loaded target, in the target's runtime and on its device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from outpace.core.errors import UserError, require
from outpace.models.base import Capability
from outpace.models.files.find import open_source
from outpace.models.heads.config import check_kind, head_class
from outpace.models.heads.files import HeadFiles, kind_of_head, open_head, open_mtp
from outpace.models.heads.head import Head, Weights
from outpace.models.heads.native import NativeWeights
from outpace.models.heads.reader import read_head
from outpace.models.llama.native.binding import NativeOptions
from outpace.models.llama.native.runtime import NativeLlama
from outpace.models.options import AUTO, FILE, INT4, INT8, NATIVE_KV, LoadOptions

MAX_PADDING = 1024  # rows by which the vocabularies of head and target may differ


def load_head(
    path: Path,
    target: Any,
    target_config: Mapping[str, Any],
    num_tokens: int,
    files: Callable[[], Path] | None,
    options: LoadOptions,
    is_mtp: bool = False,
) -> Head:
    """Build the model of a head for a target model, whose tokenizer has `num_tokens` tokens.

    Raise UserError for an unsupported kind, a damaged file, a head for another target, or a target that cannot return
    hidden states. `files` finds the target's files, from which an output layer that the head lacks is read; None if
    the target was not loaded by name. `is_mtp`: `path` is the target, and the head the MTP layer in it.
    """
    if not is_mtp:
        check_kind(str(kind_of_head(path)), path)
    if target.is_pipeline:
        raise UserError(f"{path} is a trained head, which does not work with pp_plan: name another draft")
    target.check_capability(Capability.HIDDEN)
    opened = open_mtp(path) if is_mtp else open_head(path)
    config = {**target_config, "hidden_size": target.config.hidden_size}
    num_layers = target.num_layers or int(target.config.num_hidden_layers)
    spec = read_head(opened, config, target.max_positions, num_layers)
    tokens, rows = spec.layers.vocab_size, int(config.get("vocab_size") or target.vocab_size)
    if tokens < num_tokens or abs(tokens - rows) > MAX_PADDING:
        raise UserError(f"{path} is a head for {tokens} tokens, and the target has {num_tokens} tokens in {rows} rows")
    if max(spec.taps) > target.max_hidden_layer:
        raise UserError(
            f"{path} reads the hidden states after layer {max(spec.taps)}, and {type(target).__name__} gives those"
            f" after layer {target.max_hidden_layer} at most: use runtime llama or native"
        )
    head: Head = head_class(spec.kind)(spec, _weights_of(opened, target, files, options))
    return head


def _weights_of(opened: HeadFiles, target: Any, files: Callable[[], Path] | None, options: LoadOptions) -> Weights:
    """Return what loads the head's tensors for the target's runtime."""
    if isinstance(target, NativeLlama):
        weights = options.dtype if options.dtype in (INT8, INT4, FILE) else INT4 if options.dtype == AUTO else INT8
        native = NativeOptions(target.options.threads, options.kv_dtype_or(NATIVE_KV), weights=weights)
        return NativeWeights(opened, target, native)
    require("a head for a target that runs by torch", "torch")
    from outpace.models.heads.torch import TorchWeights

    module = getattr(target, "module", None)  # of transformers

    def of_target(name: str) -> Any:
        if name == "embed_tokens.weight":
            return target.embedding if module is None else module.get_input_embeddings().weight
        if name == "target_norm.weight" and module is not None:
            raise UserError(f"{opened.path} needs the final norm of the target: use runtime llama or native")
        if module is not None:
            return module.get_output_embeddings().weight
        if files is None:
            raise UserError(f"{opened.path} needs weights of the target, which was not loaded by name")
        with open_source(files()) as source:
            if name == "target_norm.weight":
                return source.tensor("model.norm.weight") + target.config.norm_offset
            return source.tensor("model.embed_tokens.weight" if target.config.tie_embeddings else name)

    return TorchWeights(opened, target, of_target, options.kv_dtype)
