"""The kernels' products in numpy, with weights in int8 or in a file's format."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outpace_kernels.emulated_formats import FLOATS, Parts, floats_of, parts_of
from outpace_kernels.emulated_numbers import GROUP, HALF, QUARTER, F, fma, groups_of, half_up, quantize

INT8 = "Q8_0"  # the format of rounded floats


class WeightArena:
    """A stand-in for memory that matrices share in the kernels; here each has its own."""


class Matrix:
    """Weights [outputs, inputs] in a file's format or rounded to int8."""

    def __init__(
        self, weights: np.ndarray, bias: Sequence[float] = (), threads: int = 1, arena: WeightArena | None = None
    ) -> None:
        """Round floats to int8."""
        self._hold(weights.shape, [(np.arange(len(weights)), _rounded(weights))], bias)

    def _hold(self, shape: tuple[int, int], sections: list[tuple[np.ndarray, Parts]], bias: Sequence[float]) -> None:
        self.outputs, self.inputs = shape
        self.sections = sections  # outputs of one part, and their weights
        is_by_quarters = all(parts.q.shape[2] == QUARTER for _, parts in self.sections)
        self.shared = QUARTER if is_by_quarters else HALF  # inputs of x that share a scale
        self.bias = np.array(bias, F) if len(bias) else None

    @classmethod
    def stored(
        cls,
        parts: Sequence[tuple[str, np.ndarray]],
        rows: np.ndarray,
        inputs: int,
        chunk: int = 0,
        bias: Sequence[float] = (),
        rounded: bool = False,
        threads: int = 1,
        arena: WeightArena | None = None,
    ) -> Matrix:
        """Take rows of a file: output i is row rows[i] of the concatenated parts, zeros if negative.

        Unless `chunk` is 0, each `chunk` inputs are padded to whole groups. `rounded`: convert to int8, as floats
        always are.
        """
        if parts[0][0] in FLOATS:
            whole = np.concatenate([floats_of(name, data) for name, data in parts])
            chosen = np.where(rows[:, None] >= 0, whole[rows], F(0))
            each = chunk or chosen.shape[1]
            padded = groups_of(chosen.reshape(-1, each)).reshape(len(rows), -1)
            return cls(padded[:, :inputs], bias)
        held, sections, first = cls.__new__(cls), [], 0
        for name, data in parts:
            own = np.flatnonzero((rows >= first) & (rows < first + len(data)))
            if len(own):
                sections.append((own, _padded(parts_of(name, data[rows[own] - first]), chunk)))
            first += len(data)
        held._hold((len(rows), inputs), sections, bias)
        return cls(held.values(), bias) if rounded and {name for name, _ in parts} != {INT8} else held

    def read(self, outputs: np.ndarray, out: np.ndarray) -> None:
        """Return the dequantized weights of some outputs."""
        out[:] = self.values()[outputs]

    def values(self) -> np.ndarray:
        """Return all weights, float32 [outputs, inputs]."""
        whole = np.zeros((self.outputs, self.inputs), F)
        for chosen, (q, c, m) in self.sections:
            values = q.astype(F) * c[..., None]
            values = values if m is None else values + m[..., None]
            whole[chosen] = values.reshape(len(chosen), -1)[:, : self.inputs]
        return whole

    def __call__(self, x: np.ndarray, shared: int = 0) -> np.ndarray:
        """Round x [rows, inputs] float32 to int8 and return W x + bias [rows, outputs], adding part after part.

        `shared`: the number of inputs that share a scale, by default the matrix's own.
        """
        total = np.zeros((len(x), self.outputs), F)
        for chosen, parts in self.sections:
            total[:, chosen] = _times(parts, *quantize(x, shared or self.shared))
        return total if self.bias is None else total + self.bias


def read_rows(name: str, rows: np.ndarray, columns: int) -> np.ndarray:
    """Return rows of a file's tensor: float32 [rows, columns]"""
    if name in FLOATS:
        return floats_of(name, rows)
    return Matrix.stored([(name, rows)], np.arange(len(rows)), columns).values()


def _rounded(weights: np.ndarray) -> Parts:
    """Round floats to int8; 32 of an output share the scale largest / 127, rounded up to half precision.

    Raises:
        ValueError: if a weight is not finite or too large.
    """
    if not np.isfinite(weights).all():
        raise ValueError("a weight is not finite")
    whole = groups_of(weights)
    grouped = whole.reshape(len(weights), -1, HALF)
    scales = half_up((np.abs(grouped).max(axis=-1) / F(127)).astype(F))
    if np.isinf(scales).any():
        raise ValueError("a weight is too large for int8: above 8.3 million")
    q = np.rint(grouped / np.where(scales > 0, scales, F(1))[..., None])
    return Parts(q.astype(np.int16), scales, None)


def _padded(parts: Parts, chunk: int) -> Parts:
    """Pad each `chunk` inputs, or the whole row if it is 0, with zeros to whole groups."""
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
    """Multiply activations int8 [rows, shares, inputs of a share] with their scales by weights: [rows, outputs]."""
    count = values.shape[2] // parts.q.shape[2]  # parts per scale
    total = np.zeros((len(values), len(parts.q)), F)
    for part in range(parts.q.shape[1]):
        share, at = divmod(part, count)
        a = values[:, share].reshape(len(values), count, -1)[:, at].astype(np.int32)
        sums = a @ parts.q[:, part].astype(np.int32).T
        total = fma(sums.astype(F), parts.c[None, :, part] * scales[:, share, None], total)
        if parts.m is not None:
            mins = scales[:, share] * a.sum(-1).astype(F)
            total = fma(parts.m[None, :, part], mins[:, None], total)
    return total
