"""The kernels' operations on numbers in numpy: rounding to int8, sums in a fixed order, exponentials.

Every number is float32 and every operation IEEE; `fma` rounds once, by way of long double (where that has 64 bits of
mantissa or more). Integers are summed exactly, so how they are summed does not matter; float sums have the order that
is written here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

GROUP, PANEL, LANES, MAX_DEPTH, MAX_USED_EXPERTS = 64, 32, 16, 512, 64
HALF, QUARTER = GROUP // 2, GROUP // 4  # inputs of a row share a scale by 32; by 16 if all weights do (Q6_K)
ARITHMETIC = 2  # increase when a change affects the bits of logits
F = np.float32
TINY = F(1e-30)
KV_DTYPES = {"float32": 4, "float16": 2, "int8": 1}  # bytes of an entry of a key or value
SCALED = 32  # entries that share a scale in int8


def fma(a: Any, b: Any, c: Any) -> np.ndarray:
    """Return a * b + c, rounded once."""
    return (np.longdouble(a) * np.longdouble(b) + np.longdouble(c)).astype(F)


def groups_of(x: np.ndarray, size: int = GROUP) -> np.ndarray:
    """Reshape [..., n] to [..., groups, size], padded with zeros."""
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % size)]
    return np.pad(x, padding).reshape(*x.shape[:-1], -1, size)


def quantize(x: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Round activations [..., n] to int8; each `size` share a scale largest / 127, and q = round(x * (127 / largest)).

    Returns q [..., groups * GROUP / size, size] and scales [..., groups * GROUP / size].
    """
    whole = groups_of(x)
    grouped = whole.reshape(*whole.shape[:-2], -1, size)
    top = np.abs(grouped).max(axis=-1)
    is_zero = top <= TINY
    safe = np.where(is_zero, F(1), top)
    factor = np.where(is_zero, F(0), F(127) / safe)
    q = np.rint(grouped * factor[..., None]).astype(np.int8)
    return q, np.where(is_zero, F(0), safe / F(127)).astype(F)


def bfloat16_up(x: np.ndarray) -> np.ndarray:
    """Return the smallest bfloat16 numbers >= x >= 0, as float32."""
    return ((x.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(F)


def half_up(x: np.ndarray) -> np.ndarray:
    """Return the smallest half-precision numbers >= x >= 0, as float32."""
    with np.errstate(over="ignore"):  # overflow gives infinity
        nearest = x.astype(np.float16)
    return (nearest.view(np.uint16) + (nearest.astype(F) < x)).astype(np.uint16).view(np.float16).astype(F)


def as_bytes(x: np.ndarray) -> np.ndarray:
    """Round keys or values [..., depth] to int8; 32 entries share the scale largest / 127, rounded up to bfloat16."""
    grouped = groups_of(x, SCALED)
    top = np.abs(grouped).max(axis=-1)
    scales = np.where(top > TINY, bfloat16_up((top / F(127)).astype(F)), F(0))[..., None]
    q = np.where(scales > 0, np.rint(grouped / np.where(scales > 0, scales, F(1))), F(0))
    whole: np.ndarray = (q * scales).reshape(*x.shape[:-1], -1)
    return whole[..., : x.shape[-1]]


def sum_lanes(x: np.ndarray, squared: bool = False) -> np.ndarray:
    """Sum over the last axis: 16 partial sums by index mod 16, then halves are added four times."""
    blocks = groups_of(x, LANES)
    total = np.zeros((*x.shape[:-1], LANES), F)
    for number in range(blocks.shape[-2]):
        block = blocks[..., number, :]
        total = fma(block, block, total) if squared else total + block
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total[..., 0]


def inverse_rms(x: np.ndarray, epsilon: float) -> np.ndarray:
    """Return 1 / sqrt(mean of squares + epsilon) over the last axis, which is kept."""
    mean = sum_lanes(x, squared=True) / F(x.shape[-1])
    return (F(1) / np.sqrt(mean + F(epsilon)))[..., None]


def exponential(x: np.ndarray) -> np.ndarray:
    """Return e^x = 2^n e^r with n = round(x / ln 2) and a polynomial for e^r, in float32."""
    x = np.minimum(np.maximum(x, F(-86.5)), F(88))
    n = np.rint(x * F(1.44269504))
    r = fma(n, F(-0.693359375), x)
    r = fma(n, F(2.12194440e-4), r)
    p = np.full_like(x, F(1) / F(720))
    for coefficient in (F(1) / F(120), F(1) / F(24), F(1) / F(6), F(0.5), F(1), F(1)):
        p = fma(p, r, coefficient)
    return np.ldexp(p, n.astype(np.int32)).astype(F)


def capped(x: np.ndarray, cap: np.float32) -> np.ndarray:
    """Return cap tanh(x / cap), computed as cap - 2 cap / (1 + e^(2 x / cap))."""
    return fma(F(1) / (F(1) + exponential(x * (F(2) / cap))), F(-2) * cap, cap)


def silu(x: np.ndarray) -> np.ndarray:
    """Return x / (1 + e^-x)."""
    return x / (F(1) + exponential(-x))


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Return 1 / (1 + e^-x)."""
    return F(1) / (F(1) + exponential(-x))


def clamped_gate(gate: np.ndarray, up: np.ndarray, limit: np.float32) -> np.ndarray:
    """Return (up + 1) gate / (1 + e^(-1.702 gate)), gate at most `limit`, up within it on both sides."""
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return (up + F(1)) * (gate / (F(1) + exponential(gate * F(-1.702))))


def gelu(x: np.ndarray) -> np.ndarray:
    """Return x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), computed by e^x."""
    slope = fma(x * x, F(-0.0713548162), F(-1.59576912))
    return x / (F(1) + exponential(x * slope))
