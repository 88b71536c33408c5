"""A model's weight matrices in the kernels' panels, one behind the other in memory that all of them share.

Alone, each would end within a large page, and together they would be held twice while a layer is put together.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any

import numpy as np

from outpace.core.errors import UserError


class Packing:
    """Makes the matrices of one model. Several threads may use it."""

    def __init__(self, kernels: Any, threads: int = 1) -> None:
        self.kernels, self._threads = kernels, threads
        self._packing = Lock()
        self._room = {"room": kernels.Room()} if hasattr(kernels, "Room") else {}  # kernels of before know none

    def of_floats(self, weights: np.ndarray, bias: Sequence[float] = ()) -> Any:
        """float32 [outputs, inputs], rounded to int8; UserError for what that does not hold."""
        try:
            return self.kernels.Matrix(weights, bias, **self._room)
        except ValueError as error:
            shape = " x ".join(map(str, weights.shape))
            raise UserError(f"a matrix of {shape} weights does not fit int8, {error}: use --dtype float32") from error

    def of_file(self, parts: Sequence[tuple[str, np.ndarray]], rows: np.ndarray, inputs: int, **options: Any) -> Any:
        """Rows of tensors in a file's formats: ggml's name and bytes of each; ValueError for what is not finite
        or, in int8, too large.

        By all threads together and one matrix after the other, so that one matrix's part of the file is in memory."""
        order, more = np.ascontiguousarray(rows, np.int32), {"threads": self._threads, **options, **self._room}
        with self._packing:
            return self.kernels.Matrix.stored(parts, order, inputs, **more)
