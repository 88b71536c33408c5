"""Ways to choose each device's server, and ways to divide each server's band and compute among its devices.

An association returns the servers of all devices; a device without a server in reach gets ALONE. Associations that
compare objectives do so with equal shares.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from outpace.studies.edge.problem import ALONE, Assignment, SlotProblem

Associate = Callable[[SlotProblem, np.random.Generator], np.ndarray]
Divide = Callable[[SlotProblem, np.ndarray], Assignment]
ShareFunction = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
MIN_GAIN = 1e-9  # relative, so that rounding ends the search
ROUNDS = 42  # bisection steps; each halves the range of a price's logarithm
LOWEST = 1e-12  # lowest price as a fraction of the upper bound: the price of a resource that is not scarce


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


def divide_equally(problem: SlotProblem, server: np.ndarray) -> Assignment:
    """Give each of n devices 1 / n of the band and the compute."""
    share = 1.0 / np.maximum(problem.counts(server), 1)[server]
    return Assignment(server, share, share)


def divide_optimally(problem: SlotProblem, server: np.ndarray) -> Assignment:
    """Divide each server so that the weighted sum of its devices' step times is least.

    A device's step takes max(a, b / y + c / z), where a is the time of drafting minus the queue, b that of the link and
    c that of the pass, both with the whole server. The sum over devices of v max(a, b / y + c / z), with shares that
    sum to 1, is convex. At prices lambda and nu of band and compute the best shares are

        y = sqrt(v b / lambda) min(1, k),  z = sqrt(v c / nu) min(1, k),
        k = (sqrt(b lambda) + sqrt(c nu)) / (a sqrt(v)).

    The prices are found by bisection, one inside the other, for all servers at once. The objective `paper` has a
    penalty that is not convex, so under it these shares are still those of least step time.
    """
    band, compute = np.ones(len(server)), np.ones(len(server))
    served = np.flatnonzero(server != ALONE)
    if len(served):
        cell = server[served]
        queue, weight = problem.queue[cell], problem.weight[served]
        link, verify = problem.link[served, cell], problem.verify[cell]
        found = _Cells(cell, len(problem.verify), problem.draft[served] - queue, link, verify, weight).solve()
        band[served], compute[served] = found
    return Assignment(server, band, compute)


class _Cells:
    """The devices of all servers: `floor` a, `link` b, `verify` c and `weight` v of each, and `cell`, its server."""

    def __init__(
        self,
        cell: np.ndarray,
        servers: int,
        floor: np.ndarray,
        link: np.ndarray,
        verify: np.ndarray,
        weight: np.ndarray,
    ) -> None:
        self._cell, self._servers = cell, servers
        self._roots = np.sqrt(link), np.sqrt(verify)
        self._scaled = np.sqrt(weight) * self._roots[0], np.sqrt(weight) * self._roots[1]
        self._floor = np.maximum(floor, 1e-12) * np.sqrt(weight)

    def solve(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the shares of band and compute; those of a server sum to 1."""
        shares = self._bisect(0, lambda price: self._bisect(1, lambda inner: self._shares(price, inner)))
        return shares[0] / self._sums(shares[0])[self._cell], shares[1] / self._sums(shares[1])[self._cell]

    def _bisect(self, resource: int, shares_at: ShareFunction) -> tuple[np.ndarray, np.ndarray]:
        """Return the shares at each server's price at which a resource's shares sum to 1, or at the lowest price."""
        high = 2.0 * np.log(np.maximum(self._sums(self._scaled[resource]), 1e-150))
        low = high + np.log(LOWEST)
        for _ in range(ROUNDS):
            middle = 0.5 * (low + high)
            is_scarce = self._sums(shares_at(np.exp(0.5 * middle))[resource]) > 1.0
            low, high = np.where(is_scarce, middle, low), np.where(is_scarce, high, middle)
        return shares_at(np.exp(0.5 * high))

    def _shares(self, band_root: np.ndarray, compute_root: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the best shares at prices whose square roots are given, by server."""
        roots = band_root[self._cell], compute_root[self._cell]
        slack = np.minimum(1.0, (self._roots[0] * roots[0] + self._roots[1] * roots[1]) / self._floor)
        return self._scaled[0] / roots[0] * slack, self._scaled[1] / roots[1] * slack

    def _sums(self, values: np.ndarray) -> np.ndarray:
        return np.bincount(self._cell, values, self._servers)


SHARES: dict[str, Divide] = {"equal": divide_equally, "optimal": divide_optimally}
