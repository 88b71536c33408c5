"""Ways to divide each server's band and compute among its devices: equally and optimally."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from outpace.studies.edge.problem import ALONE, Assignment, SlotProblem

ShareFunction = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
ROUNDS = 42  # bisection steps; each halves the range of a price's logarithm
LOWEST = 1e-12  # lowest price as a fraction of the upper bound: the price of a resource that is not scarce


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
