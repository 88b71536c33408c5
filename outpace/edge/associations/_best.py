"""Choose the reachable server with the greatest score."""

from __future__ import annotations

import numpy as np

from outpace.edge.problem import ALONE, SlotProblem


def best_server(problem: SlotProblem, score: np.ndarray) -> np.ndarray:
    """Return the best server by score [devices, servers] of each device."""
    best = np.where(problem.reach, score, -np.inf).argmax(1)
    return np.where(problem.reach.any(1), best, ALONE)
