"""Differences of Phi-3 and Phi-4 from Llama: fused matrices and partial rotation of heads (arXiv:2404.14219).

A checkpoint has queries, keys and values in one matrix, and gates and ups in another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from outpace.core.errors import UserError
from outpace.models.llama.config.fields import number

MODEL_TYPE, ARCHITECTURE = "phi3", "Phi3ForCausalLM"
DEFAULTS: dict[str, Any] = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
QKV, GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"
PART, SHARE = "partial_rotary_factor", "rotated_share"  # a checkpoint's field, and ours
TRAINED, LENGTH = 4096, "original_max_position_embeddings"  # context length of the first training, and its field


def with_rotated_share(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields as `with_share` does, with the context length of the first training added if it is missing."""
    ropes = [fields.get(name) for name in ("rope_scaling", "rope_parameters")]
    says = any(found.get(LENGTH) is not None for found in (fields, *ropes) if isinstance(found, Mapping))
    left = with_share(fields)
    return left if says else left | {LENGTH: TRAINED}


def with_share(fields: Mapping[str, Any], default: float = 1.0) -> dict[str, Any]:
    """Return the fields with the rotated fraction of a head, between 0 and 1, as one field of its own.

    It may also be inside the rotary object.
    """
    found, left = fields.get(PART), {name: value for name, value in fields.items() if name != PART}
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.get(name)
        if isinstance(rope, Mapping):
            found = rope.get(PART) if found is None else found
            left[name] = {key: value for key, value in rope.items() if key != PART}
    left[SHARE] = number({PART: found}, PART, default, 1.0)
    return left


def rotary_dim(part: float, head_dim: int) -> int:
    """Return how many entries of a head are rotated; 0: all. UserError for a fraction that gives no whole pairs."""
    count = int(head_dim * part)
    if count < 2 or count % 2:
        raise UserError(f"{PART} is {part:g}: of {head_dim} entries of a head {count} would turn, which are no pairs")
    return 0 if count == head_dim else count


def head_order(head_dim: int, rotary_dim: int) -> np.ndarray:
    """Return an order of a head's entries with half a head between the members of a rotated pair, as in full rotation.

    The remaining entries become pairs that are not rotated. Products of queries and keys do not change.
    """
    turning, rest = np.arange(rotary_dim or head_dim), np.arange(rotary_dim or head_dim, head_dim)
    halves = [np.concatenate(both) for both in zip(np.split(turning, 2), np.split(rest, 2), strict=True)]
    return np.concatenate(halves)
