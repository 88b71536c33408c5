"""The target writes argmax(log p + g) with noise keyed by position: exactly p, and the text depends on the seed alone.

Daliri, Musco, Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding", arXiv:2408.07978.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outpace.core.adjust import adjusted
from outpace.core.noise import exponential, gumbel, row_key
from outpace.core.race import Race
from outpace.core.sampling import Sampling, filtered, processed
from outpace.core.scores import Held, host_rows, log_softmax
from outpace.core.tree import Siblings, TokenTree
from outpace.core.types import Row, Verdict
from outpace.rules.base import Offer, follow, offer_of

LOSSLESS = True


@dataclass(frozen=True)
class Options:
    """None."""


class Gumbel:
    """The exponential race argmax(p / E), with E the same for target and drafter."""

    lossless = LOSSLESS
    siblings = Siblings.PICKED

    def __init__(self) -> None:
        self._race = Race()

    def reduce(self, logits: Tensor, rows: Sequence[Row]) -> list[int]:
        logits = adjusted(logits, rows)
        host = host_rows(logits)
        if host is None:
            return self.run(logits, rows)
        picks = [self._winner(scores, row) for scores, row in zip(host, rows, strict=True)]
        return [
            self.run(logits[number : number + 1], [row])[0] if pick is None else pick
            for number, (row, pick) in enumerate(zip(rows, picks, strict=True))
        ]

    def run(self, logits: Tensor, rows: Sequence[Row]) -> list[int]:
        """The race of all tokens, which says what `reduce` has to give. Adjusted logits [rows, vocab]"""
        log_p = processed(logits, [row.request.sampling for row in rows])
        weights = torch.exp(log_p - log_p.amax(dim=-1, keepdim=True))
        race = exponential([_key(row) for row in rows], logits.shape[-1], logits.device)
        picks: list[int] = (weights / race).argmax(dim=-1).tolist()
        return picks

    def walk(self, tree: TokenTree, picks: Sequence[int]) -> Verdict:
        return follow(tree, picks)

    def rank(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        """log q + g"""
        log_q = processed(adjusted(logits, rows), [row.request.sampling for row in rows])
        return log_q + gumbel([_key(row) for row in rows], logits.shape[-1], logits.device)

    def best(self, scores: np.ndarray, held: Held, row: Row, count: int) -> Offer | None:
        """The `count` best by `rank` of one row's scores [held]."""
        log_q = log_softmax(_scaled(scores, row.request.sampling))
        places, values = self._race.best(log_q, _key(row), held.vocab, held.ids, count)
        tokens = places if held.ids is None else held.ids[places]
        return offer_of(tokens.tolist(), values.tolist())

    def _winner(self, scores: np.ndarray, row: Row) -> int | None:
        sampling = row.request.sampling
        if sampling.filters:
            return self._race.winner(_scaled(scores, sampling), 1.0, _key(row))
        return self._race.winner(scores, sampling.temperature, _key(row))


def _scaled(scores: np.ndarray, sampling: Sampling) -> np.ndarray:
    """A row over its temperature, -inf where filtered out. [vocab]"""
    scaled: np.ndarray
    if sampling.filters:
        scaled = filtered(torch.from_numpy(scores)[None], [sampling])[0].numpy()
    else:
        scaled = scores / np.float32(sampling.temperature)
    return scaled


def _key(row: Row) -> int:
    return row_key(row.request.seed, row.request.choice, row.position)


def build(options: Options) -> Gumbel:
    """The rule."""
    return Gumbel()
