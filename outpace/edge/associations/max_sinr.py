"""Give each device the server with the best channel: the paper's second baseline, and what phone networks do today."""

from __future__ import annotations

import numpy as np

from outpace.edge.associations._best import best_server
from outpace.edge.problem import SlotProblem


def associate(problem: SlotProblem, rng: np.random.Generator) -> np.ndarray:
    """Minimise the time of the link."""
    return best_server(problem, -problem.link)
