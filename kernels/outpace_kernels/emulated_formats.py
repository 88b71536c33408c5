"""Decode the blocks of a file in numpy: weights c * (q - bias) + m, with c and m for each part of a row.

The formats are ggml's (https://github.com/ggml-org/ggml, ggml-quants.c); U4_32 and U4_64 are ours, for what GPTQ and
AWQ write: c * (q - zero), held as c and -zero. Every number is exact in float32. A function with the name of a format
takes its blocks, uint8 [rows, blocks, bytes of a block].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

F = np.float32
MXFP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int16)  # twice what nibbles mean
IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int16)


def round_to_q4_1(weights: np.ndarray, out: np.ndarray) -> None:
    """Round weights float32 [rows, columns], columns a multiple of 32, to the blocks of Q4_1, uint8 [rows, bytes].

    Among the range of 32 weights and 12 narrower ones, the one with the least sum of squared errors is used."""
    blocks = weights.reshape(-1, 32)
    low, high = blocks.min(axis=1), blocks.max(axis=1)
    ends = [(low, high)]
    for narrowing in range(1, 5):
        share = F(1) - F(0.04) * F(narrowing)
        ends += [(low * share, high), (low, high * share), (low * share, high * share)]
    best = np.full(len(blocks), np.inf, F)
    numbers, levels = np.zeros((len(blocks), 2), np.float16), np.zeros(blocks.shape, np.uint8)
    for start, end in ends:
        c, m = ((end - start) / F(15)).astype(np.float16), start.astype(np.float16)
        scale, least = c.astype(F)[:, None], m.astype(F)[:, None]
        inverse = np.where(scale > 0, F(1) / np.where(scale > 0, scale, F(1)), F(0))
        q = np.clip(np.rint((blocks - least) * inverse), F(0), F(15))
        squares = (q * scale + least - blocks) ** 2
        sums, error = squares[:, :16] + squares[:, 16:], np.zeros(len(blocks), F)
        for column in sums.T:
            error = error + column
        found = error < best
        best[found], levels[found] = error[found], q[found].astype(np.uint8)
        numbers[found, 0], numbers[found, 1] = c[found], m[found]
    packed = out.reshape(-1, FORMATS["Q4_1"].bytes)
    packed[:, :4] = numbers.view(np.uint8)
    packed[:, 4:] = levels[:, :16] | levels[:, 16:] << 4


class Parts(NamedTuple):
    """`q` int16 [rows, parts, inputs of a part], less the bias; `c` float32 [rows, parts]; `m` so too, or None."""

    q: np.ndarray
    c: np.ndarray
    m: np.ndarray | None


def half(block: np.ndarray, start: int) -> np.ndarray:
    """Return two bytes of every block as a half-precision number: float32 [rows, blocks]."""
    return np.ascontiguousarray(block[..., start : start + 2]).view(np.float16)[..., 0].astype(F)


def nibbles(data: np.ndarray) -> np.ndarray:
    """Return the lower nibbles of some bytes, then the upper ones."""
    return np.concatenate([data & 15, data >> 4], axis=-1).astype(np.int16)


def single_bits(data: np.ndarray) -> np.ndarray:
    """Return the bits of bytes, the lowest first."""
    return np.unpackbits(data, axis=-1, bitorder="little").astype(np.int16)


def q4_0(block: np.ndarray) -> Parts:
    """Decode c and nibbles with a bias of 8."""
    return Parts(nibbles(block[..., 2:]) - 8, half(block, 0), None)


def q4_1(block: np.ndarray) -> Parts:
    """Decode c, m and nibbles."""
    return Parts(nibbles(block[..., 4:]), half(block, 0), half(block, 2))


def q5_0(block: np.ndarray) -> Parts:
    """Decode c, the fifth bits and nibbles, with a bias of 16."""
    return Parts(nibbles(block[..., 6:]) + 16 * single_bits(block[..., 2:6]) - 16, half(block, 0), None)


def q5_1(block: np.ndarray) -> Parts:
    """Decode c, m, the fifth bits and nibbles."""
    return Parts(nibbles(block[..., 8:]) + 16 * single_bits(block[..., 4:8]), half(block, 0), half(block, 2))


def q8_0(block: np.ndarray) -> Parts:
    """Decode c and signed bytes."""
    return Parts(block[..., 2:].view(np.int8).astype(np.int16), half(block, 0), None)


def iq4_nl(block: np.ndarray) -> Parts:
    """Decode c and nibbles that select one of sixteen numbers."""
    return Parts(IQ4_NL[nibbles(block[..., 2:])], half(block, 0), None)


def mxfp4(block: np.ndarray) -> Parts:
    """Decode the exponent of c, a power of two, and nibbles that select one of sixteen numbers."""
    return Parts(MXFP4[nibbles(block[..., 1:])], np.ldexp(F(1), block[..., 0].astype(np.int32) - 128), None)


def six_bits(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Decode twelve bytes as eight c and eight m of six bits: [rows, blocks, 8] twice."""
    first, second, third = (data[..., i : i + 4] for i in (0, 4, 8))
    c = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=-1)
    m = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=-1)
    return c.astype(F), m.astype(F)


