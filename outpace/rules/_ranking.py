"""Rows of scores on the host, ranked in one call of the native kernels: None where these are not installed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from outpace.core.lazy import torch
from outpace.core.logits import largest_indices, log_softmax
from outpace.core.noise import gumbel_from_hashes, token_hashes
from outpace.core.sampling import Sampling, filter_logits
from outpace.core.types import TopK

"""Tokens on the scale by which a rule's target will choose, best first, and their values there."""


@cache
def native_rank() -> Callable[..., list[TopK]] | None:
    """The kernels' `rank`; None where they are not installed, or older than it."""
    try:
        from outpace_kernels import rank
    except ImportError:
        return None
    function: Callable[..., list[TopK]] = rank
    return function


@cache
def filters_natively() -> bool:
    """Whether the kernels' `rank` leaves out what filters do; older ones do not."""
    import outpace_kernels

    return hasattr(outpace_kernels, "Noise")


def ranked(
    scores: np.ndarray,
    samplings: Sequence[Sampling],
    count: int,
    *,
    ids: np.ndarray | None = None,
    keys: Sequence[int] = (),
    whole: bool = True,
) -> list[TopK] | None:
    """The `count` best of each row [rows, held] by log q, plus the noise of the row's key where there are `keys`.

    Not `whole`: by x / T, which is log q up to a constant and needs no sum. Nothing is offered for a row that has a nan
    or no finite top, nor, not `whole`, where filters in other arithmetic may leave out the best. `ids` int64 [held] are
    the tokens that the columns stand for; None: 0, 1, ...
    """
    rank = native_rank()
    if rank is None:
        return None
    if filters_natively() and any(sampling.filters for sampling in samplings):
        temperatures = [sampling.temperature or 1.0 for sampling in samplings]
        return rank(scores, count, temperatures, keys, ids, whole, [sampling.kernel_filters for sampling in samplings])
    scores, temperatures = prepared(scores, samplings)
    return rank(scores, count, temperatures, keys, ids, whole)


def prepared(scores: np.ndarray, samplings: Sequence[Sampling]) -> tuple[np.ndarray, list[float]]:
    """The rows with -inf where filtered out, and the temperatures that they are still to be divided by. [rows, held]"""
    if any(sampling.filters for sampling in samplings):
        rows = [
            filter_logits(torch.from_numpy(row)[None], [s]).numpy() for row, s in zip(scores, samplings, strict=True)
        ]
        return np.concatenate(rows), [1.0] * len(rows)
    return scores, [sampling.temperature or 1.0 for sampling in samplings]


def log_chances(scores: np.ndarray, samplings: Sequence[Sampling]) -> list[np.ndarray]:
    """log q of rows [rows, held], one by one in numpy; an empty array for a row without a finite top."""
    rows, temperatures = prepared(scores, samplings)
    return [
        log_softmax(row / np.float32(temperature)) if np.isfinite(row.max()) else row[:0]
        for row, temperature in zip(rows, temperatures, strict=True)
    ]


REACH = 8.0
_LUCKY = 1 << 23  # 2^31 / 256
_LUCK = 8 * math.log(2) + 1e-6  # at most the g of tokens that are not lucky
_PLACES = 256  # rows of noise remembered: trees in flight ask for the same positions again and again
_SAMPLE = 64  # likeliest tokens that are always asked
_MANY = 1024  # with more likely tokens than this, and an eighth of all, the noise of all costs no more


def clear_winner(tokens: Sequence[int], times: Sequence[float]) -> int | None:
    """The first of a row's two best, or None where they are too close to call; `times` are l + m = x / T + g.

    |m| <= |l + m| + 22.2: the winner's l is at least that of the likeliest token, whose E is at most 16.
    """
    if not tokens:
        return None
    margin = _margin(abs(times[0]) + 22.2)
    is_clear = margin < 1.0 and (len(tokens) == 1 or times[0] > times[1] + margin)
    return tokens[0] if is_clear else None


