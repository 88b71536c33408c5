"""Rotary embeddings: the base and its scaling from a config.json.

Scalings: linear (Chen et al., arXiv:2306.15595), YaRN (Peng et al., arXiv:2309.00071), Llama 3.1's ("llama3") and
LongRoPE (Ding et al., arXiv:2402.13753), up to the context length of its first training. Scalings that depend on the
length of the text (LongRoPE beyond it, dynamic) are not supported: stored keys would have to be rotated again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from outpace.core.errors import UserError
from outpace.models.llama.config.fields import flag, number, size, unsupported_field

LARGEST_THETA = 1e12
LARGEST_FACTOR = 1e6
BLOCK = 4096  # positions computed at once; a position's factors do not depend on the table's size


@dataclass(frozen=True)
class LinearScaling:
    """Divides all frequencies by `factor`."""

    factor: float
    gain: float = 1.0  # factor of cosines and sines

    def stretched(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """Return the scaled frequencies, float32 [pairs]."""
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Divides slow pairs' frequencies by `factor`; interpolates between slow and fast pairs by rotations per text."""

    factor: float
    slow_turns: float  # low_freq_factor: pairs with fewer rotations in `original` tokens are slow
    fast_turns: float  # high_freq_factor
    original: int
    gain: float = 1.0

    def stretched(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        turns = self.original / (2 * math.pi / frequencies)
        share = ((turns - self.slow_turns) / (self.fast_turns - self.slow_turns)).clip(0, 1)
        return (1 - share) * frequencies / self.factor + share * frequencies


@dataclass(frozen=True)
class YarnScaling:
    """Interpolates linearly over the pairs' indices; multiplies queries and keys by `gain`."""

    factor: float
    slow_turns: float  # beta_slow
    fast_turns: float  # beta_fast
    original: int
    gain: float
    whole_pairs: bool  # whether the ramp's ends are rounded to whole pairs ("truncate")

    def stretched(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        count = len(frequencies)

        def pair(turns: float) -> float:
            """Return the (fractional) index of the pair with this many rotations in `original` tokens."""
            return count * math.log(self.original / (turns * 2 * math.pi)) / math.log(theta)

        first, last = pair(self.fast_turns), pair(self.slow_turns)
        if self.whole_pairs:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * count - 1)
        width = last - first if last != first else 0.001
        slow = ((np.arange(count, dtype=np.float32) - first) / width).clip(0, 1)
        return frequencies / self.factor * slow + frequencies * (1 - slow)


@dataclass(frozen=True)
class LongScaling:
    """Divides each pair's frequency by its own factor, for texts of up to `original` tokens; multiplies by `gain`."""

    factors: tuple[float, ...]  # [rotated pairs]
    original: int
    gain: float

    def stretched(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        return frequencies / np.array(self.factors, np.float32)


@dataclass(frozen=True)
class ProportionalScaling:
    """Leaves all but the fastest pairs, the fraction `share`, unrotated, and divides their frequencies by `factor`."""

    share: float
    factor: float
    gain: float = 1.0

    def stretched(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        turning = np.arange(len(frequencies)) < int(self.share * 2 * len(frequencies) // 2)
        return np.where(turning, frequencies / np.float32(self.factor), np.float32(0))


Scaling = ProportionalScaling | LinearScaling | Llama3Scaling | YarnScaling | LongScaling


class Rotation(NamedTuple):
    """A rotary base, its scaling, and the number of rotated entries of a head (0: all)."""

    theta: float
    scaling: Scaling | None = None
    dim: int = 0

    @property
    def gain(self) -> float:
        """Maximum factor by which rotation lengthens queries and keys."""
        gain = self.scaling.gain if self.scaling else 1.0
        return max(gain, 1.0) if self.dim else gain

    def gains(self, head_dim: int) -> np.ndarray:
        """Return each pair's gain, 1 for pairs that are not rotated: float32 [head_dim / 2]"""
        gains = np.ones(head_dim // 2, np.float32)
        gains[: (self.dim or head_dim) // 2] = self.scaling.gain if self.scaling else 1.0
        return gains


COMMON = {"type", "rope_type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "finetuned"}
OWN = {
    "default": set[str](),
    "linear": {"factor"},
    "proportional": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    "longrope": {"factor", "attention_factor", "short_factor", "long_factor"},
}


def read_rope(fields: Mapping[str, Any], default_theta: float) -> tuple[float, Scaling | None]:
    """Read the rotary base and its scaling: rope_parameters since transformers 5, rope_scaling before."""
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    for given in ("rope_scaling", "rope_parameters"):
        if fields.get(given) is not None and not isinstance(fields[given], Mapping):
            raise UserError(f"{given} is {fields[given]!r:.200}, it must be an object or null")
    rope: Mapping[str, Any] = fields.get(name) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # its name in older config.json files
    if not isinstance(kind, str) or kind not in OWN:
        raise unsupported_field(f"{name} of the type {kind!r:.80} (only {', '.join(OWN)})")
    strange = sorted(str(key) for key in set(rope) - COMMON - OWN[kind])
    if strange or (kind != "proportional" and rope.get("partial_rotary_factor") not in (None, 1, 1.0)):
        raise unsupported_field(f"{name} {dict(rope)!r:.200}")
    inner = {f"{name}.{key}": value for key, value in rope.items()}
    theta = number(fields, "rope_theta", default_theta, LARGEST_THETA)
    theta = number(inner, f"{name}.rope_theta", theta, LARGEST_THETA)
    return theta, _scaling(kind, f"{name}.", inner, fields, theta)


def _scaling(kind: str, at: str, inner: Mapping[str, Any], fields: Mapping[str, Any], theta: float) -> Scaling | None:
    if kind == "default":
        return None
    if kind == "longrope":
        return _long(at, inner, fields)
    if kind == "proportional":
        share = number(inner, at + "partial_rotary_factor", 1.0, 1.0)
        return ProportionalScaling(share, number(inner, at + "factor", 1.0, LARGEST_FACTOR))
    if kind == "linear":
        return LinearScaling(number(inner, at + "factor", None, LARGEST_FACTOR))
    length, declared = "original_max_position_embeddings", size(fields, "max_position_embeddings", 2048)
    # as in transformers, the outer field has precedence, and YaRN's factor may follow from both lengths
    original = size(fields, length, size(inner, at + length, declared))
    factor = number(inner, at + "factor", declared / original if kind == "yarn" else None, LARGEST_FACTOR)
    if kind == "yarn":
        return _yarn(at, inner, factor, original, theta)
    slow, fast = (number(inner, f"{at}{speed}_freq_factor", None, LARGEST_FACTOR) for speed in ("low", "high"))
    if slow >= fast:
        raise UserError(f"{at}low_freq_factor is {slow:g}, it must be below high_freq_factor {fast:g}")
    return Llama3Scaling(factor, slow, fast, original)


def _yarn(at: str, inner: Mapping[str, Any], factor: float, original: int, theta: float) -> YarnScaling:
    if theta <= 1:
        raise UserError(f"rope_theta is {theta:g}, it must be above 1 for yarn")
    fast = number(inner, at + "beta_fast", 32.0, LARGEST_FACTOR)
    slow = number(inner, at + "beta_slow", 1.0, LARGEST_FACTOR)
    over, under = (number(inner, at + name, 0.0, LARGEST_FACTOR) for name in ("mscale", "mscale_all_dim"))
    gain = yarn_gain(factor, over) / yarn_gain(factor, under) if over and under else yarn_gain(factor)
    gain = number(inner, at + "attention_factor", gain, LARGEST_FACTOR)
    return YarnScaling(factor, slow, fast, original, gain, flag(inner, at + "truncate", True))


def _long(at: str, inner: Mapping[str, Any], fields: Mapping[str, Any]) -> LongScaling:
    declared, length = size(fields, "max_position_embeddings", 2048), "original_max_position_embeddings"
    original = size(fields, length, size(inner, at + length, declared))
    factors = inner.get(at + "short_factor")
    listed: list[Any] = factors if isinstance(factors, list) else [None]
    if not all(type(one) in (int, float) and 0 < one <= LARGEST_FACTOR for one in listed):
        raise UserError(f"{at}short_factor is {factors!r:.80}, it must be a list of numbers above 0")
    factor = number(inner, at + "factor", declared / original, LARGEST_FACTOR)
    gain = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    gain = number(inner, at + "attention_factor", gain, LARGEST_FACTOR)
    return LongScaling(tuple(map(float, listed)), original, gain)


def yarn_gain(factor: float, scale: float = 1.0) -> float:
    """Return YaRN's attention gain for a text that is `factor` times as long."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
