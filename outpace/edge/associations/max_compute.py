"""Give each device the fastest server in reach: the paper's third baseline. The channel decides between equal ones."""

from __future__ import annotations

import numpy as np

from outpace.edge.associations._best import best_server
from outpace.edge.problem import SlotProblem


def associate(problem: SlotProblem, rng: np.random.Generator) -> np.ndarray:
    """Minimise the time of a pass, then that of the link."""
    order = np.lexsort((problem.link, np.broadcast_to(problem.verify, problem.link.shape)), axis=1)
    return best_server(problem, -order.argsort(1))
