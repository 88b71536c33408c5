"""The kernels' products, in numpy: weights in int8, or as a file has them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outpace_kernels.emulated_formats import FLOATS, Parts, floats_of, parts_of
from outpace_kernels.emulated_numbers import GROUP, TINY, F, bfloat16_up, fma, groups_of, quantize

HALF = GROUP // 2  # inputs whose activations share a scale beside a file's weights


class Room:
    """Memory that matrices share in the kernels; here each has its own."""


class Matrix:
    """Weights [outputs, inputs] in int8; a scale is (largest of the group / 127) rounded up to bfloat16."""

    def __init__(
        self, weights: np.ndarray, bias: Sequence[float] = (), threads: int = 1, room: Room | None = None
    ) -> None:
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
        room: Room | None = None,
    ) -> StoredMatrix | Matrix:
        """What a file holds; see `StoredMatrix`. `rounded`: in int8, as floats are in any case."""
        if parts[0][0] in FLOATS:
            whole = np.concatenate([floats_of(name, data) for name, data in parts])
            chosen = np.where(rows[:, None] >= 0, whole[rows], F(0))
            each = chunk or chosen.shape[1]
            padded = groups_of(chosen.reshape(-1, each)).reshape(len(rows), -1)
            return Matrix(padded[:, :inputs], bias)
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
            total[:, chosen] = _times(parts, *quantize(x, HALF))
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
    """Activations int8 [rows, halves of groups, HALF] with their scales times weights: [rows, outputs]."""
    count = HALF // parts.q.shape[2]  # parts of a half
    total = np.zeros((len(values), len(parts.q)), F)
    for part in range(parts.q.shape[1]):
        half, at = divmod(part, count)
        a = values[:, half].reshape(len(values), count, -1)[:, at].astype(np.int32)
        sums = a @ parts.q[:, part].astype(np.int32).T
        total = fma(sums.astype(F), parts.c[None, :, part] * scales[:, half, None], total)
        if parts.m is not None:
            mins = scales[:, half] * a.sum(-1).astype(F)
            total = fma(parts.m[None, :, part], mins[:, None], total)
    return total
