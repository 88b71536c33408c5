"""How likely the target picks a proposed token: estimates that are fitted to what it picked so far.

The score of a path must be the chance that the target walks it. A drafter's own q is only a stand-in for that, and
under shared noise not even one: the target picks by log p + g, so the estimate is a softmax of log q + g at a
temperature that says how far p and q lie apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_TEMPERATURES = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
_MEMORY = 0.995  # weight of the past after one more observation: some 200 observations count


class Rate:
    """A running share of successes that starts from a prior worth `weight` trials."""

    def __init__(self, prior: float, weight: float = 4.0) -> None:
        self._successes, self._trials = prior * weight, weight

    @property
    def value(self) -> float:
        return self._successes / self._trials

    def learn(self, success: bool) -> None:
        """Counts one trial."""
        self._successes = self._successes * _MEMORY + success
        self._trials = self._trials * _MEMORY + 1.0


class ChoiceModel:
    """P(the target picks the i-th best proposal) = coverage * softmax(values / temperature)_i, both fitted."""

    def __init__(self) -> None:
        self._coverage = Rate(0.9)
        self._likelihoods = [0.0] * len(_TEMPERATURES)
        self._likelihoods[_TEMPERATURES.index(1.0)] = 1.0  # the prior: q as it is

    def log_chances(self, values: Sequence[float]) -> list[float]:
        """Natural logs of the estimated chances of proposals with these values (log q, or log q + g), best first."""
        best = max(range(len(_TEMPERATURES)), key=self._likelihoods.__getitem__)
        coverage = math.log(self._coverage.value)
        return [coverage + share for share in _log_softmax(values, _TEMPERATURES[best])]

    def learn(self, values: Sequence[float], picked: int | None) -> None:
        """The target picked proposal number `picked` of these, or none of them."""
        self._coverage.learn(picked is not None)
        if picked is None:
            return
        for number, temperature in enumerate(_TEMPERATURES):
            gain = _log_softmax(values, temperature)[picked]
            self._likelihoods[number] = self._likelihoods[number] * _MEMORY + gain


def _log_softmax(values: Sequence[float], temperature: float) -> list[float]:
    top = values[0]
    scaled = [(value - top) / temperature for value in values]
    total = math.log(sum(math.exp(value) for value in scaled))
    return [value - total for value in scaled]
