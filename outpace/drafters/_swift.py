"""Looks for the sublayers to leave out while texts are written: random sets, and now and then the most promising one by
a Gaussian process.

SWIFT, arXiv:2410.06916; the choice by upper confidence bounds is GP-UCB, arXiv:0912.3995.
"""

from __future__ import annotations

import random

import numpy as np

from outpace.drafters._sublayers import Sublayers, evenly, inner

_GUIDED = 25  # one trial of so many is chosen by the process
_IDLE = 300  # trials without a better set after which the search is over
_MEMORY = 200  # trials that the process knows
_CANDIDATES = 128  # sets that it chooses from
_BOLD = 2.0  # standard deviations by which a doubtful set may be better
_NOISE = 0.01  # variance of a measured agreement, of prior variance 1
_REACH = 0.25  # switches, as a share of all, by which two sets must differ to tell little of one another


class Search:
    """The best set so far, from which `propose` and `learn` go on. All sets have the size of the first one."""

    def __init__(self, num_layers: int, ratio: float, enough: float, trials: int) -> None:
        """`ratio`: of the layers, those that are left out at first; it is over once a set agrees as often as `enough`,
        or after so many `trials`."""
        self.best, self.agreement = evenly(num_layers, ratio), 0.0
        self._layers, self._enough = list(inner(num_layers)), enough
        self._left = trials
        self.count = self._idle = 0  # trials, and those since the last better set
        self._tried: list[tuple[np.ndarray, float]] = []
        self._random = random.Random(0)

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be tried."""
        is_full = len(self.best.attention) == len(self._layers)  # there is no other set of this size
        is_found = self.count > 0 and (is_full or self.agreement >= self._enough)
        return is_found or self._left <= 0 or self._idle >= _IDLE

    def propose(self) -> Sublayers:
        """The set to try next; at first the one that is spread evenly."""
        if not self.count:
            return self.best
        if self.count % _GUIDED:
            return self._drawn()
        candidates = [
            *(self._near() for _ in range(_CANDIDATES // 2)),
            *(self._drawn() for _ in range(_CANDIDATES // 2)),
        ]
        return candidates[int(self._bounds(np.stack([self._switches(one) for one in candidates])).argmax())]

    def learn(self, sublayers: Sublayers, agreement: float) -> bool:
        """How often a set's draft agreed; whether it is the best now."""
        self.count += 1
        self._left -= 1
        self._idle += 1
        self._tried = [*self._tried, (self._switches(sublayers), agreement)][-_MEMORY:]
        if agreement <= self.agreement and self.count > 1:
            return False
        self.best, self.agreement, self._idle = sublayers, agreement, 0
        return True

    def _drawn(self) -> Sublayers:
        sizes = (len(self.best.attention), len(self.best.mlp))
        return Sublayers(*(tuple(sorted(self._random.sample(self._layers, size))) for size in sizes))

    def _near(self) -> Sublayers:
        """The best set with one layer of each list exchanged."""
        return Sublayers(*(self._exchanged(layers) for layers in self.best))

    def _exchanged(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        others = sorted(set(self._layers) - set(layers))
        if not others or not layers:
            return layers
        gone = self._random.choice(layers)
        return tuple(sorted({*layers, self._random.choice(others)} - {gone}))

    def _switches(self, sublayers: Sublayers) -> np.ndarray:
        """1 for what is left out. float64 [2 * layers]"""
        return np.array([layer in kind for kind in sublayers for layer in self._layers], float)

    def _bounds(self, candidates: np.ndarray) -> np.ndarray:
        """Mean and `_BOLD` standard deviations of each candidate's agreement. [candidates, switches] to [candidates]"""
        known = np.stack([switches for switches, _ in self._tried])
        values = np.array([value for _, value in self._tried])
        covariance = _kernel(known, known) + _NOISE * np.eye(len(known))
        across = _kernel(candidates, known)  # [candidates, known]
        spread = values.std() or 1.0
        means = values.mean() + across @ np.linalg.solve(covariance, values - values.mean())
        explained = np.einsum("ck,kc->c", across, np.linalg.solve(covariance, across.T))
        bounds: np.ndarray = means + _BOLD * spread * np.sqrt(np.clip(1.0 - explained, 0.0, None))
        return bounds


def _kernel(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """e^-(share of switches that differ / _REACH). [a, switches], [b, switches] to [a, b]"""
    differ: np.ndarray = np.abs(one[:, None] - other[None]).mean(-1)
    return np.exp(-differ / _REACH)
