"""Distributions over tokens on the host, as the rules that draw and judge by chances need them: arrays, no tensors.

Rows of float32 stay float32 but for their longest sums, so a chance is known to a few parts in ten million, as it is by
a logarithm in float32. Rows of float64 are float64 throughout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from outpace.core.noise import PURPOSES, uniform
from outpace.core.sampling import Sampling

_BLOCK = 256  # a long row is drawn from by the sums of so many weights each
_NUCLEUS = 1024  # likeliest tokens that are looked at first where their mass has to reach top_p
UNFILTERED = Sampling(1.0)


class TokenDistribution:
    """Weights of the tokens that remain after filters; a token's chance is its weight over their sum.

    `weights` [kept], none negative, are of `tokens` int64 [kept], rising; None: of 0, 1, ... With `make`, which gives
    the same weights, they need not be kept: fresh memory for a row costs as much as its exponentials.
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
        """Made anew where they were forgotten."""
        assert self._make is not None
        return self._make()

    def forget(self) -> None:
        """Gives the weights' memory back where they can be made anew; chances that were asked for stay known."""
        if self._make is not None:
            self.__dict__.pop("weights", None)

    @property
    def size(self) -> int:
        """Tokens from this one on have no chance."""
        return len(self.weights) if self.tokens is None else int(self.tokens[-1]) + 1 if len(self.tokens) else 0

    @property
    def most(self) -> float:
        """The likeliest token's chance."""
        return float(self.weights.max()) / self.total

    @property
    def likeliest(self) -> int:
        """The likeliest token; of equal ones the first."""
        place = int(self.weights.argmax())
        return place if self.tokens is None else int(self.tokens[place])

    @cached_property
    def entropy(self) -> float:
        """H = -sum p log p, in nats."""
        least = np.finfo(self.weights.dtype).tiny  # what weighs nothing adds nothing, whatever its logarithm
        logs = np.log(np.maximum(self.weights, least))
        return math.log(self.total) - float(self.weights @ logs) / self.total

    def of(self, token: int) -> float:
        """One token's chance."""
        if token not in self._known:
            self._known[token] = self._of(token)
        return self._known[token]

    def _of(self, token: int) -> float:
        place = token if self.tokens is None else int(np.searchsorted(self.tokens, token))
        if place >= len(self.weights) or (self.tokens is not None and self.tokens[place] != token):
            return 0.0
        return float(self.weights[place]) / self.total if self.total else 0.0

    def wide(self, size: int) -> np.ndarray:
        """The chances of all tokens below `size`, in the order of their ids. [size]"""
        weights = self.weights * self._share
        if self.tokens is None and len(weights) == size:
            return weights
        wide = np.zeros(size, weights.dtype)
        known = weights[:size] if self.tokens is None else weights[self.tokens < size]
        wide[slice(len(known)) if self.tokens is None else self.tokens[: len(known)]] = known
        return wide

    def on(self, other: TokenDistribution) -> np.ndarray:
        """The chances of the tokens that `other` keeps. [kept of other]"""
        wide = self.wide(other.size)
        return wide if other.tokens is None else wide[other.tokens]

    def at(self, number: float) -> int:
        """The least token whose cumulative chance exceeds a number in [0, 1)."""
        reached = number * self.total
        block = min(int(self._sums.searchsorted(reached, side="right")), len(self._sums) - 1)
        first, before = block * _BLOCK, float(self._sums[block - 1]) if block else 0.0
        weights = self.weights[first : first + _BLOCK]
        place = int(weights.cumsum(dtype=np.float64).searchsorted(reached - before, side="right"))
        place = first + place if place < len(weights) else int(np.flatnonzero(self.weights[: first + _BLOCK])[-1])
        return place if self.tokens is None else int(self.tokens[place])

    def above(self, q: TokenDistribution, share: float = 1.0) -> TokenDistribution:
        """What `share` of these chances have more than those of q: weights (share p - q)+"""
        rest = self.weights * (self._share * self.weights.dtype.type(share))
        rest -= q.on(self)
        return TokenDistribution(np.maximum(rest, 0.0, out=rest), self.tokens)

    def without(self, token: int) -> TokenDistribution:
        """The same weights, but for this token's."""
        weights = self.weights.copy()
        weights[token if self.tokens is None else self.tokens.searchsorted(token)] = 0.0
        return TokenDistribution(weights, self.tokens)

    @property
    def _share(self) -> np.floating:
        """What makes a weight a chance."""
        share: np.floating = self.weights.dtype.type(1.0 / self.total if self.total else 0.0)
        return share


