"""Distributions over tokens on the host, and the random decisions that are made from them.

Rows of float32 stay float32 except for their longest sums, so a probability is accurate to a few parts in ten million,
like a logarithm in float32. Rows of float64 stay float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from outpace.core.logits import log_softmax
from outpace.core.noise import PURPOSES, uniform
from outpace.core.sampling import Sampling

_BLOCK = 256  # weights per partial sum, by which long rows are searched
_NUCLEUS = 1024  # number of likeliest tokens that are sorted first to reach top_p
_STEEPEST = 1e30  # largest 1 / temperature, as in the kernels: no product of float32 overflows
UNFILTERED = Sampling(1.0)


class TokenDistribution:
    """The tokens that remain after filters, with weights; a probability is a weight over the weights' sum.

    `weights` [kept] are not negative and belong to `tokens` int64 [kept], ascending; None: 0, 1, ... If `make` can
    compute the same weights again, they may be dropped: memory for a row costs as much as its exponentials.
    """

    def __init__(
        self, weights: np.ndarray, tokens: np.ndarray | None = None, make: Callable[[], np.ndarray] | None = None
    ) -> None:
        self.weights, self.tokens = weights, tokens
        self._make, self._known = make, dict[int, float]()
        self._sums = _block_sums(weights)
        self.total = float(self._sums[-1]) if len(self._sums) else 0.0

    @cached_property
    def weights(self) -> np.ndarray:
        """Compute the weights again after `forget`."""
        assert self._make is not None
        return self._make()

    def forget(self) -> None:
        """Free the weights if they can be computed again; probabilities that were read stay cached."""
        if self._make is not None:
            self.__dict__.pop("weights", None)

    @property
    def size(self) -> int:
        """Return the lowest id from which on all tokens have probability 0."""
        return len(self.weights) if self.tokens is None else int(self.tokens[-1]) + 1 if len(self.tokens) else 0

    @property
    def max_probability(self) -> float:
        return float(self.weights.max()) / self.total

    @cached_property
    def entropy(self) -> float:
        """Return H = -sum p log p, in nats."""
        p = self._probabilities()
        logs = np.log(np.maximum(p, np.finfo(p.dtype).tiny))  # a p of 0 contributes 0, whatever its logarithm
        return -float(p @ logs)

    def probability(self, token: int) -> float:
        if token not in self._known:
            self._known[token] = self._probability(token)
        return self._known[token]

    def _probability(self, token: int) -> float:
        place = token if self.tokens is None else int(np.searchsorted(self.tokens, token))
        if place >= len(self.weights) or (self.tokens is not None and self.tokens[place] != token):
            return 0.0
        return float(self.weights[place]) / self.total if self.total else 0.0

    def to_dense(self, size: int) -> np.ndarray:
        """Return the probabilities of all tokens below `size`, by id. [size]"""
        p = self._probabilities()
        if self.tokens is None and len(p) == size:
            return p
        wide = np.zeros(size, p.dtype)
        known = p[:size] if self.tokens is None else p[self.tokens < size]
        wide[slice(len(known)) if self.tokens is None else self.tokens[: len(known)]] = known
        return wide

    def restrict_to(self, other: TokenDistribution) -> np.ndarray:
        """Return the probabilities of the tokens that `other` keeps. [kept of other]"""
        wide = self.to_dense(other.size)
        return wide if other.tokens is None else wide[other.tokens]

    def token_at(self, number: float) -> int:
        """Return the lowest token whose cumulative probability exceeds a number in [0, 1)."""
        reached = number * self.total
        block = min(int(self._sums.searchsorted(reached, side="right")), len(self._sums) - 1)
        first, before = block * _BLOCK, float(self._sums[block - 1]) if block else 0.0
        weights = self.weights[first : first + _BLOCK]
        place = int(weights.cumsum(dtype=np.float64).searchsorted(reached - before, side="right"))
        place = first + place if place < len(weights) else int(np.flatnonzero(self.weights[: first + _BLOCK])[-1])
        return place if self.tokens is None else int(self.tokens[place])

    def above(self, q: TokenDistribution, share: float = 1.0) -> TokenDistribution:
        """Return the distribution with weights (share p - q)+."""
        rest = self._probabilities()
        rest *= rest.dtype.type(share)
        rest -= q.restrict_to(self)
        return TokenDistribution(np.maximum(rest, 0.0, out=rest), self.tokens)

    def without(self, token: int) -> TokenDistribution:
        """Return the same weights with this token's set to 0."""
        weights = self.weights.copy()
        weights[token if self.tokens is None else self.tokens.searchsorted(token)] = 0.0
        return TokenDistribution(weights, self.tokens)

    def _probabilities(self) -> np.ndarray:
        """Return the weights over their sum, in a new array. [kept]

        What removals leave may weigh so little that 1 / sum is beyond float32: so it divides.
        """
        p: np.ndarray = self.weights / self.weights.dtype.type(self.total or 1.0)
        return p


