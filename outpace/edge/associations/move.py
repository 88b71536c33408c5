"""Start from `greedy`, and move the device that gains most to another server until no move lowers the objective."""

from __future__ import annotations

import numpy as np

from outpace.edge.associations import greedy
from outpace.edge.problem import ALONE, SlotProblem

LEAST_GAIN = 1e-9  # relative, so that rounding ends the search


def associate(problem: SlotProblem, rng: np.random.Generator) -> np.ndarray:
    """Improve the greedy association."""
    return improve(problem, greedy.associate(problem, rng))


def improve(problem: SlotProblem, server: np.ndarray) -> np.ndarray:
    """Return an association that no move of one device improves."""
    server, devices = server.copy(), np.flatnonzero(server != ALONE)
    least = LEAST_GAIN * problem.equal_objective(server)
    while len(devices):
        gains = move_gains(problem, server)[devices]
        device, goal = np.unravel_index(gains.argmax(), gains.shape)
        if gains[device, goal] <= least:
            break
        server[devices[device]] = goal
    return server


def move_gains(problem: SlotProblem, server: np.ndarray) -> np.ndarray:
    """Return by how much the objective falls if a device moves to a server [devices, servers]; 0 for its own."""
    counts, members = problem.counts(server), problem.members(server)
    now, fewer, more = (problem.equal_costs(counts + change) for change in (0, -1, 1))
    total, total_fewer, total_more = (np.where(members, costs, 0.0).sum(0) for costs in (now, fewer, more))
    own_fewer = np.where(members, fewer, 0.0).sum(1)
    leaving = (total - total_fewer)[server] + own_fewer  # what the device's own server gains
    joining = total_more - total + more
    return np.where(members, 0.0, leaving[:, None] - joining)
