"""The kernels' arithmetic in numpy: slow, to be read, and bit by bit what the kernels give.

It has the kernels' names and signatures, so a model can be built from it in their place. Every number is float32 and
every operation IEEE; `fma` rounds once, by way of long double (where that has 64 bits of mantissa or more). Integers
are summed exactly, so how they are summed does not matter; float sums have the order that is written here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outpace_kernels.emulated_formats import FORMATS as FILE_FORMATS
from outpace_kernels.emulated_formats import Parts, parts_of

GROUP, LANES, MAX_DEPTH = 64, 16, 256
F = np.float32
TINY = F(1e-30)
FORMATS = {name: form.inputs for name, form in FILE_FORMATS.items()}


def instruction_sets() -> list[str]:
    """What stands for those of the kernels."""
    return ["emulation"]


def fma(a: Any, b: Any, c: Any) -> np.ndarray:
    """a * b + c, rounded once."""
    return (np.longdouble(a) * np.longdouble(b) + np.longdouble(c)).astype(F)


def groups_of(x: np.ndarray, size: int = GROUP) -> np.ndarray:
    """[..., n] to [..., groups, size], with zeros at the end."""
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % size)]
    return np.pad(x, padding).reshape(*x.shape[:-1], -1, size)


def quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Activations [..., n] to int8 groups and their scales: largest / 127, q = round(x * (127 / largest))."""
    grouped = groups_of(x)
    top = np.abs(grouped).max(axis=-1)
    is_zero = top <= TINY
    safe = np.where(is_zero, F(1), top)
    factor = np.where(is_zero, F(0), F(127) / safe)
    q = np.rint(grouped * factor[..., None]).astype(np.int8)
    return q, np.where(is_zero, F(0), safe / F(127)).astype(F)


