"""Weights as a file has them, laid out for the native kernels: rows chosen and padded, no number rounded anew.

The kernels hold panels of 32 outputs in one format and pad inputs to whole groups. What does not fit that is not taken
here and goes the slower way, by float32: `None` says so. `rounded` to int8, it is the same by either way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from outpace.core.errors import UserError
from outpace.models.llama.footprint import FLOATS
from outpace.models.llama.packing import Packing

PANEL = 32  # outputs that the kernels pack together


class Type(NamedTuple):
    """A format of a file: its name, and how many values and bytes a block of it holds."""

    name: str
    values: int
    bytes: int


Q4_1 = Type("Q4_1", 32, 20)  # to which floats are rounded
INT8_MOST = 127 * 65504.0  # by the largest scale in half precision


@dataclass(frozen=True)
class Stored:
    """The matrix `name` [rows, columns] of the file `path`, in the format `kind`. What the kernels do not take may be
    empty `data`, with any name for its kind.

    `data` uint8 [rows, bytes of a row]; row i is row order[i] of it, int32. `values` gives float32 [rows, columns],
    `forget` the memory of `data` back, where the file stays.
    """

    path: Path
    name: str
    kind: str
    data: np.ndarray
    order: np.ndarray
    columns: int
    values: Callable[[], np.ndarray]
    forget: Callable[[], None]

    def silenced(self) -> Stored:
        """As large, all zeros: so is a block whose bytes, and so its scales, are zeros."""
        return replace(self, data=np.zeros_like(self.data), values=self._zeros)

    def _zeros(self) -> np.ndarray:
        return np.zeros((len(self.order), self.columns), np.float32)


def in_four_bits(kernels: Any, name: str, weights: np.ndarray) -> Stored | None:
    """float32 [rows, columns] in the form of Q4_1: 32 weights share a scale and a smallest value. None for rows that
    are not whole blocks."""
    rows, columns = weights.shape
    if columns % Q4_1.values:
        return None
    data = np.empty((rows, columns // Q4_1.values * Q4_1.bytes), np.uint8)
    kernels.round_to_q4_1(weights, data)
    order = np.arange(rows, dtype=np.int32)
    return Stored(Path(name), name, Q4_1.name, data, order, columns, lambda: weights, lambda: None)


def below_one_another(packing: Packing, parts: Sequence[Stored], bias: Sequence[float], rounded: bool) -> Any:
    """The rows of all parts; None where a panel would have two formats."""
    ends = np.cumsum([len(part.order) for part in parts])
    kinds = [part.kind for part in parts]
    for end, one, other in zip(ends, kinds, kinds[1:], strict=False):
        if one != other and end % PANEL:
            return None
    firsts = [0, *np.cumsum([len(part.data) for part in parts])]
    rows = np.concatenate([part.order + first for part, first in zip(parts, firsts, strict=False)])
    return _made(packing, parts, rows, parts[0].columns, bias=bias, rounded=rounded)


def woven(packing: Packing, parts: Sequence[Stored], middle: int, bias: Sequence[float], rounded: bool) -> Any:
    """16 rows of the first part, 16 of the second, and so on, each part with zeros up to `middle` rows; None where they
    have two formats."""
    if len({part.kind for part in parts}) > 1:
        return None
    first, orders = 0, []
    for part in parts:
        orders.append(np.pad(part.order + first, (0, middle - len(part.order)), constant_values=-1))
        first += len(part.data)
    rows = np.stack([order.reshape(-1, packing.kernels.LANES) for order in orders], axis=1).reshape(-1)
    return _made(packing, parts, rows, parts[0].columns, bias=bias, rounded=rounded)


def chunked(packing: Packing, part: Stored, chunk: int, bias: Sequence[float], rounded: bool) -> Any:
    """Every `chunk` inputs padded to whole groups; None where a block would have to be cut."""
    padding = -chunk % packing.kernels.GROUP
    unit = packing.kernels.FORMATS.get(part.kind, 1)  # of floats, one
    if padding and (unit > packing.kernels.GROUP or chunk % unit):
        return None
    inputs = part.columns // chunk * (chunk + padding)
    return _made(packing, [part], part.order, inputs, chunk=chunk, bias=bias, rounded=rounded)


def _made(packing: Packing, parts: Sequence[Stored], rows: np.ndarray, inputs: int, **options: Any) -> Any:
    data = [(part.kind, part.data) for part in parts]
    try:
        return packing.of_file(data, rows, inputs, **options)
    except ValueError as error:  # of a scale or a float: all else was checked
        if options["rounded"] or parts[0].kind in FLOATS:
            _check_sizes(parts)
        names = " or ".join(repr(part.name) for part in parts)
        raise UserError(f"{parts[0].path} is damaged: tensor {names} holds values that are not finite") from error
    finally:
        for part in parts:
            part.forget()


def _check_sizes(parts: Sequence[Stored]) -> None:
    """UserError where a value is not finite, which `values` finds, or too large for int8."""
    for part in parts:
        most = float(np.abs(part.values()).max())
        if INT8_MOST < most < np.inf:
            raise UserError(
                f"{part.path}: tensor {part.name!r} holds a weight of size {most:.3g}, and int8 holds at most"
                f" {INT8_MOST:.3g}: use --dtype float32"
            )
