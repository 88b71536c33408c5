"""Match in two phases as the paper does: best channels under a quota, then exchanges that lower the objective.

The quota is the mean number of devices per server, rounded up. In the second phase, which has no quota, a device can
also move alone. The paper's condition may accept an exchange that raises the objective; here it must lower it.
"""

from __future__ import annotations

import numpy as np

from outpace.edge.associations.move import LEAST_GAIN, improve
from outpace.edge.problem import ALONE, SlotProblem


def associate(problem: SlotProblem, rng: np.random.Generator) -> np.ndarray:
    """Match by channels, then exchange devices."""
    return exchange(problem, match_by_channel(problem))


def match_by_channel(problem: SlotProblem) -> np.ndarray:
    """Assign devices in the order of link times, up to the quota. A device that finds all servers full exceeds one."""
    devices, servers = problem.link.shape
    server, free = np.full(devices, ALONE), np.full(servers, -(-devices // servers))
    by_link = np.unravel_index(problem.link.argsort(axis=None), problem.link.shape)
    for device, goal in zip(*by_link, strict=True):
        if server[device] == ALONE and free[goal] and problem.reach[device, goal]:
            server[device] = goal
            free[goal] -= 1
    left_out = (server == ALONE) & problem.reach.any(1)
    return np.where(left_out, problem.link.argmin(1), server)


def exchange(problem: SlotProblem, server: np.ndarray) -> np.ndarray:
    """Make all moves of single devices, then the exchange that gains most, until neither lowers the objective.

    An exchange keeps the number of devices of each server, so under equal shares it changes two costs only.
    """
    devices = np.flatnonzero(server != ALONE)
    least = LEAST_GAIN * problem.equal_objective(server)
    while len(devices):
        server = improve(problem, server)
        at = server[devices]
        there = problem.equal_costs(problem.counts(server))[devices][:, at]  # of device i at the server of device j
        own = there.diagonal()
        gains = own[:, None] + own[None] - there - there.T
        one, other = np.unravel_index(gains.argmax(), gains.shape)
        if gains[one, other] <= least:
            break
        server[devices[[one, other]]] = at[[other, one]]
    return server
