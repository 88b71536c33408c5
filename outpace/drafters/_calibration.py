"""How likely the target picks a proposed token: estimates that are fitted to what it picked so far.

The score of a path must be the chance that the target walks it. A drafter's own q is only a stand-in for that, and
under shared noise not even one: the target picks by log p + g, so the estimate is a softmax of log q + g at a
temperature that says how far p and q lie apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from operator import truediv
from typing import Any

from outpace.core.multi_step import MIN_COVERAGE, ScoreCalibration
from outpace.core.stats import BatchedUpdates
from outpace.core.types import Observation, Request, TopK

_TEMPERATURES = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
_SURE = 20.0  # trials that a remembered share counts as
_DOUBT = 4.0  # nats by which a temperature e times as high or low must explain the picks better, at first
_TOGETHER = 6  # picks
_Pick = tuple["PickModel", Sequence[float], int | None]  # what was proposed, and which of it the target took
_LEAST = 0.05  # of what is left open as a share of what the draft leaves, in a profile
_MEMORY = 0.995  # weight of the past after one more observation: some 200 observations count


class AcceptanceRate:
    """A running share of successes that starts from a prior worth `weight` trials."""

    def __init__(self, prior: float, weight: float = 4.0) -> None:
        self._successes, self._trials = prior * weight, weight
        self.value = self._successes / weight

    def state_dict(self) -> float:
        """What a profile keeps."""
        return self.value

    def load_state_dict(self, kept: float) -> None:
        """Begins from a profile, as sure of it as of a few trials."""
        self.value = min(max(kept, 0.01), 1.0)  # never quite 0: it has a logarithm
        self._successes, self._trials = self.value * _SURE, _SURE

    def learn(self, success: bool, trials: float = 1.0) -> None:
        """Counts one trial, or what was expected of it."""
        self._successes = self._successes * _MEMORY + success
        self._trials = self._trials * _MEMORY + trials
        self.value = self._successes / self._trials


class PickModel:
    """P(the target picks the i-th best proposal) = coverage * softmax(values / temperature)_i, fitted.

    Coverage is the chance that it picks any of them: the same everywhere; or, where the values are shares (log q), one
    less a fitted multiple of what they leave open, for a draft that is sure of a token leaves less open than others.
    """

    def __init__(self, has_shares: bool = False) -> None:
        self._has_shares = has_shares
        self._coverage = AcceptanceRate(0.9)
        self._open = AcceptanceRate(1.0, 0.5)  # picks of what is not proposed, over the shares that are left open
        self._begin(1.0)  # q as it is

    def state_dict(self) -> dict[str, Any]:
        """What a profile keeps."""
        kept = {"coverage": self._coverage.state_dict(), "temperature": self._temperature}
        return kept | {"open": self._open.state_dict()}

    def load_state_dict(self, kept: Mapping[str, Any]) -> None:
        """Begins from a profile."""
        self._coverage.load_state_dict(float(kept["coverage"]))
        self._open = AcceptanceRate(min(max(float(kept.get("open", 1.0)), _LEAST), 1 / _LEAST), 2.0)
        self._begin(min(_TEMPERATURES, key=lambda known: abs(known - float(kept["temperature"]))))

    def _begin(self, temperature: float) -> None:
        self._temperature = temperature  # the one that explains the target's picks best
        self._likelihoods = [-_DOUBT * math.log(known / temperature) ** 2 for known in _TEMPERATURES]

    def log_chances(self, values: Sequence[float], count: int | None = None) -> list[float]:
        """Natural logs of the estimated chances of the first `count` proposals; `values` (log q, or log q + g), best
        first, are those of all."""
        top, temperature, coverage = values[0], self._temperature, self._coverage.value
        if self._has_shares:
            coverage = max(MIN_COVERAGE, 1.0 - self._open.value * _left_open(values))
        logs = []
        for value in values:
            logs.append((value - top) / temperature)
        shift = math.log(coverage / sum(map(math.exp, logs)))
        logs = logs[:count]
        for number, value in enumerate(logs):
            logs[number] = value + shift
        return logs

    @property
    def trust(self) -> ScoreCalibration:
        """What `log_chances` goes by at present."""
        return ScoreCalibration(self._temperature, self._coverage.value, self._open.value if self._has_shares else None)

    def learn(self, values: Sequence[float], picked: int | None) -> None:
        """The target picked proposal number `picked` of these, or none of them."""
        self._coverage.learn(picked is not None)
        if self._has_shares:
            self._open.learn(picked is None, _left_open(values))
        if picked is None:
            return
        top = max(values)
        below = [value - top for value in values]
        for number, temperature in enumerate(_TEMPERATURES):  # so few numbers are sooner done one by one than as arrays
            shares = sum(map(math.exp, map(truediv, below, repeat(temperature))))
            gain = below[picked] / temperature - math.log(shares)
            self._likelihoods[number] = self._likelihoods[number] * _MEMORY + gain
        self._temperature = _TEMPERATURES[self._likelihoods.index(max(self._likelihoods))]


def _left_open(values: Sequence[float]) -> float:
    """What these shares (log q) leave to all other tokens."""
    return max(0.0, 1.0 - sum(map(math.exp, values)))


def _learn(pick: _Pick) -> None:
    choice, values, picked = pick
    choice.learn(values, picked)


class PickModels:
    """What a draft model's proposals were worth: one choice model for greedy requests, one for sampled ones."""

    def __init__(self) -> None:
        self._models = {"greedy": PickModel(has_shares=True), "sampled": PickModel()}
        self._picks = BatchedUpdates[_Pick](_learn, _TOGETHER)

    def of(self, request: Request) -> PickModel:
        """That of a request."""
        return self._models["greedy" if request.sampling.is_greedy else "sampled"]

    def learn(self, request: Request, offers: Mapping[int, TopK], seen: Observation) -> None:
        """What was offered below every walked node (by its id), and what the target wrote there."""
        choice, picks = self.of(request), list[_Pick]()
        for node, written in zip(seen.path, seen.tokens, strict=False):
            if node in offers:
                tokens, values = offers[node]
                picks.append((choice, values, tokens.index(written) if written in tokens else None))
        self._picks.add(picks)

    def note(self, choice: PickModel, picked: Iterable[tuple[Sequence[float], int]]) -> None:
        """The target picked the proposal of this number, of those of these values; below 0: none of them."""
        self._picks.add([(choice, values, number if number >= 0 else None) for values, number in picked])

    def state_dict(self) -> dict[str, Any]:
        """What a profile keeps."""
        self._picks.work_in()
        return {name: model.state_dict() for name, model in self._models.items()}

    def load_state_dict(self, kept: Mapping[str, Any]) -> None:
        """Begins from a profile."""
        self._picks.work_in()
        for name, model in self._models.items():
            model.load_state_dict(kept[name])
