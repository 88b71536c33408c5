"""Weights as a file has them, laid out for the native kernels: rows chosen and padded, no number rounded anew.

The kernels hold panels of 32 outputs in one format and pad inputs to whole groups. What does not fit that is not taken
here and goes the slower way, by float32: `None` says so. `rounded` to int8, it is the same by either way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Type(NamedTuple):
    """A format of a file: its name, and how many values and bytes a block of it holds."""

    name: str
    values: int
    bytes: int


Q4_1 = Type("Q4_1", 32, 20)  # to which floats are rounded


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