def bfloat16_up(x: np.ndarray) -> np.ndarray:
    """The smallest bfloat16 numbers not below x >= 0, as float32."""
    return ((x.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(F)


def sum_lanes(x: np.ndarray, squared: bool = False) -> np.ndarray:
    """Sum over the last axis: 16 partial sums by index mod 16, then halves of them added three times and once more."""
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
    """1 / sqrt(mean of squares + epsilon) over the last axis, kept as an axis of one."""
    mean = sum_lanes(x, squared=True) / F(x.shape[-1])
    return (F(1) / np.sqrt(mean + F(epsilon)))[..., None]


def exponential(x: np.ndarray) -> np.ndarray:
    """e^x = 2^n e^r: n = round(x / ln 2), a polynomial for e^r, both in float32."""
    x = np.minimum(np.maximum(x, F(-86.5)), F(88))
    n = np.rint(x * F(1.44269504))
    r = fma(n, F(-0.693359375), x)
    r = fma(n, F(2.12194440e-4), r)
    p = np.full_like(x, F(1) / F(720))
    for coefficient in (F(1) / F(120), F(1) / F(24), F(1) / F(6), F(0.5), F(1), F(1)):
        p = fma(p, r, coefficient)
    return np.ldexp(p, n.astype(np.int32)).astype(F)


def silu(x: np.ndarray) -> np.ndarray:
    """x / (1 + e^-x)"""
    return x / (F(1) + exponential(-x))


class Matrix:
    """Weights [outputs, inputs] in int8; a scale is (largest of the group / 127) rounded up to bfloat16."""

    def __init__(self, weights: np.ndarray, bias: Sequence[float] = (), threads: int = 1) -> None:
        self.outputs, self.inputs = weights.shape
        grouped = groups_of(weights)
        top = np.abs(grouped).max(axis=-1)
        self.scales = np.where(top > TINY, bfloat16_up((top / F(127)).astype(F)), F(0))  # [outputs, groups]
        divisor = np.where(self.scales > 0, self.scales, F(1))[..., None]
        self.q = np.where(self.scales[..., None] > 0, np.rint(grouped / divisor), 0).astype(np.int8)
        self.bias = np.array(bias, F) if len(bias) else None

    def read(self, outputs: np.ndarray, out: np.ndarray) -> None:
        """The weights of some outputs as they are used."""
        rows = self.q[outputs].astype(F) * self.scales[outputs][..., None]
        out[:] = rows.reshape(len(outputs), -1)[:, : self.inputs]

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """x [rows, inputs] float32, rounded to int8, to W x + bias [rows, outputs]: group after group."""
        q, scales = quantize(x)
        total = np.zeros((len(x), self.outputs), F)
        for group in range(self.q.shape[1]):
            sums = q[:, group].astype(np.int32) @ self.q[:, group].astype(np.int32).T
            total = fma(sums.astype(F), self.scales[None, :, group] * scales[:, group, None], total)
        return total if self.bias is None else total + self.bias

    @staticmethod
    def stored(
        parts: Sequence[tuple[str, np.ndarray]],
        rows: np.ndarray,
        inputs: int,
        chunk: int = 0,
        bias: Sequence[float] = (),
        rounded: bool = False,
        threads: int = 1,
    ) -> StoredMatrix | Matrix:
        """What a file holds; see `StoredMatrix`. `rounded`: in int8."""
        held = StoredMatrix(parts, rows, inputs, chunk, bias)
        return Matrix(held.values(), bias) if rounded else held


class StoredMatrix:
    """Rows of a file's tensors as they are. Output i is row rows[i] of all parts one behind the other, zeros below 0;
    where `chunk` is not 0, so many inputs each are padded to whole groups."""

    def __init__(
        self, parts: Sequence[tuple[str, np.ndarray]], rows: np.ndarray, inputs: int, chunk: int, bias: Sequence[float]
    ) -> None:
        self.outputs, self.inputs = len(rows), inputs
        self.sections: list[tuple[np.ndarray, Parts]] = []  # outputs of one part, and their weights
        first = 0
        for name, data in parts:
            chosen = np.flatnonzero((rows >= first) & (rows < first + len(data)))
            self.sections.append((chosen, _padded(parts_of(name, data[rows[chosen] - first]), chunk)))
            first += len(data)
        self.bias = np.array(bias, F) if len(bias) else None

    def read(self, outputs: np.ndarray, out: np.ndarray) -> None:
        """The weights of some outputs as they are used."""
        out[:] = self.values()[outputs]

    def values(self) -> np.ndarray:
        """All weights, float32 [outputs, inputs]."""
        whole = np.zeros((self.outputs, self.inputs), F)
        for chosen, (q, c, m) in self.sections:
            values = q.astype(F) * c[..., None]
            values = values if m is None else values + m[..., None]
            whole[chosen] = values.reshape(len(chosen), -1)[:, : self.inputs]
        return whole

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """x [rows, inputs] float32, rounded to int8, to W x + bias [rows, outputs]: part after part."""
        total = np.zeros((len(x), self.outputs), F)
        for chosen, parts in self.sections:
            total[:, chosen] = _times(parts, *quantize(x))
        return total if self.bias is None else total + self.bias


def _padded(parts: Parts, chunk: int) -> Parts:
    """Every `chunk` inputs are followed by zeros up to whole groups; without it the row is."""
    inputs = parts.q.shape[2]
    each = chunk // inputs or parts.q.shape[1]
    more = -each % (GROUP // inputs)

    def widened(values: np.ndarray) -> np.ndarray:
        by_chunk = values.reshape(len(values), -1, each, *values.shape[2:])
        padding = [(0, 0)] * by_chunk.ndim
        padding[2] = (0, more)
        return np.pad(by_chunk, padding).reshape(len(values), -1, *values.shape[2:])

    return Parts(widened(parts.q), widened(parts.c), None if parts.m is None else widened(parts.m))


def _times(parts: Parts, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Activations int8 [rows, groups, GROUP] with their scales times weights: [rows, outputs]."""
    count = GROUP // parts.q.shape[2]  # parts of a group
    total = np.zeros((len(values), len(parts.q)), F)
    for part in range(parts.q.shape[1]):
        group, at = divmod(part, count)
        a = values[:, group].reshape(len(values), count, -1)[:, at].astype(np.int32)
        sums = a @ parts.q[:, part].astype(np.int32).T
        total = fma(sums.astype(F), parts.c[None, :, part] * scales[:, group, None], total)
        if parts.m is not None:
            mins = scales[:, group] * a.sum(-1).astype(F)
            total = fma(parts.m[None, :, part], mins[:, None], total)
    return total


@dataclass
class Layer:
    """One layer's weights, as the kernels take them."""

    attention_norm: np.ndarray
    mlp_norm: np.ndarray
    qkv: Matrix | StoredMatrix
    output: Matrix | StoredMatrix
    gate_up: Matrix | StoredMatrix
    down: Matrix | StoredMatrix
    query_norm: Sequence[float] = field(default_factory=list)
    key_norm: Sequence[float] = field(default_factory=list)
    turns: bool = True


@dataclass
class Heads:
    """The sizes of attention."""

    queries: int
    keys: int
    depth: int
    is_half: bool
    epsilon: float


class Store:
    """Keys and values [layers, 2, kv_heads, slots, depth]."""

    def __init__(self, heads: Heads, layers: int, capacity: int, slots: int = -1) -> None:
        self.is_half = heads.is_half
        self.data = np.zeros((layers, 2, heads.keys, capacity if slots < 0 else slots, heads.depth), F)

    @staticmethod
    def bytes_of(heads: Heads, layers: int, slots: int) -> int:
        """What so many slots take."""
        return layers * 2 * heads.keys * slots * heads.depth * (2 if heads.is_half else 4)

    def resize(self, slots: int) -> None:
        """Makes or forgets slots at the end."""
        kept = self.data[..., :slots, :]
        more = np.zeros((*kept.shape[:3], slots - kept.shape[3], kept.shape[4]), F)
        self.data = np.concatenate([kept, more], axis=3)

    def put(self, layer: int, slot: int, keys: np.ndarray, values: np.ndarray) -> None:
        """One slot of one layer: [kv_heads, depth] twice."""
        both = np.stack([keys, values])
        self.data[layer, :, :, slot] = both.clip(-65504, 65504).astype(np.float16) if self.is_half else both

    def move(self, source: Sequence[int], start: int) -> None:
        """Slots `source` to start, start + 1, ..."""
        self.data[..., start : start + len(source), :] = self.data[..., source, :]

    def copy(self, other: Store, count: int) -> None:
        """The first `count` slots of another store."""
        self.data[..., :count, :] = other.data[..., :count, :]

    def read(self, layer: int, count: int, out: np.ndarray) -> None:
        """One layer's first `count` slots."""
        out[:] = self.data[layer, :, :, :count]


class Model:
    """A model, as the kernels take it; `instruction_set` and `threads` change nothing."""

    instruction_set = instruction_sets()[0]

    def __init__(
        self,
        heads: Heads,
        hidden: int,
        middle: int,
        epsilon: float,
        layers: Sequence[Layer],
        embedding: Matrix | StoredMatrix,
        norm: np.ndarray,
        head: Matrix | StoredMatrix,
        instruction_set: str,
        threads: int,
    ) -> None:
        self.heads, self.epsilon, self.layers = heads, epsilon, layers
        self.embedding, self.norm, self.head, self.outputs = embedding, norm, head, head.outputs

    def forward(
        self, spans: Sequence[Any], tokens: np.ndarray, turns: np.ndarray, wanted: np.ndarray, scores: np.ndarray
    ) -> None:
        """Scores of the wanted rows; see `outpace_kernels.Model.forward`."""
        x = np.empty((len(tokens), self.embedding.inputs), F)
        self.embedding.read(tokens, x)
        for number, layer in enumerate(self.layers):
            mixed = layer.qkv(self._normed(x, layer.attention_norm))
            x = x + layer.output(self._attend(number, mixed, turns, spans))
            both = layer.gate_up(self._normed(x, layer.mlp_norm)).reshape(len(x), -1, 2, LANES)
            x = x + layer.down((silu(both[:, :, 0]) * both[:, :, 1]).reshape(len(x), -1))
        if len(wanted):
            scores[:] = self.head(self._normed(x[wanted], self.norm))

    def _normed(self, x: np.ndarray, norm: np.ndarray) -> np.ndarray:
        return x * inverse_rms(x, self.epsilon) * norm

    def _attend(self, number: int, mixed: np.ndarray, turns: np.ndarray, spans: Sequence[Any]) -> np.ndarray:
        """Every row's heads, each padded to whole groups: [rows, heads * padded depth]."""
        heads, layer = self.heads, self.layers[number]
        parts = mixed.reshape(len(mixed), -1, heads.depth)
        queries, keys, values = np.split(parts, [heads.queries, heads.queries + heads.keys], axis=1)
        still = np.broadcast_to(np.array([1, 0], F), turns.shape)
        angles = turns if layer.turns else still
        queries = self._turned(queries, layer.query_norm, angles) * (F(1) / np.sqrt(F(heads.depth)))
        keys = self._turned(keys, layer.key_norm, angles)
        out, row = [], 0
        for store, committed, pending, count, sees in spans:
            for node in range(count):
                store.put(number, committed + pending + node, keys[row + node], values[row + node])
            for node in range(count):
                slots = [*range(committed), *(committed + np.flatnonzero(sees[node]))]
                out.append(self._mix(queries[row + node], *store.data[number][:, :, slots]))
            row += count
        return groups_of(np.stack(out)).reshape(len(mixed), -1)

    def _turned(self, x: np.ndarray, norm: Sequence[float], turns: np.ndarray) -> np.ndarray:
        """Heads [rows, heads, depth] normed where there is a norm, their pairs (i, i + depth / 2) turned."""
        if len(norm):
            x = x * inverse_rms(x, self.heads.epsilon) * np.array(norm, F)
        first, second = np.split(x, 2, axis=-1)
        cosine, sine = turns[:, None, :, 0], turns[:, None, :, 1]
        return np.concatenate([fma(first, cosine, -(second * sine)), fma(first, sine, second * cosine)], axis=-1)

    def _mix(self, queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        """One row: softmax(queries keys) values, position after position. [heads, depth]"""
        group = self.heads.queries // self.heads.keys
        keys, values = np.repeat(keys, group, axis=0), np.repeat(values, group, axis=0)  # [heads, positions, depth]
        scores = np.zeros(keys.shape[:2], F)
        for entry in range(self.heads.depth):
            scores = fma(queries[:, entry, None], keys[:, :, entry], scores)
        weights = exponential(scores - scores.max(axis=-1, keepdims=True))
        total = np.zeros_like(queries)
        for position in range(keys.shape[1]):
            total = fma(weights[:, position, None], values[:, position], total)
        return total * (F(1) / sum_lanes(weights))[:, None]
