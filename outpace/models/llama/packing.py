"""A model's weight matrices in the kernels' panels, one behind the other in memory that all of them share.

Alone, each would end within a large page, and together they would be held twice while a layer is put together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class Packing:
    """Makes the matrices of one model. Several threads may use it."""

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels
        self._room = {"room": kernels.Room()} if hasattr(kernels, "Room") else {}  # kernels of before know none

    def of_floats(self, weights: np.ndarray, bias: Sequence[float] = ()) -> Any:
        """float32 [outputs, inputs], rounded to int8."""
        return self.kernels.Matrix(weights, bias, **self._room)

    def of_file(self, parts: Sequence[tuple[str, np.ndarray]], rows: np.ndarray, inputs: int, **options: Any) -> Any:
        """Rows of tensors in a file's formats: ggml's name and bytes of each; ValueError for what is not finite."""
        return self.kernels.Matrix.stored(parts, np.ascontiguousarray(rows, np.int32), inputs, **options, **self._room)
