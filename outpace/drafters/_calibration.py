"""Estimates of the probability that the target picks a proposed token, fitted to what it picked before.

The score of a path must be the probability that the target accepts it. A drafter's own q is only a substitute, and
under shared noise not even that: the target picks by log p + g, so the estimate is a softmax of log q + g at a
temperature that expresses how much p and q differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import outpace_kernels as kernels

from outpace.core.stats import DecayedMean
from outpace.core.types import Observation, Request, TopK

_SURE = 20.0  # weight of a restored rate, in trials
_MIN_RATE, _MIN_OPEN = 0.01, 0.05  # smallest restored rates; their logarithms are needed
_OPEN_WEIGHT = 2.0
_MEMORY = 0.995  # decay per observation, so about 200 observations count


def acceptance_rate(prior: float, weight: float = 4.0) -> DecayedMean:
    """Return a running success rate that starts from a prior worth `weight` trials."""
    return DecayedMean(prior, weight, _MEMORY)


def restored_rate(kept: float) -> DecayedMean:
    """Return a profile's rate, with the confidence of a few trials."""
    return acceptance_rate(min(max(kept, _MIN_RATE), 1.0), _SURE)


class PickModel(kernels.PickModel):
    """P(the target picks the i-th best proposal) = coverage * softmax(values / temperature)_i, with fitted parameters.

    Coverage is the probability that it picks any of the proposals: a constant; or, if the values are shares (log q),
    one minus a fitted multiple of the probability that they leave to other tokens. `learn` and `log_chances` are native
    (`kernels/src/tree.h`); they take the values of all proposals, best first: log q, or log q + g.
    """

    def state_dict(self) -> dict[str, Any]:
        temperature, coverage, open_rate = self.fit
        return {"coverage": coverage, "temperature": temperature} | ({} if open_rate is None else {"open": open_rate})

    def load_state_dict(self, kept: Mapping[str, Any]) -> None:
        coverage = min(max(float(kept["coverage"]), _MIN_RATE), 1.0)
        open_rate = min(max(float(kept.get("open", 1.0)), _MIN_OPEN), 1 / _MIN_OPEN)
        self.restore(float(kept["temperature"]), coverage, open_rate, _SURE, _OPEN_WEIGHT)


class PickModels:
    """The PickModel of greedy requests and that of sampled ones."""

    def __init__(self) -> None:
        self._models = {"greedy": PickModel(has_shares=True), "sampled": PickModel()}

    def for_request(self, request: Request) -> PickModel:
        return self._models["greedy" if request.sampling.is_greedy else "sampled"]

    def learn(self, request: Request, offers: Mapping[int, TopK], seen: Observation) -> None:
        """Learn from the proposals below each accepted node (by id) and the tokens that the target wrote there."""
        for node, written in zip(seen.node_ids, seen.tokens, strict=False):
            if offer := offers.get(node):
                tokens, values = offer
                self.for_request(request).learn(values, tokens.index(written) if written in tokens else None)

    def state_dict(self) -> dict[str, Any]:
        """Return the fitted parameters of both, for the profile."""
        return {name: model.state_dict() for name, model in self._models.items()}

    def load_state_dict(self, kept: Mapping[str, Any]) -> None:
        for name, model in self._models.items():
            model.load_state_dict(kept[name])
