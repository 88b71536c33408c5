"""Keyed noise on a GPU in one Triton kernel, bit-equal to `noise.py`, whose operations take thirty launches.

Products and sums are not fused into one rounding, and quotients are rounded as IEEE 754 requires, so the bits are those
of every other device.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outpace.core import noise_constants as constants
from outpace.core.arrays import device_guard

BLOCK = 1024
_FIRST, _SECOND, _THIRD = (tl.constexpr(factor) for factor in constants.FACTORS)
_ROOT, _LOG_2, _UNIT = (
    tl.constexpr(constants.SQRT_HALF_BITS),
    tl.constexpr(-constants.LOG_2),
    tl.constexpr(constants.UNIT),
)


@triton.jit
def _mix(bits, factor):
    bits = bits * factor
    return bits ^ ((bits >> 15) & 0x1FFFF)


@triton.jit
def _minus_log(x, one_minus_x):
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - _ROOT) >> 23
    mantissa = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    s = tl.div_rn(tl.where(exponent == 0, one_minus_x, 1.0 - mantissa), mantissa + 1.0)
    square = s * s
    series = square * (2 / 9)
    series = (series + (2 / 7)) * square
    series = (series + (2 / 5)) * square
    series = (series + (2 / 3)) * square
    return (series + 2.0) * s + exponent.to(tl.float32) * _LOG_2


@triton.jit
def _noise_kernel(words, out, vocab, IS_GUMBEL: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    bits = _mix(token ^ tl.load(words + 2 * row), _FIRST) ^ tl.load(words + 2 * row + 1)
    bits = _mix(_mix(bits, _SECOND), _THIRD)
    v = ((bits & 0x7FFFFFFF).to(tl.float32) + 0.5) * _UNIT
    noise = _minus_log(1.0 - v, v)
    if IS_GUMBEL:
        noise = _minus_log(noise, 1.0 - noise)
    tl.store(out + row * vocab + token, noise, mask=token < vocab)


def noise(words: Tensor, vocab: int, is_gumbel: bool) -> Tensor:
    """Return E ~ Exp(1), or -log E, for every row of `words` int32 [rows, 2] and every token: float32 [rows, vocab]."""
    words, rows = words.contiguous(), len(words)
    out = torch.empty(rows, vocab, dtype=torch.float32, device=words.device)
    if rows and vocab:
        with device_guard(words):
            _noise_kernel[(rows, -(-vocab // BLOCK))](words, out, vocab, is_gumbel, BLOCK, enable_fp_fusion=False)
    return out
