"""Differences of LFM2 and LFM2.5 from Llama: short convolutions in most layers, and the names of fields and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outpace.core.errors import UserError
from outpace.models.llama.config import experts
from outpace.models.llama.config.fields import (
    FULL,
    check_layers,
    flag,
    number,
    read_layer_types,
    size,
    unsupported_field,
)
from outpace.models.llama.config.recurrence import CONVOLUTION, Recurrence

MODEL_TYPE, ARCHITECTURE = "lfm2", "Lfm2ForCausalLM"
CONV = "conv"  # the layer type
THETA = 1e6
DEFAULTS: dict[str, Any] = {
    "vocab_size": 65536,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
NAMES = {  # of a checkpoint's parts: Llama's
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "embedding_norm": "norm",
    "self_attn.out_proj": "self_attn.o_proj",
    "self_attn.q_layernorm": "self_attn.q_norm",
    "self_attn.k_layernorm": "self_attn.k_norm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}


def with_usual_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields with Llama's names, and with the width of the MLPs that they imply."""
    found = {**fields, "rms_norm_eps": fields.get("norm_eps")}
    for name, older in (("tie_word_embeddings", "tie_embedding"), ("intermediate_size", "block_ff_dim")):
        if fields.get(older) is not None:
            found[name] = fields[older]
    if flag(fields, "block_auto_adjust_ff_dim", True):
        width = 2 * size(found, "intermediate_size") // 3
        if "block_ffn_dim_multiplier" not in fields or fields["block_ffn_dim_multiplier"] is not None:
            multiple = size(fields, "block_multiple_of", 256)
            width = int(number(fields, "block_ffn_dim_multiplier", 1.0, 1e6) * width)
            width = -(-width // multiple) * multiple
        found["intermediate_size"] = width
    return found


def read_recurrence(fields: Mapping[str, Any], num_layers: int) -> tuple[Recurrence, tuple[bool, ...]]:
    """Return the sizes of the short convolutions, and which layers have one."""
    if flag(fields, "conv_bias"):
        raise unsupported_field("conv_bias true")
    channels = size(fields, "hidden_size")
    for name in ("conv_dim", "conv_dim_out"):
        if (said := size(fields, name, channels)) != channels:
            raise UserError(f"{name} is {said}, it must be hidden_size {channels}")
    types, listed = read_layer_types(fields, num_layers, CONV), fields.get("full_attn_idxs")
    layers = [isinstance(listed, list) and layer not in listed for layer in range(num_layers)]
    if listed is not None:
        check_layers(types, layers, f"full_attn_idxs {listed!r:.200}")
    recurrence = Recurrence(CONVOLUTION, size(fields, "conv_L_cache", 3), channels)
    return recurrence, tuple(layers if types is None else [kind != FULL for kind in types])


def own_name(name: str) -> str:
    """Return Llama's name of a checkpoint's tensor."""
    for part, ours in NAMES.items():
        if f".{part}." in name:
            return name.replace(f".{part}.", f".{ours}.")
    return experts.own_name(name)


def stored_name(name: str) -> str:
    """Return a checkpoint's name of a tensor that has Llama's name."""
    for part, ours in NAMES.items():
        if f".{ours}." in name:
            return name.replace(f".{ours}.", f".{part}.")
    return experts.stored_name("feed_forward", name)