def _block_sums(weights: np.ndarray) -> np.ndarray:
    """Sums of the weights up to each block's end, float64 [blocks]; within a block in the weights' own precision."""
    whole = len(weights) // _BLOCK * _BLOCK
    sums = np.einsum("ij->i", weights[:whole].reshape(-1, _BLOCK))  # twice as fast as sum(1)
    if whole < len(weights):
        sums = np.append(sums, weights[whole:].sum())
    return sums.cumsum(dtype=np.float64)


def one_hot(token: int) -> TokenDistribution:
    """The distribution that gives one token alone."""
    return TokenDistribution(np.ones(1), np.array([token]))


def distribution_of(scores: np.ndarray, sampling: Sampling, ids: np.ndarray | None = None) -> TokenDistribution:
    """What a row of adjusted scores gives under sampling options, as `sampling.processed` does; of temperature 0 as of
    1, without filters. No token has a chance where none is allowed. float32 or float64 [held]

    `ids` int64 [held] are the tokens that the scores are of; None: 0, 1, ...
    """
    top, temperature = scores.max(), sampling.temperature or 1.0
    if not np.isfinite(top):
        return TokenDistribution(np.zeros(len(scores)), ids)
    if not sampling.filters:
        make = partial(_exponentials, scores, top, temperature)
        return TokenDistribution(make(), ids, make)
    row = _shifted(scores, top, temperature)
    places = np.flatnonzero(row >= _floor(row, sampling))
    return TokenDistribution(np.exp(row[places]), places if ids is None else ids[places])


def _exponentials(scores: np.ndarray, top: np.floating, temperature: float) -> np.ndarray:
    row = _shifted(scores, top, temperature)
    return np.exp(row, out=row)


def _shifted(scores: np.ndarray, top: np.floating, temperature: float) -> np.ndarray:
    """(scores - top) / temperature: 0 for the likeliest. [held]"""
    row: np.ndarray = scores - top
    if temperature != 1.0:
        row *= row.dtype.type(1.0 / temperature)
    return row


def _floor(row: np.ndarray, sampling: Sampling) -> float:
    """The lowest shifted score that stays; equal ones stay or go together."""
    best, floor = row, -math.inf
    if sampling.top_k and sampling.top_k < len(row):
        best = np.partition(row, len(row) - sampling.top_k)[-sampling.top_k :]
        floor = float(best.min())
    if sampling.top_p < 1.0:
        floor = max(floor, _nucleus(best, sampling.top_p))
    return max(floor, math.log(sampling.min_p)) if sampling.min_p else floor


def _nucleus(row: np.ndarray, top_p: float) -> float:
    """The shifted score of the token by which the likeliest ones' mass reaches top_p: it stays. [kept]"""
    whole, count = TokenDistribution(np.exp(row)).total, min(_NUCLEUS, len(row))
    while True:
        best = np.sort(np.partition(row, len(row) - count)[-count:])[::-1]
        mass = np.exp(best).cumsum(dtype=np.float64)
        if mass[-1] >= top_p * whole or count == len(row):
            return float(best[min(int(mass.searchsorted(top_p * whole)), count - 1)])
        count = min(4 * count, len(row))


class DecisionKey(NamedTuple):
    """Names one decision of one request; none may be asked for twice, or a text would be biased. Node ids never return,
    so they tell the rounds apart; `purpose` is one of `core.noise`."""

    seed: int
    choice: int
    node_id: int
    purpose: int

    def again(self, number: int) -> DecisionKey:
        """The key of the same decision where it is made a number of times more: of the next draws below one node."""
        return self._replace(purpose=self.purpose + PURPOSES * number)


class RandomSource:
    """Decisions by one uniform number a key: the same whatever else was decided, and in whatever order."""

    def number(self, key: DecisionKey) -> float:
        """In [0, 1)."""
        return uniform(*key)

    def accepts(self, key: DecisionKey, p: float) -> bool:
        """True with probability p; certain from 1 on."""
        return self.number(key) < p

    def draw(self, key: DecisionKey, p: TokenDistribution) -> int:
        """A token drawn from p: the least whose cumulative chance exceeds the number."""
        return p.at(self.number(key))
