"""What sets Phi-3 and Phi-4 apart from Llama: matrices that stand together, and heads that turn in part (2404.14219).

A checkpoint holds queries, keys and values in one matrix, and gates and ups in another (arXiv:2404.14219).
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
PART = "partial_rotary_factor"
TRAINED, LENGTH = 4096, "original_max_position_embeddings"  # tokens of a text in the first training, and who says it


def read_part(fields: Mapping[str, Any]) -> tuple[Mapping[str, Any], float]:
    """The fields without what they say of the part of a head that turns, and with the length of texts in the first
    training, where they are silent; and that part, between 0 and 1. Both may stand beside the rotary base."""
    found, left = fields.get(PART), {name: value for name, value in fields.items() if name != PART}
    says = fields.get(LENGTH) is not None
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.get(name)
        if isinstance(rope, Mapping):
            found, says = rope.get(PART) if found is None else found, says or rope.get(LENGTH) is not None
            left[name] = {key: value for key, value in rope.items() if key != PART}
    return left if says else left | {LENGTH: TRAINED}, number({PART: found}, PART, 1.0, 1.0)


def rotary_dim(part: float, head_dim: int) -> int:
    """So many entries of a head turn; 0: all of them. UserError for a part that is no whole number of pairs."""
    count = int(head_dim * part)
    if count < 2 or count % 2:
        raise UserError(f"{PART} is {part:g}: of {head_dim} entries of a head {count} would turn, which are no pairs")
    return 0 if count == head_dim else count


def head_order(head_dim: int, rotary_dim: int) -> np.ndarray:
    """Which entry of a head stands at each place, so that pairs that turn together lie half a head apart, as in a head
    that turns as a whole; the others are pairs that stay. Products of queries and keys do not change by it."""
    turning, rest = np.arange(rotary_dim or head_dim), np.arange(rotary_dim or head_dim, head_dim)
    halves = [np.concatenate(both) for both in zip(np.split(turning, 2), np.split(rest, 2), strict=True)]
    return np.concatenate(halves)
