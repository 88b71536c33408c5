"""Differences of Gemma 2 and 3 from Llama (arXiv:2408.00118, arXiv:2503.19786).

Norms store their weights minus one, and attention and the MLP each have a second norm after them. In Gemma 3 five
layers of six have a sliding window and a rotary base of their own; the sixth sees everything and uses the other base,
which may be scaled. In Gemma 2 every second layer has a window, and scores and logits are capped: cap tanh(x / cap).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from outpace.core.errors import UserError
from outpace.models.llama.config.fields import FULL, SLIDING, number, size, unsupported_field

MODEL_TYPE, ARCHITECTURE = "gemma3_text", "Gemma3ForCausalLM"
THETA, LOCAL_THETA = 1e6, 1e4  # defaults
MLP_NORM = "pre_feedforward_layernorm"
ATTENTION_NORM, MLP_OUTPUT_NORM = "post_attention_layernorm", "post_feedforward_layernorm"  # after each part
DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
PATTERN = 6  # every sixth layer sees the whole text
GEMMA2_TYPE, GEMMA2_ARCHITECTURE = "gemma2", "Gemma2ForCausalLM"
SCORE_CAP, LOGIT_CAP = "attn_logit_softcapping", "final_logit_softcapping"
GEMMA2_DEFAULTS = DEFAULTS | {"vocab_size": 256000, "max_position_embeddings": 8192, SCORE_CAP: 50.0, LOGIT_CAP: 30.0}
LARGEST_CAP = 1e6


def with_flat_rope(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields with one field per rotary number, as in older config.json files.

    transformers 5 writes an object for each type of layer. UserError for an invalid object, UnsupportedModel for scaled
    local layers.
    """
    by_kind = fields.get("rope_parameters")
    if by_kind is None:
        return fields
    kinds = set(by_kind) if isinstance(by_kind, Mapping) else set()
    if not kinds or not kinds <= {FULL, SLIDING} or not all(isinstance(by_kind[kind], Mapping) for kind in kinds):
        raise UserError(f"rope_parameters is {by_kind!r:.200}, it must have an object for {FULL} and one for {SLIDING}")
    full, local = (dict(by_kind.get(kind, {})) for kind in (FULL, SLIDING))
    full_kind, local_kind = (rope.pop("rope_type", rope.pop("type", "default")) for rope in (full, local))
    if local_kind != "default" or set(local) - {"rope_theta"}:
        raise unsupported_field(f"rope_parameters.{SLIDING} {by_kind[SLIDING]!r:.200}")
    flat = {name: value for name, value in fields.items() if name != "rope_parameters"}
    named = {"rope_theta": full.pop("rope_theta", None), "rope_local_base_freq": local.get("rope_theta")}
    if full_kind != "default":
        flat["rope_scaling"] = full | {"rope_type": full_kind}
    return flat | {name: value for name, value in named.items() if value is not None}


def read_constants(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of LlamaConfig that Gemma 3 sets."""
    return {**_common(fields), "local_theta": number(fields, "rope_local_base_freq", LOCAL_THETA, 1e12)}


def read_gemma2(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of LlamaConfig that Gemma 2 sets."""
    return {**_common(fields), "score_cap": read_cap(fields, SCORE_CAP), "logit_cap": read_cap(fields, LOGIT_CAP)}


def read_cap(fields: Mapping[str, Any], name: str) -> float:
    """Return the cap of scores or logits; 0 if there is none."""
    return 0.0 if fields.get(name) is None else number(fields, name, None, LARGEST_CAP)


def _common(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "query_scale": number(fields, "query_pre_attn_scalar", None, 1e6) ** -0.5,
        "sandwich_norms": True,
        "norm_offset": 1.0,
        "embedding_scale": math.sqrt(size(fields, "hidden_size")),
    }


def sliding_layers(fields: Mapping[str, Any], rotates: Sequence[bool]) -> list[bool]:
    """Return which layers have a sliding window if the config has no layer_types."""
    pattern = size(fields, "sliding_window_pattern", PATTERN)
    return [(layer + 1) % pattern != 0 for layer in range(len(rotates))]
