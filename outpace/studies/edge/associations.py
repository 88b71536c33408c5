"""Ways to choose each device's server: functions of the problem that return the servers of all devices.

A device without a server in reach gets ALONE. Policies that compare objectives do so with equal shares.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from outpace.studies.edge.problem import ALONE, SlotProblem

Associate = Callable[[SlotProblem, np.random.Generator], np.ndarray]
MIN_GAIN = 1e-9  # relative, so that rounding ends the search


def alone(problem: SlotProblem, rng: np.random.Generator) -> np.ndarray:
    """Let each device draft and verify alone, with both models in its memory: a bound, not an association."""
    return np.full(len(problem.draft), ALONE)


def random(problem: SlotProblem, rng: np.random.Generator) -> np.ndarray:
    """Give each device a random server in reach: the paper's first baseline."""
    return _best_server(problem, rng.random(problem.link.shape))


def max_sinr(problem: SlotProblem, rng: np.random.Generator) -> np.ndarray:
    """Give each device the server with the best channel: the paper's second baseline, and what phone networks do
    today."""
    return _best_server(problem, -problem.link)


def max_compute(problem: SlotProblem, rng: np.random.Generator) -> np.ndarray:
    """Give each device the fastest server in reach: the paper's third baseline. The channel decides between equal
    ones."""
    order = np.lexsort((problem.link, np.broadcast_to(problem.verify, problem.link.shape)), axis=1)
    return _best_server(problem, -order.argsort(1))


def _best_server(problem: SlotProblem, score: np.ndarray) -> np.ndarray:
    """Return the reachable server with the greatest score [devices, servers] for each device."""
    best = np.where(problem.in_range, score, -np.inf).argmax(1)
    return np.where(problem.in_range.any(1), best, ALONE)


def greedy(problem: SlotProblem, rng: np.random.Generator) -> np.ndarray:
    """Assign one device after another, those with the fewest servers first, where the sum of all costs grows least.

    Servers are compared by the device's own cost plus what it adds to the costs of the devices already there.
    """
    server = np.full(len(problem.draft), ALONE)
    counts = np.zeros(len(problem.verify), dtype=int)
    here = problem.equal_costs(counts)  # the costs at the present numbers of devices
    for device in np.lexsort((problem.link.min(1), problem.in_range.sum(1))):
        if not problem.in_range[device].any():
            continue
        after, members = problem.equal_costs(counts + 1), problem.members(server)
        growth = np.where(members, after, 0.0).sum(0) - np.where(members, here, 0.0).sum(0) + after[device]
        chosen = int(growth.argmin())
        server[device], here[:, chosen] = chosen, after[:, chosen]
        counts[chosen] += 1
    return server


def move(problem: SlotProblem, rng: np.random.Generator) -> np.ndarray:
    """Start from `greedy`, and move the device that gains most to another server until no move lowers the objective."""
    return improve(problem, greedy(problem, rng))


def improve(problem: SlotProblem, server: np.ndarray) -> np.ndarray:
    """Return an association that no move of one device improves."""
    server, devices = server.copy(), np.flatnonzero(server != ALONE)
    min_gain = MIN_GAIN * problem.equal_objective(server)
    while len(devices):
        gains = move_gains(problem, server)[devices]
        device, goal = np.unravel_index(gains.argmax(), gains.shape)
        if gains[device, goal] <= min_gain:
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


def swap(problem: SlotProblem, rng: np.random.Generator) -> np.ndarray:
    """Match in two phases as the paper does: best channels under a quota, then exchanges that lower the objective.

    The quota is the mean number of devices per server, rounded up. In the second phase, which has no quota, a device
    can also move alone. The paper's condition may accept an exchange that raises the objective; here it must lower it.
    """
    return exchange(problem, match_by_channel(problem))


def match_by_channel(problem: SlotProblem) -> np.ndarray:
    """Assign devices in the order of link times, up to the quota. A device that finds all servers full exceeds one."""
    devices, servers = problem.link.shape
    server, free = np.full(devices, ALONE), np.full(servers, -(-devices // servers))
    by_link = np.unravel_index(problem.link.argsort(axis=None), problem.link.shape)
    for device, goal in zip(*by_link, strict=True):
        if server[device] == ALONE and free[goal] and problem.in_range[device, goal]:
            server[device] = goal
            free[goal] -= 1
    left_out = (server == ALONE) & problem.in_range.any(1)
    return np.where(left_out, problem.link.argmin(1), server)


def exchange(problem: SlotProblem, server: np.ndarray) -> np.ndarray:
    """Make all moves of single devices, then the exchange that gains most, until neither lowers the objective.

    An exchange keeps the number of devices of each server, so under equal shares it changes two costs only.
    """
    devices = np.flatnonzero(server != ALONE)
    min_gain = MIN_GAIN * problem.equal_objective(server)
    while len(devices):
        server = improve(problem, server)
        at = server[devices]
        there = problem.equal_costs(problem.counts(server))[devices][:, at]  # of device i at the server of device j
        own = there.diagonal()
        gains = own[:, None] + own[None] - there - there.T
        one, other = np.unravel_index(gains.argmax(), gains.shape)
        if gains[one, other] <= min_gain:
            break
        server[devices[[one, other]]] = at[[other, one]]
    return server


ASSOCIATIONS: dict[str, Associate] = {
    one.__name__.replace("_", "-"): one for one in (alone, greedy, max_compute, max_sinr, move, random, swap)
}
