"""Estimates of the probability that the target picks a proposed token, fitted to what it picked before.

The score of a path must be the probability that the target accepts it. A drafter's own q is only a substitute, and
under shared noise not even that: the target picks by log p + g, so the estimate is a softmax of log q + g at a
temperature that expresses how much p and q differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from outpace_kernels import OfferMap, left_open, log_chances, log_softmax_at

from outpace.core.multi_step import ScoreCalibration
from outpace.core.stats import BatchedUpdates, DecayedMean
from outpace.core.types import Observation, Request, TopK

_TEMPERATURES = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
_SURE = 20.0  # weight of a restored rate, in trials
_DOUBT = 4.0  # prior: nats by which a temperature e times higher or lower must explain the picks better
_TOGETHER = 6  # picks learnt in one batch
_Pick = tuple["PickModel", Sequence[float], int | None]  # model, values of the proposals, number of the picked one
_LEAST = 0.05  # smallest restored ratio of picks outside the proposals to the probability left to them
_MEMORY = 0.995  # decay per observation, so about 200 observations count


def acceptance_rate(prior: float, weight: float = 4.0) -> DecayedMean:
    """Return a running success rate that starts from a prior worth `weight` trials."""
    return DecayedMean(prior, weight, _MEMORY)


def restored_rate(kept: float) -> DecayedMean:
    """Return a profile's rate, with the confidence of a few trials."""
    return acceptance_rate(min(max(kept, 0.01), 1.0), _SURE)  # its logarithm is needed


class PickModel:
    """P(the target picks the i-th best proposal) = coverage * softmax(values / temperature)_i, with fitted parameters.

    Coverage is the probability that it picks any of the proposals: a constant; or, if the values are shares (log q),
    one minus a fitted multiple of the probability that they leave to other tokens.
    """

    def __init__(self, has_shares: bool = False) -> None:
        self._has_shares = has_shares
        self._coverage = acceptance_rate(0.9)
        self._open = acceptance_rate(1.0, 0.5)  # picks outside the proposals / probability left to them
        self._begin(1.0)  # q unchanged

    def state_dict(self) -> dict[str, Any]:
        """Return the fitted parameters, for the profile."""
        return {"coverage": self._coverage.value, "temperature": self._temperature, "open": self._open.value}

    def load_state_dict(self, kept: Mapping[str, Any]) -> None:
        """Restore parameters from a profile."""
        self._coverage = restored_rate(float(kept["coverage"]))
        self._open = acceptance_rate(min(max(float(kept.get("open", 1.0)), _LEAST), 1 / _LEAST), 2.0)
        self._begin(min(_TEMPERATURES, key=lambda known: abs(known - float(kept["temperature"]))))

    def _begin(self, temperature: float) -> None:
        self._temperature = temperature  # the likeliest one given the target's picks
        self._likelihoods = [-_DOUBT * math.log(known / temperature) ** 2 for known in _TEMPERATURES]

    def log_chances(self, values: Sequence[float], count: int | None = None) -> list[float]:
        """Return the log probabilities of the first `count` proposals. `values` (log q, or log q + g) are those of all
        proposals, best first."""
        return log_chances(*self.trust, values, len(values) if count is None else count)

    @property
    def trust(self) -> ScoreCalibration:
        """The present parameters, as a model needs them that ranks proposals itself."""
        return ScoreCalibration(self._temperature, self._coverage.value, self._open.value if self._has_shares else None)

    def learn(self, values: Sequence[float], picked: int | None) -> None:
        """Learn that the target picked proposal number `picked` of these values, or none of them (None)."""
        self._coverage.learn(picked is not None)
        if self._has_shares:
            self._open.learn(picked is None, left_open(values))
        if picked is None:
            return
        for number, gain in enumerate(log_softmax_at(values, picked, _TEMPERATURES)):
            self._likelihoods[number] = self._likelihoods[number] * _MEMORY + gain
        self._temperature = _TEMPERATURES[self._likelihoods.index(max(self._likelihoods))]


def _learn(pick: _Pick) -> None:
    pick_model, values, picked = pick
    pick_model.learn(values, picked)


class PickModels:
    """The PickModel of greedy requests and that of sampled ones."""

    def __init__(self) -> None:
        self._models = {"greedy": PickModel(has_shares=True), "sampled": PickModel()}
        self._picks = BatchedUpdates[_Pick](_learn, _TOGETHER)

    def of(self, request: Request) -> PickModel:
        """Return the model for a request."""
        return self._models["greedy" if request.sampling.is_greedy else "sampled"]

    def learn(self, request: Request, offers: Mapping[int, TopK] | OfferMap, seen: Observation) -> None:
        """Learn from the proposals below each accepted node (by id) and the tokens that the target wrote there."""
        pick_model, picks = self.of(request), list[_Pick]()
        for node, written in zip(seen.node_ids, seen.tokens, strict=False):
            if offer := offers.get(node):
                tokens, values = offer
                picks.append((pick_model, values, tokens.index(written) if written in tokens else None))
        self._picks.add(picks)

    def state_dict(self) -> dict[str, Any]:
        """Return the fitted parameters of both, for the profile."""
        self._picks.work_in()
        return {name: model.state_dict() for name, model in self._models.items()}

    def load_state_dict(self, kept: Mapping[str, Any]) -> None:
        """Restore both from a profile."""
        self._picks.work_in()
        for name, model in self._models.items():
            model.load_state_dict(kept[name])