def _margin(height: float) -> float:
    """By what two l have to differ for their order to be that of the race; `height` is |m|.

    Both ways compute l with rounding errors. In float32, with u = 2^-24: x / T, minus m and the log of the sum
    (12 at most for 2^17 tokens), minus the largest of that, errs by 9 u (|m| + d) + 44 u, d = m - x / T; exp by
    2^-22, E by 1e-6, the quotient by u. Tokens with d > 40 lose, for g <= 22.2; so two of them that differ by more
    than 1e-4 + 2e-6 |m| stand in this order in float32, too.
    """
    return 1e-4 + 2e-6 * height


class Lucky(NamedTuple):
    """The tokens of a vocabulary whose noise under one key is small, and their g: [lucky]"""

    key: int
    vocab: int
    tokens: np.ndarray  # int64, rising
    g: np.ndarray  # float64


class Race:
    """Winners of races, and memory of who is lucky by key. Several threads may ask: a place is written at once."""

    def __init__(self) -> None:
        self._known: list[Lucky | None] = [None] * _PLACES
        self._all = np.arange(0, dtype=np.uint32)

    def __reduce__(self) -> tuple[type[Race], tuple[()]]:
        return Race, ()  # what it remembers stays here

    def winner(self, row: np.ndarray, temperature: float, key: int) -> int | None:
        """The token that `argmax(softmax(row / temperature) / E)` gives, or None where that has to be asked. [vocab]"""
        top = float(row.max())
        margin = _margin(abs(top) / temperature)
        if not margin < 1.0:  # not for infinities and not-a-numbers either
            return None
        likely = np.flatnonzero(row >= top - REACH * temperature)
        if len(likely) > max(_MANY, len(row) // 8):
            return None
        lucky = self.lucky(key, len(row))
        tokens = np.concatenate([likely, lucky.tokens])
        times = np.concatenate([gumbel_from_hashes(token_hashes(key, likely)), lucky.g])
        times += (row[tokens].astype(np.float64) - top) / temperature
        best = int(times.argmax())
        token, time = int(tokens[best]), float(times[best])
        times[tokens == token] = -math.inf  # it may be likely and lucky
        second = max(float(times.max()), _LUCK - REACH)
        return token if time > second + margin else None

    def best(
        self, log_q: np.ndarray, key: int, vocab: int, ids: np.ndarray | None, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Places of the `count` largest log q + g of a row, largest first, and these values: [count] both.

        `log_q` float32 [held] is of tokens `ids`, rising (None: of all), out of a vocabulary of `vocab`. The likeliest
        and the lucky give a bound on the count-th best; whatever may exceed that with the others' luck is asked then.
        """
        lucky = self._lucky_places(key, vocab, ids)
        sample = largest_indices(log_q, min(max(_SAMPLE, count), len(log_q)))
        places = np.union1d(sample, lucky)
        values = log_q[places] + gumbel_from_hashes(token_hashes(key, places if ids is None else ids[places]))
        order = np.argsort(-values, kind="stable")[:count]
        enough = values[order[-1]] - _LUCK if len(order) == count else -math.inf
        if len(sample) < len(log_q) and enough < log_q[sample[-1]]:
            places = np.union1d(np.flatnonzero(log_q >= enough - 1e-5), lucky)
            values = log_q[places] + gumbel_from_hashes(token_hashes(key, places if ids is None else ids[places]))
            order = np.argsort(-values, kind="stable")[:count]
        return places[order], values[order]

    def lucky(self, key: int, vocab: int) -> Lucky:
        """Who is lucky under this key."""
        place = key % _PLACES
        known = self._known[place]
        if known is None or known.key != key or known.vocab != vocab:
            numbers = token_hashes(key, self._tokens(vocab))
            tokens = np.flatnonzero(numbers < _LUCKY)
            known = self._known[place] = Lucky(key, vocab, tokens, gumbel_from_hashes(numbers[tokens]))
        return known

    def _tokens(self, vocab: int) -> np.ndarray:
        """0, 1, ... up to the vocabulary's end."""
        tokens = self._all
        if len(tokens) != vocab:
            tokens = self._all = np.arange(vocab, dtype=np.uint32)
        return tokens

    def _lucky_places(self, key: int, vocab: int, ids: np.ndarray | None) -> np.ndarray:
        tokens = self.lucky(key, vocab).tokens
        if ids is None:
            return tokens
        places = np.searchsorted(ids, tokens)
        places[places == len(ids)] = 0
        return places[ids[places] == tokens]
