"""Differences of Qwen3.5, 3.6, 3.8 and Qwen3-Next from Llama: gated delta nets in three layers of four, and gated
attention.

Norms store their weights minus one, except the delta nets' own. A part of each attention head is rotated, and its
output is multiplied by the sigmoid of a gate that is projected along with the query.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outpace.core.errors import UserError
from outpace.models.llama.config import phi
from outpace.models.llama.config.fields import FULL, check_layers, flag, read_layer_types, size, unsupported_field
from outpace.models.llama.config.recurrence import DELTA_NET, PARTS, Recurrence

MODEL_TYPE, ARCHITECTURE = "qwen3_5_text", "Qwen3_5ForCausalLM"
MOE_TYPE = "qwen3_5_moe_text"
NEXT_TYPE, NEXT_ARCHITECTURE = "qwen3_next", "Qwen3NextForCausalLM"
LINEAR = "linear_attention"  # the layer type
INTERVAL = "full_attention_interval"  # every fourth layer is attention
PART = 0.25  # rotated share of a head
MTP_LAYERS = "mtp_num_hidden_layers"  # number of layers for multi-token prediction, beyond those of the model
# In config.json's `outpace`, of a GGUF file that was converted: the order of value heads, and the fused matrices.
TILED, FUSED = "tiled_value_heads", "fused_inputs"
DEFAULTS: dict[str, Any] = {
    "vocab_size": 248320,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32768,
}
NEXT_DEFAULTS = {**DEFAULTS, "vocab_size": 151936, "num_key_value_heads": 2}
VISION_ROPE = ("mrope_section", "mrope_interleaved")  # positions of images; those of text are equal in all sections


def with_flat_rope(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields with the rotated share of a head as one field of its own, and without rotation of images."""
    left = dict(fields)
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := left.get(name), Mapping):
            left[name] = {key: value for key, value in rope.items() if key not in VISION_ROPE}
    return phi.with_share(left, PART)


def read_recurrence(
    fields: Mapping[str, Any], num_layers: int, fused: tuple[str, ...] = ()
) -> tuple[Recurrence, tuple[bool, ...]]:
    """Return the sizes of the delta nets, and which layers have one. `fused`: see `Recurrence`."""
    counts: dict[str, Any] = {
        "key_heads": size(fields, "linear_num_key_heads", 16),
        "value_heads": size(fields, "linear_num_value_heads", 32),
        "key_depth": size(fields, "linear_key_head_dim", 128),
        "value_depth": size(fields, "linear_value_head_dim", 128),
    }
    keys, values = counts["key_heads"], counts["value_heads"]
    if values % keys:
        raise UserError(f"linear_num_value_heads is {values}, it must be a multiple of linear_num_key_heads {keys}")
    if flag(fields, "attn_output_gate", True) is False:
        raise unsupported_field("attn_output_gate false")
    types, ours = read_layer_types(fields, num_layers, LINEAR), fields.get("outpace")
    interval = size(fields, INTERVAL, 4)
    layers = [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if fields.get(INTERVAL) is not None:
        check_layers(types, layers, f"{INTERVAL} {interval}")
    channels = 2 * keys * counts["key_depth"] + values * counts["value_depth"]
    ours = ours if isinstance(ours, Mapping) else {}
    if isinstance(found := ours.get(FUSED), list):
        fused = tuple(name for name in PARTS if name in found)
    stored: dict[str, Any] = {"is_tiled": flag(ours, TILED) and keys != values, "fused": fused}
    recurrence = Recurrence(DELTA_NET, size(fields, "linear_conv_kernel_dim", 4), channels, **counts, **stored)
    return recurrence, tuple(layers if types is None else [kind != FULL for kind in types])


def read_constants(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of LlamaConfig that other architectures do not set."""
    return {"norm_offset": 1.0, "output_gate": True}
