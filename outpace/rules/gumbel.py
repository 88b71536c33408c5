"""The target writes argmax(log p + g) with noise keyed by position: exactly p, and the text depends on the seed alone.

Daliri, Musco, Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding", arXiv:2408.07978.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from outpace.core.adjust import adjust_logits
from outpace.core.lazy import torch
from outpace.core.logits import SparseLogits, host_rows, tensor_of
from outpace.core.noise import exponential, gumbel, row_key
from outpace.core.sampling import Sampling, log_probs
from outpace.core.tree import Siblings, TokenTree
from outpace.core.types import Row, Rule, TopK, Verdict
from outpace.rules._ranking import Race, clear_winner, log_chances, prepared, ranked
from outpace.rules.base import by_race, follow_picks, offer_at, takes_arrays

if TYPE_CHECKING:
    from torch import Tensor

LOSSLESS = True
COST = "noise for the tokens of each row that can be the maximum"


@dataclass(frozen=True)
class Options:
    """None."""


@by_race
class Gumbel(Rule):
    """The exponential race argmax(p / E), with E the same for target and drafter."""

    lossless = LOSSLESS
    keyed = True
    siblings = Siblings.PICKED

    def __init__(self) -> None:
        self._race = Race()

    @takes_arrays
    def reduce(self, logits: Tensor | np.ndarray, rows: Sequence[Row]) -> list[int]:
        logits = adjust_logits(logits, rows)
        host = host_rows(logits)
        if host is None:
            return self.run(tensor_of(logits), rows)
        return [
            self.run(tensor_of(logits[number : number + 1]), [row])[0] if pick is None else pick
            for number, (row, pick) in enumerate(zip(rows, self._winners(host, rows), strict=True))
        ]

    def run(self, logits: Tensor, rows: Sequence[Row]) -> list[int]:
        """The race of all tokens, which says what `reduce` has to give. Adjusted logits [rows, vocab]"""
        log_p = log_probs(logits, [row.request.sampling for row in rows])
        weights = torch.exp(log_p - log_p.amax(dim=-1, keepdim=True))
        race = exponential([_key(row) for row in rows], logits.shape[-1], logits.device)
        picks: list[int] = (weights / race).argmax(dim=-1).tolist()
        return picks

    def picks_among_all(self, sampling: Sampling) -> bool:
        """The noise belongs to the token, whoever else takes part; a filter's bound does not."""
        return not sampling.filters

    def walk(self, tree: TokenTree, picks: Sequence[int]) -> Verdict:
        return follow_picks(tree, picks)

    def rank(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        """log q + g"""
        log_q = log_probs(adjust_logits(logits, rows), [row.request.sampling for row in rows])
        return log_q + gumbel([_key(row) for row in rows], logits.shape[-1], logits.device)

    def best(self, scores: np.ndarray, held: SparseLogits, rows: Sequence[Row], count: int) -> list[TopK]:
        """The `count` best by `rank` of each row of scores [rows, held]."""
        samplings, keys = [row.request.sampling for row in rows], [_key(row) for row in rows]
        offers = ranked(scores, samplings, count, ids=held.ids, keys=keys)
        if offers is None:
            rows_log_q = log_chances(scores, samplings)
            offers = [self._best(log_q, key, held, count) for log_q, key in zip(rows_log_q, keys, strict=True)]
        return offers

    def _winners(self, scores: np.ndarray, rows: Sequence[Row]) -> list[int | None]:
        """Each row's pick, or None where it is too close to call. Adjusted scores [rows, vocab]"""
        samplings, keys = [row.request.sampling for row in rows], [_key(row) for row in rows]
        offers = ranked(scores, samplings, 2, keys=keys, whole=False)
        if offers is not None:
            return [clear_winner(*offer) for offer in offers]
        scores, temperatures = prepared(scores, samplings)
        return [self._race.winner(*each) for each in zip(scores, temperatures, keys, strict=True)]

    def _best(self, log_q: np.ndarray, key: int, held: SparseLogits, count: int) -> TopK:
        if not len(log_q):
            return [], []
        places, values = self._race.best(log_q, key, held.vocab, held.ids, min(count, len(log_q)))
        return offer_at(places, values, held)


def _key(row: Row) -> int:
    return row_key(row.request.seed, row.request.choice, row.position)


def build(options: Options) -> Gumbel:
    """The rule."""
    return Gumbel()
