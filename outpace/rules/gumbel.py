"""The target writes argmax(log p + g) with noise keyed by position: exactly p, and the text depends on the seed alone.

Daliri, Musco, Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding", arXiv:2408.07978.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.core.adjust import adjusted
from outpace.core.noise import exponential, gumbel, row_key
from outpace.core.sampling import processed
from outpace.core.tree import Siblings, TokenTree
from outpace.core.types import Row, Verdict
from outpace.rules.base import follow

LOSSLESS = True


@dataclass(frozen=True)
class Options:
    """None."""


class Gumbel:
    """The exponential race argmax(p / E), with E the same for target and drafter."""

    lossless = LOSSLESS
    siblings = Siblings.PICKED

    def reduce(self, logits: Tensor, rows: Sequence[Row]) -> list[int]:
        log_p = processed(adjusted(logits, rows), [row.request.sampling for row in rows])
        weights = torch.exp(log_p - log_p.amax(dim=-1, keepdim=True))
        race = exponential(_keys(rows), logits.shape[-1], logits.device)
        picks: list[int] = (weights / race).argmax(dim=-1).tolist()
        return picks

    def walk(self, tree: TokenTree, picks: Sequence[int]) -> Verdict:
        return follow(tree, picks)

    def rank(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        """log q + g"""
        log_q = processed(adjusted(logits, rows), [row.request.sampling for row in rows])
        return log_q + gumbel(_keys(rows), logits.shape[-1], logits.device)


def _keys(rows: Sequence[Row]) -> list[int]:
    return [row_key(row.request.seed, row.request.choice, row.position) for row in rows]


def build(options: Options) -> Gumbel:
    """The rule."""
    return Gumbel()
