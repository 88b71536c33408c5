"""Differences of Gemma 4 from Gemma 3: layers of two sizes, keys that later layers read too, embeddings by layer.

Layers that see the whole text have heads of another size than those with a window, which may be keys and values in
one, and turn only the fastest quarter of a head's pairs. In the small models the last layers read the keys and values
of the last layer of their kind before them, and each layer adds an embedding of the token of its own. Norms store their
weights whole. The largest model but one has a mixture of experts besides each MLP.
https://ai.google.dev/gemma/docs/core/model_card_4
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outpace.core.errors import UserError
from outpace.models.llama.config import gemma
from outpace.models.llama.config.experts import ExpertLayers, Experts
from outpace.models.llama.config.fields import FULL, SLIDING, flag, number, read_layer_types, size, unsupported_field

MODEL_TYPE, ARCHITECTURE = "gemma4_text", "Gemma4ForCausalLM"
SHARE = 0.25  # of the pairs that layers without a window turn
BY_LAYER, GLOBAL_DIM, GLOBAL_HEADS = "per_layer_config", "global_head_dim", "num_global_key_value_heads"
LAYER_FIELDS = {"head_dim": GLOBAL_DIM, "num_key_value_heads": GLOBAL_HEADS}  # of `BY_LAYER`, as one field of all
BIDIRECTIONAL = "use_bidirectional_attention"
DEFAULTS: dict[str, Any] = gemma.DEFAULTS | {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "rope_parameters": {
        FULL: {"rope_type": "proportional", "partial_rotary_factor": SHARE, "rope_theta": gemma.THETA},
        SLIDING: {"rope_type": "default", "rope_theta": gemma.LOCAL_THETA},
    },
}
HONOURED = (gemma.LOGIT_CAP, BIDIRECTIONAL)
OWN_NAMES = {  # of a checkpoint's parts of a layer: ours
    "router.proj.weight": "mlp.gate.weight",
    "router.scale": "mlp.gate.scale",
    "router.per_expert_scale": "mlp.gate.expert_scale",
}
# Parts of a layer with experts besides its MLP, and of one with an embedding of its own.
BRANCH_NORMS = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
GATE, PROJECTION, PROJECTION_NORM = "per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"
BRANCH = (GATE, PROJECTION)
TABLE = "model.embed_tokens_per_layer.weight"
MODEL_PROJECTION, MODEL_NORM = "model.per_layer_model_projection.weight", "model.per_layer_projection_norm"
UNUSED = ("self_attn.k_proj.", "self_attn.v_proj.", "self_attn.k_norm.", "self_attn.v_norm.")  # of layers without keys


@dataclass(frozen=True)
class FullHeads:
    """Heads of the layers without a window. `joins_values`: one matrix projects keys and values."""

    head_dim: int
    num_kv_heads: int
    joins_values: bool


def with_flat_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields with one field per number; transformers 5 writes objects for each type, and for each layer."""
    flat = dict(gemma.with_flat_rope(fields))
    types, by_layer = flat.get("layer_types"), flat.pop(BY_LAYER, None)
    if types is None:
        slides = gemma.sliding_layers(flat, [True] * size(flat, "num_hidden_layers"))
        types = [SLIDING if slid else FULL for slid in slides]
    if isinstance(types, list) and types:
        flat["layer_types"] = [*types[:-1], FULL]  # as transformers has it, whatever the config says
    if by_layer:
        sizes = [*by_layer.values()] if isinstance(by_layer, Mapping) else [None]
        one = sizes[0]
        if not isinstance(one, Mapping) or any(other != one for other in sizes) or set(one) - {*LAYER_FIELDS}:
            raise unsupported_field(f"{BY_LAYER} {by_layer!r:.200}")
        flat |= {LAYER_FIELDS[name]: value for name, value in one.items()}
    return flat | {"num_experts_per_tok": flat.get("top_k_experts")}


def read_constants(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of LlamaConfig that Gemma 4 sets."""
    if fields.get(BIDIRECTIONAL) not in (None, "vision"):
        raise unsupported_field(f"{BIDIRECTIONAL} {fields[BIDIRECTIONAL]!r:.50}")
    layers, hidden, width = size(fields, "num_hidden_layers"), size(fields, "hidden_size"), _embedding_width(fields)
    slides = [kind == SLIDING for kind in read_layer_types(fields, layers, SLIDING) or ()]
    first_shared = layers - size(fields, "num_kv_shared_layers", 0, smallest=0)
    middle = size(fields, "intermediate_size")
    is_wide = flag(fields, "use_double_wide_mlp") and first_shared < layers
    joins = flag(fields, "attention_k_eq_v")
    kv_heads = size(fields, "num_key_value_heads")
    full = FullHeads(size(fields, GLOBAL_DIM, 512), size(fields, GLOBAL_HEADS, kv_heads) if joins else kv_heads, joins)
    if size(fields, "num_attention_heads") % full.num_kv_heads or full.head_dim % 2:
        allowed = "heads must be a multiple of them, and head_dim even"
        raise UserError(f"layers without a window have {full.num_kv_heads} heads of {full.head_dim} keys, {allowed}")
    return {
        "query_scale": 1.0,
        "local_theta": number(fields, "rope_local_base_freq", gemma.LOCAL_THETA, 1e12),
        "sandwich_norms": True,
        "embedding_scale": math.sqrt(hidden),
        "logit_cap": gemma.read_cap(fields, gemma.LOGIT_CAP),
        "norms_values": True,
        "scales_layers": True,
        "full_heads": full,
        "kv_layers": _kv_layers(slides, first_shared),
        "widths": tuple(middle * (2 if layer >= first_shared else 1) for layer in range(layers)) if is_wide else (),
        "embedding_width": width,
    }


def _embedding_width(fields: Mapping[str, Any]) -> int:
    """Return the entries of a token's embedding for each layer; 0 without."""
    width = size(fields, "hidden_size_per_layer_input", 0, smallest=0)
    tokens, expected = fields.get("vocab_size_per_layer_input"), size(fields, "vocab_size")
    if width and tokens not in (None, expected):
        raise unsupported_field(f"vocab_size_per_layer_input {tokens!r:.50} with vocab_size {expected}")
    return width


def _kv_layers(slides: Sequence[bool], first_shared: int) -> tuple[int, ...]:
    """Return the layer whose keys and values each layer reads: its own, or the last of its kind before the first
    layer that shares. () if all are their own."""
    if first_shared == len(slides):
        return ()
    last = {kind: layer for layer, kind in enumerate(slides[: max(0, first_shared)])}
    if {*slides} - {*last}:
        raise UserError(f"num_kv_shared_layers is {len(slides) - first_shared}: no layer of a kind has its own keys")
    return tuple(layer if layer < first_shared else last[kind] for layer, kind in enumerate(slides))


def read_experts(fields: Mapping[str, Any], num_layers: int) -> ExpertLayers:
    """Read the experts that all layers have besides their MLPs, or none have."""
    if not flag(fields, "enable_moe_block"):
        return None, ()
    count, chosen = size(fields, "num_experts"), size(fields, "num_experts_per_tok")
    width = size(fields, "moe_intermediate_size")
    return Experts(count, chosen, width, is_gelu=True, beside_mlp=True), (True,) * num_layers


def own_name(name: str) -> str:
    """Return the name by which runtimes know a checkpoint's tensor."""
    before, _, layer = name.partition(".layers.")
    number, _, part = layer.partition(".")
    ours = OWN_NAMES.get(part) or (f"mlp.{part}" if part.startswith("experts.") else part)
    return f"{before}.layers.{number}.{ours}" if part else name