def k_parts(block: np.ndarray, low: np.ndarray, high: np.ndarray | int) -> Parts:
    """Decode eight parts of 32: the lower nibbles of 32 bytes, then the upper ones. `high`: shifted fifth bits."""
    by_32 = low.reshape(*low.shape[:-1], 4, 32)
    q = np.stack([by_32 & 15, by_32 >> 4], axis=-2).reshape(*low.shape[:-1], 8, 32).astype(np.int16) + high
    c, m = six_bits(block[..., 4:16])
    return Parts(q, half(block, 0)[..., None] * c, -half(block, 2)[..., None] * m)


def q4_k(block: np.ndarray) -> Parts:
    """Decode 256 inputs in eight parts: factors of c and m, c and m in six bits, nibbles."""
    return k_parts(block, block[..., 16:], 0)


def q5_k(block: np.ndarray) -> Parts:
    """Decode 256 inputs in eight parts: as q4_k, with the fifth bits before the nibbles."""
    fifth = block[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # bit i of 32 bytes: part i
    return k_parts(block, block[..., 48:], 16 * fifth.astype(np.int16))


def q6_k(block: np.ndarray) -> Parts:
    """Decode 256 inputs in sixteen parts: nibbles, upper two bits, c in a byte, its factor; a bias of 32."""
    low = block[..., :128].reshape(*block.shape[:-1], 2, 1, 64) >> np.array([[0], [4]], np.uint8) & 15
    pairs = block[..., 128:192].reshape(*block.shape[:-1], 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8) & 3
    q = low.reshape(*block.shape[:-1], 256) | pairs.reshape(*block.shape[:-1], 256) << 4
    c = half(block, 208)[..., None] * np.ascontiguousarray(block[..., 192:208]).view(np.int8).astype(F)
    return Parts(q.astype(np.int16).reshape(*block.shape[:-1], 16, 16) - 32, c, None)


def u4(block: np.ndarray) -> Parts:
    """Decode four bytes of c and -zero, shared by all inputs, then 16 bytes for every 32 inputs."""
    q = nibbles(block[..., 4:].reshape(*block.shape[:-1], -1, 16))
    c = np.repeat(half(block, 0)[..., None], q.shape[-2], axis=-1)
    return Parts(q, c, c * half(block, 2)[..., None])


class Format(NamedTuple):
    """Inputs and bytes of a block, and its decoder."""

    inputs: int
    bytes: int
    parts: Callable[[np.ndarray], Parts]


FORMATS = {
    "Q4_0": Format(32, 18, q4_0),
    "Q4_1": Format(32, 20, q4_1),
    "Q5_0": Format(32, 22, q5_0),
    "Q5_1": Format(32, 24, q5_1),
    "Q8_0": Format(32, 34, q8_0),
    "IQ4_NL": Format(32, 18, iq4_nl),
    "MXFP4": Format(32, 17, mxfp4),
    "Q4_K": Format(256, 144, q4_k),
    "Q5_K": Format(256, 176, q5_k),
    "Q6_K": Format(256, 210, q6_k),
    "U4_32": Format(32, 20, u4),
    "U4_64": Format(64, 36, u4),
}


FLOATS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # formats of floats, which are rounded


def floats_of(name: str, data: np.ndarray) -> np.ndarray:
    """Convert rows of floats in a file, uint8 [rows, bytes], to float32. Raise ValueError if one is not finite."""
    values = np.ascontiguousarray(data).view(FLOATS[name])
    values = (values.astype(np.uint32) << 16).view(F) if name == "BF16" else values.astype(F)
    if not np.isfinite(values).all():
        raise ValueError("a weight is not finite")
    return values


def parts_of(name: str, data: np.ndarray) -> Parts:
    """Decode rows of a tensor in a file, uint8 [rows, bytes]; parts have 32 inputs, 16 for Q6_K."""
    form = FORMATS[name]
    found = form.parts(data.reshape(len(data), -1, form.bytes))
    q = found.q.reshape(len(data), -1, 16 if name == "Q6_K" else 32)
    c, m = (None if part is None else part.reshape(len(data), -1) for part in found[1:])
    assert c is not None
    return Parts(q, c, m)
