"""The scaling of rotary embeddings that a GGUF file speaks of, as config.json writes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from outpace.core.errors import UserError
from outpace.models.files.gguf.header import GgufHeader

ROPE_FACTORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"  # of LongRoPE
ROPE_TENSORS = (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS)
LONG = {"short_factor": SHORT_FACTORS, "long_factor": LONG_FACTORS}
LLAMA3_CONTEXT = 8192  # tokens that every Llama 3 was first trained on


def shortest(value: Any) -> Any:
    """GGUF keeps float32: 1e-5 comes back as 9.99999975e-06, so the shortest decimal of the same float32 is meant."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def read_scaling(header: GgufHeader, own: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The rotary embedding's scaling as config.json writes it; None where there is none."""
    kind, factor = own.get("rope.scaling.type", "none"), own.get("rope.scaling.factor", 1.0)
    trained = own.get("rope.scaling.original_context_length")
    if SHORT_FACTORS in header.tensors:
        return _long_scaling(header, own, trained)
    if ROPE_FACTORS in header.tensors:
        return _llama3_scaling(header, settings, trained)
    if kind == "none" and factor in (0.0, 1.0):
        return None
    if kind not in ("linear", "yarn"):
        shown = f"rope.scaling.type {kind!r:.50} with rope.scaling.factor {factor!r:.50}"
        raise UserError(f"{header.path}: {shown} is not supported, allowed are linear, yarn and none")
    scaling = {"rope_type": kind, "factor": shortest(factor)}
    return scaling | ({"original_max_position_embeddings": trained} if trained and kind == "yarn" else {})


def _long_scaling(header: GgufHeader, own: Mapping[str, Any], trained: Any) -> dict[str, Any]:
    """LongRoPE's: a factor for each pair that turns, for texts as long as those that it was first trained on."""
    factors = {name: _divisors(header, tensor) for name, tensor in LONG.items() if tensor in header.tensors}
    gain = shortest(own.get("rope.scaling.attn_factor"))
    said = {"original_max_position_embeddings": trained, "attention_factor": gain}
    return {"rope_type": "longrope", **factors, **{name: value for name, value in said.items() if value is not None}}


def _divisors(header: GgufHeader, name: str) -> list[float]:
    """Numbers by which frequencies are divided, float32 in the file."""
    entry = header.tensors[name]
    if entry.kind != 0 or len(entry.shape) != 1:
        raise UserError(f"{header.path}: tensor {name!r} is not a list of float32 divisors")
    return [shortest(value) for value in np.frombuffer(header.raw(name), np.float32).tolist()]


def _llama3_scaling(header: GgufHeader, settings: Mapping[str, Any], trained: Any) -> dict[str, Any] | None:
    """Llama 3 as GGUF carries one divisor a frequency; found again are the four numbers that they were made of."""
    entry, theta = header.tensors[ROPE_FACTORS], settings["rope_theta"]
    data = np.frombuffer(header.raw(ROPE_FACTORS), np.uint8)
    if entry.kind != 0 or len(entry.shape) != 1 or not isinstance(theta, float) or not theta > 1:
        raise UserError(f"{header.path}: tensor {ROPE_FACTORS!r} is not a list of float32 divisors")
    divisors = data.view(np.float32).astype(np.float64)  # [head_dim / 2]
    if not np.isfinite(divisors).all() or divisors.min() < 1 - 1e-6:
        raise UserError(f"{header.path} is damaged: tensor {ROPE_FACTORS!r} holds divisors below 1")
    if divisors.max() < 1 + 1e-6:
        return None
    turns = theta ** (-np.arange(len(divisors)) / len(divisors)) / (2 * math.pi)  # turns a token
    factor = shortest(float(divisors.max()))
    contexts = [trained] if isinstance(trained, int) and trained > 0 else []
    for context in [*contexts, LLAMA3_CONTEXT, *_contexts(divisors, turns, factor)]:
        if np.allclose(_llama3_divisors(turns, factor, context), divisors, rtol=1e-4, atol=0):
            numbers = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            return {"rope_type": "llama3", **numbers, "original_max_position_embeddings": context}
    raise UserError(f"{header.path}: tensor {ROPE_FACTORS!r} does not hold the rope scaling of a Llama 3")


def _llama3_divisors(turns: np.ndarray, factor: float, context: int) -> np.ndarray:
    """Frequencies with more than 4 turns in the trained context stay, those with less than 1 are divided by factor."""
    smooth = np.clip((turns * context - 1.0) / 3.0, 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def _contexts(divisors: np.ndarray, turns: np.ndarray, factor: float) -> list[int]:
    """The trained contexts that the divisors between 1 and factor speak of."""
    between = (divisors > 1.001) & (divisors < factor * 0.999)
    smooth = (1.0 / divisors[between] - 1.0 / factor) / (1.0 - 1.0 / factor)
    found = (1.0 + 3.0 * smooth) / turns[between]
    return [round(float(context)) for context in found if 1 <= context < 2**31]
