"""Keyed noise: one value per (seed, choice, position, token), independent of the order of calls.

Target and drafter share it (Daliri, Musco, Suresh, arXiv:2408.07978): the target writes argmax(log p + g), so its text
depends on the seed alone. With g = -log E this is the exponential race argmax(p / E), E ~ Exp(1).

The bits are equal on every device and in every process: a 32-bit integer hash of the token is mixed with a 64-bit key
per row, and its logarithm is computed by single IEEE additions, products and divisions. A device's own log may differ
in the last bit, and compilers may not fuse operations across these calls.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from outpace.core.arrays import to_device, torch
from outpace.core.noise_constants import FACTORS, LOG_2, SQRT_HALF_BITS, UNIT

if TYPE_CHECKING:
    from torch import Tensor

# Purposes of a key. 0 is the noise that target and drafters share, keyed by position. The ratio rules key by node ids
# instead, because using a key again in a later round would bias them.
DRAW, ACCEPT, RESIDUAL = 1, 2, 3
PURPOSES = 4

TRIAL_KEY, TRIAL_VOCAB = (0x1234567, -0x7654321), 999  # by which the Triton kernel is tried
TRIAL_SUM = 1057283224303  # of the bits of this noise
_MASK64 = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64's


@lru_cache(4096)  # draft and target use the same positions repeatedly
def row_key(seed: int, choice: int, position: int, purpose: int = 0) -> int:
    """Return 64 bits for (seed, choice, position, purpose), almost never equal: splitmix64's mixer, once per part."""
    key = 0
    for part in (seed, choice, position, purpose):
        key = (key + part + _GOLDEN) & _MASK64
        key = ((key ^ (key >> 30)) * _FIRST) & _MASK64
        key = ((key ^ (key >> 27)) * _SECOND) & _MASK64
        key ^= key >> 31
    return key


def row_words(seed: int, choice: int, positions: np.ndarray) -> np.ndarray:
    """Return `key_words` for many positions, with purpose 0: int32 [positions, 2]."""
    keys = np.zeros(len(positions), np.uint64)
    for part in (np.uint64(seed & _MASK64), np.uint64(choice & _MASK64), positions.astype(np.uint64), np.uint64(0)):
        keys = keys + part + np.uint64(_GOLDEN)
        keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(_FIRST)
        keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(_SECOND)
        keys = keys ^ (keys >> np.uint64(31))
    return keys.astype("<u8").view("<i4").reshape(-1, 2)


def uniform(seed: int, choice: int, position: int, purpose: int = 0) -> float:
    """Return a number in [0, 1) with 53 bits for this key."""
    return (row_key(seed, choice, position, purpose) >> 11) * 2.0**-53


def exponential(keys: Sequence[int], vocab: int, device: torch.device | str = "cpu") -> Tensor:
    """Return E ~ Exp(1) for every row key and every token: float32 [rows, vocab], all above zero."""
    return exponential_from_words(_words(keys, device), vocab)


def gumbel(keys: Sequence[int], vocab: int, device: torch.device | str = "cpu") -> Tensor:
    """Return g = -log E for every row key and every token: float32 [rows, vocab]."""
    return gumbel_from_words(_words(keys, device), vocab)


def exponential_from_words(words: Tensor, vocab: int) -> Tensor:
    """Do as `exponential`, for keys on the device: int32 [rows, 2], as `key_words` returns them."""
    if _has_kernel(words):
        from outpace.core.fused_noise import noise

        return noise(words, vocab, False)
    low, high = words[:, :1], words[:, 1:]  # [rows, 1] each
    bits = torch.arange(vocab, dtype=torch.int32, device=words.device) ^ low  # [rows, vocab]
    _mix(bits, FACTORS[0])
    bits.bitwise_xor_(high)
    _mix(bits, FACTORS[1])
    _mix(bits, FACTORS[2])
    v = bits.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(UNIT)
    return _minus_log(1.0 - v, v)


def gumbel_from_words(words: Tensor, vocab: int) -> Tensor:
    """Do as `gumbel`, for keys on the device."""
    if _has_kernel(words):
        from outpace.core.fused_noise import noise

        return noise(words, vocab, True)
    e = exponential_from_words(words, vocab)
    return _minus_log(e, 1.0 - e)


def key_words(key: int) -> tuple[int, int]:
    """Return a row's key as two signed 32-bit words, the low one first."""
    low, high = ((word & 0xFFFFFFFF) - ((word & 0x80000000) << 1) for word in (key, key >> 32))
    return low, high


def _words(keys: Sequence[int], device: torch.device | str) -> Tensor:
    return to_device([key_words(key) for key in keys], np.int32, device).view(len(keys), 2)


def _has_kernel(words: Tensor) -> bool:
    """Return whether the fused kernel, which gives the same bits, runs on the device."""
    return words.is_cuda and unavailable_reason(words.device) is None


def _mix(bits: Tensor, factor: int) -> None:
    """Multiply int32 in place and fold its high bits into the low by a logical shift, which is bijective."""
    bits.mul_(factor)
    bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF))


def _minus_log(x: Tensor, one_minus_x: Tensor) -> Tensor:
    """Return -log x for positive normal float32 with a relative error below 1e-6, by single IEEE operations only.

    `one_minus_x` is used where x is near 1 and a subtraction would cancel: E keeps its precision down to 2^-32.
    """
    bits = x.view(torch.int32)
    exponent = (bits - SQRT_HALF_BITS).bitwise_right_shift_(23)
    mantissa = (bits - (exponent << 23)).view(torch.float32)  # in [sqrt(1/2), sqrt(2))
    s = torch.where(exponent == 0, one_minus_x, 1.0 - mantissa).div_(mantissa.add_(1.0))
    square = s * s
    series = square * (2 / 9)
    for term in (2 / 7, 2 / 5, 2 / 3):
        series.add_(term).mul_(square)
    return series.add_(2.0).mul_(s).add_(exponent.to(torch.float32).mul_(-LOG_2))


def unavailable_reason(device: torch.device) -> str | None:
    """Return why the Triton kernels do not run on this device; None if they do.

    They are compiled on first use, for which Triton needs a C compiler.
    """
    if device.type != "cuda":
        return f"kernels are for CUDA, not for {device}"
    return _refusal(torch.cuda.current_device() if device.index is None else device.index)


def slow_path_warning(why: str) -> str:
    """Return the message for users of a model that runs without the kernels."""
    return f"passes take up to two times as long as they could: {why}"


@cache
def _refusal(number: int) -> str | None:
    """Run one kernel whose result is known."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    try:
        from outpace.core.fused_noise import noise

        words = torch.tensor([TRIAL_KEY], dtype=torch.int32, device=f"cuda:{number}")
        bits = int(noise(words, TRIAL_VOCAB, False).view(torch.int32).long().sum())
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a missing compiler or an old device raises many kinds of errors
        return f"{type(error).__name__}: {error}"
    return None if bits == TRIAL_SUM else "a kernel gave other bits than it should"
