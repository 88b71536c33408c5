"""Give each device a random server in reach: the paper's first baseline."""

from __future__ import annotations

import numpy as np

from outpace.edge.associations._best import best_server
from outpace.edge.problem import SlotProblem


def associate(problem: SlotProblem, rng: np.random.Generator) -> np.ndarray:
    """Draw the servers uniformly."""
    return best_server(problem, rng.random(problem.link.shape))
