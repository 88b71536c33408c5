"""The numbers by which pairs turn, for the native kernels: float32, each rounded once, the same on every machine.

Angles are products in float32, as in the reference; their cosines and sines are taken in float64, for libraries differ
in the last bit of float32 ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outpace.models.llama.config.rope import BLOCK, Rotation


class NativeRopeTable:
    """Cosines and sines of position times frequency, times the scaling's gain, of as many positions as were asked for.

    `table` float32 [positions, rotations * head_dim / 2, cosine then sine]; a position's numbers do not depend on the
    table's size.
    """

    def __init__(self, head_dim: int, rotations: Sequence[Rotation]) -> None:
        self._frequencies = np.concatenate([_frequencies(head_dim, rotation) for rotation in rotations])
        self._gains = np.concatenate([rotation.gains(head_dim) for rotation in rotations])[:, None]
        self.table = np.empty((0, len(self._frequencies), 2), np.float32)

    def reach(self, positions: int) -> None:
        """Makes the table hold at least so many positions; one thread at a time."""
        while positions > len(self.table):
            places = np.arange(len(self.table), len(self.table) + BLOCK, dtype=np.float32)
            angles = np.outer(places, self._frequencies).astype(np.float64)
            pairs = np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)
            self.table = np.concatenate([self.table, pairs * self._gains])


def _frequencies(head_dim: int, rotation: Rotation) -> np.ndarray:
    """By how much each pair turns from one position to the next, float32 [head_dim / 2]."""
    theta, scaling, turning = rotation.theta, rotation.scaling, rotation.dim or head_dim
    exponents = np.arange(0, turning, 2, dtype=np.float32) / np.float32(turning)
    frequencies = np.float32(1) / np.power(theta, exponents, dtype=np.float64).astype(np.float32)
    frequencies = scaling.stretched(frequencies, theta) if scaling else frequencies
    return np.concatenate([frequencies, np.zeros((head_dim - turning) // 2, np.float32)])
