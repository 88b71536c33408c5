"""Draw x from p at each node and continue while x is a child: exact for any picked tree, without q.

Sample-and-match (no paper); the rule for drafts that come from a table.

The draw inverts p's distribution function at one uniform number keyed by position: the text depends on the seed alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from outpace.core.adjust import adjusted
from outpace.core.lazy import torch
from outpace.core.noise import uniform
from outpace.core.sampling import processed
from outpace.core.scores import Held
from outpace.core.tree import Siblings, TokenTree
from outpace.core.types import Offer, Row, Rule, Verdict
from outpace.rules.base import follow, likeliest

if TYPE_CHECKING:
    from torch import Tensor

LOSSLESS = True
COST = "a cumulative sum over p for each row"


@dataclass(frozen=True)
class Options:
    """None."""


class Match(Rule):
    """The least x whose cumulative p exceeds u."""

    lossless = LOSSLESS
    keyed = True
    siblings = Siblings.PICKED

    def reduce(self, logits: Tensor, rows: Sequence[Row]) -> list[int]:
        log_p = processed(adjusted(logits, rows), [row.request.sampling for row in rows])
        cumulative = torch.exp(log_p.double()).cumsum(dim=-1)  # [rows, vocab]
        u = logits.new_tensor([self.draw(row) for row in rows], dtype=torch.float64)
        target = u[:, None] * cumulative[:, -1:]  # the last entry is 1 up to rounding
        picks: list[int] = torch.searchsorted(cumulative, target, right=True).squeeze(-1).tolist()
        return picks

    def draw(self, row: Row) -> float:
        """The uniform number in [0, 1) that decides this position."""
        return uniform(row.request.seed, row.request.choice, row.position)

    def walk(self, tree: TokenTree, picks: Sequence[int]) -> Verdict:
        return follow(tree, picks)

    def rank(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        """log q"""
        return processed(adjusted(logits, rows), [row.request.sampling for row in rows])

    def best(self, scores: np.ndarray, held: Held, rows: Sequence[Row], count: int) -> list[Offer]:
        """The `count` best by `rank` of each row of scores [rows, held]."""
        return likeliest(scores, held, [row.request.sampling for row in rows], count)


def build(options: Options) -> Match:
    """The rule."""
    return Match()
