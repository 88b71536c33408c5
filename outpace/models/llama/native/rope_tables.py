"""The rotary embedding table of the native kernels: float32, each number rounded once, equal on every machine.

Angles are float32 products, as in the reference; their cosines and sines are computed in float64, because libraries
differ in the last bit of float32 ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outpace.models.llama.config.rope import BLOCK, Rotation


class NativeRopeTable:
    """A growing table of cosines and sines of position times frequency, times the scaling's gain.

    `table` float32 [positions, rotations * head_dim / 2, (cosine, sine)]; a position's numbers do not depend on the
    table's size.
    """

    def __init__(self, head_dim: int, rotations: Sequence[Rotation]) -> None:
        self._frequencies = np.concatenate([_frequencies(head_dim, rotation) for rotation in rotations])
        self._gains = np.concatenate([rotation.gains(head_dim) for rotation in rotations])[:, None]
        self.table = np.empty((0, len(self._frequencies), 2), np.float32)

    def reach(self, positions: int) -> None:
        """Grow the table to at least `positions` positions; one thread at a time."""
        while positions > len(self.table):
            block = np.arange(len(self.table), len(self.table) + BLOCK, dtype=np.float32)
            angles = np.outer(block, self._frequencies).astype(np.float64)
            pairs = np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)
            self.table = np.concatenate([self.table, pairs * self._gains])


def _frequencies(head_dim: int, rotation: Rotation) -> np.ndarray:
    """Return the angle of each pair per position: float32 [head_dim / 2]"""
    theta, scaling, rotated = rotation.theta, rotation.scaling, rotation.dim or head_dim
    exponents = np.arange(0, rotated, 2, dtype=np.float32) / np.float32(rotated)
    frequencies = np.float32(1) / np.power(theta, exponents, dtype=np.float64).astype(np.float32)
    frequencies = scaling.stretched(frequencies, theta) if scaling else frequencies
    return np.concatenate([frequencies, np.zeros((head_dim - rotated) // 2, np.float32)])
