"""Let each device draft and verify alone, with both models in its memory: a bound, not an association."""

from __future__ import annotations

import numpy as np

from outpace.edge.problem import ALONE, SlotProblem


def associate(problem: SlotProblem, rng: np.random.Generator) -> np.ndarray:
    """Use no server."""
    return np.full(len(problem.draft), ALONE)