def _block_sums(weights: np.ndarray) -> np.ndarray:
    """Return the sums of the weights up to each block's end, float64 [blocks].

    Within a block in their own precision.
    """
    whole = len(weights) // _BLOCK * _BLOCK
    sums = np.einsum("ij->i", weights[:whole].reshape(-1, _BLOCK))  # twice as fast as sum(1)
    if whole < len(weights):
        sums = np.append(sums, weights[whole:].sum())
    return sums.cumsum(dtype=np.float64)


def one_hot(token: int) -> TokenDistribution:
    """Return the distribution with all mass on one token."""
    return TokenDistribution(np.ones(1), np.array([token]))


def distribution_of(scores: np.ndarray, sampling: Sampling, ids: np.ndarray | None = None) -> TokenDistribution:
    """Return the distribution of a row of adjusted scores under sampling options, as `sampling.log_probs` does.

    At temperature 0 all mass is on the best token, the first of equal ones. All probabilities are 0 if no token is
    allowed. float32 or float64 [held]; `ids` int64 [held] are the tokens of the scores; None: 0, 1, ...
    """
    top, temperature = scores.max(), sampling.temperature
    if not np.isfinite(top):
        return TokenDistribution(np.zeros(len(scores)), ids)
    if sampling.is_greedy:
        place = int(scores.argmax())
        return one_hot(place if ids is None else int(ids[place]))
    if not sampling.filters:
        make = partial(_exponentials, scores, top, temperature)
        return TokenDistribution(make(), ids, make)
    row = _shifted(scores, top, temperature)
    places = np.flatnonzero(row >= _floor(row, sampling))
    return TokenDistribution(np.exp(row[places]), places if ids is None else ids[places])


def log_probs_of(scores: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Return log p of a row of adjusted scores, -inf for tokens that filters exclude. [vocab]

    Temperature 0 counts as 1.
    """
    row = _shifted(scores, scores.max(), sampling.temperature or 1.0)
    if sampling.filters:
        row[row < _floor(row, sampling)] = -np.inf
    return log_softmax(row)


def _exponentials(scores: np.ndarray, top: np.floating, temperature: float) -> np.ndarray:
    row = _shifted(scores, top, temperature)
    return np.exp(row, out=row)


def _shifted(scores: np.ndarray, top: np.floating, temperature: float) -> np.ndarray:
    """Return (scores - top) / temperature: 0 for the likeliest. [held]"""
    row: np.ndarray = scores - top
    if temperature != 1.0:
        row *= row.dtype.type(min(1.0 / temperature, _STEEPEST))
    return row


def _floor(row: np.ndarray, sampling: Sampling) -> float:
    """Return the lowest shifted score that is kept; equal ones are kept or removed together."""
    best, floor = row, -math.inf
    if sampling.top_k and sampling.top_k < len(row):
        best = np.partition(row, len(row) - sampling.top_k)[-sampling.top_k :]
        floor = float(best.min())
    if sampling.top_p < 1.0:
        floor = max(floor, _nucleus(best, sampling.top_p))
    return max(floor, math.log(sampling.min_p)) if sampling.min_p else floor


def _nucleus(row: np.ndarray, top_p: float) -> float:
    """Return the shifted score at which the likeliest tokens' mass reaches top_p; that token is kept. [kept]"""
    whole, count = TokenDistribution(np.exp(row)).total, min(_NUCLEUS, len(row))
    while True:
        best = np.sort(np.partition(row, len(row) - count)[-count:])[::-1]
        mass = np.exp(best).cumsum(dtype=np.float64)
        if mass[-1] >= top_p * whole or count == len(row):
            return float(best[min(int(mass.searchsorted(top_p * whole)), count - 1)])
        count = min(4 * count, len(row))


class DecisionKey(NamedTuple):
    """Identifies one random decision of a request. No key may be used twice, which would bias the text.

    Node ids are unique within a request, so they distinguish the rounds; `purpose` is one of `core.noise`.
    """

    seed: int
    choice: int
    node_id: int
    purpose: int

    def again(self, number: int) -> DecisionKey:
        """Return the key for repetition `number` of the same decision, such as the next draws below one node."""
        return self._replace(purpose=self.purpose + PURPOSES * number)


class RandomSource:
    """Makes random decisions by one uniform number per key, independent of the order of calls. Tests replace it."""

    def number(self, key: DecisionKey) -> float:
        """Return the number for this key, in [0, 1)."""
        return uniform(*key)

    def accepts(self, key: DecisionKey, p: float) -> bool:
        """Return True with probability p; always if p >= 1."""
        return self.number(key) < p

    def draw(self, key: DecisionKey, p: TokenDistribution) -> int:
        """Draw a token from p: the lowest whose cumulative probability exceeds the number."""
        return p.token_at(self.number(key))
