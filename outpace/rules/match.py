"""Draw x from p at each node and continue while x is a child: exact for any picked tree, without q.

Sample-and-match (no paper); the rule for drafts that come from a table.

The draw inverts p's distribution function at one uniform number keyed by position: the text depends on the seed alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from outpace.core.adjust import adjust_logits
from outpace.core.arrays import to_device
from outpace.core.distribution import distribution_of
from outpace.core.lazy import torch
from outpace.core.logits import SparseLogits, host_array, host_rows, tensor_of
from outpace.core.noise import uniform
from outpace.core.sampling import Sampling, log_probs
from outpace.core.tree import Siblings, TokenTree
from outpace.core.types import Row, Rule, TopK, Verdict
from outpace.rules._ranking import prepared
from outpace.rules._ratio import NodeScores
from outpace.rules.base import follow_picks, most_likely, takes_arrays

if TYPE_CHECKING:
    from torch import Tensor

LOSSLESS = True
COST = "p and its cumulative sum for each node that the walk reaches"
_DOUBT = 1e-5  # by so much of the whole at most a running sum errs
_BARE = Sampling(1.0)
_BELOW_ONE = 1.0 - 2.0**-53


@dataclass(frozen=True)
class Options:
    """None."""


class Match(Rule):
    """The least x whose cumulative p exceeds u."""

    lossless = LOSSLESS
    keyed = True
    siblings = Siblings.PICKED

    @takes_arrays
    def reduce(self, logits: Tensor | np.ndarray, rows: Sequence[Row]) -> list[Any]:
        """On the host the rows themselves, drawn from where the walk comes to them; elsewhere each row's token."""
        if host_rows(logits) is None:
            return self.run(adjust_logits(tensor_of(logits), rows), rows)
        return [NodeScores(row, scores) for row, scores in zip(rows, logits, strict=True)]

    def run(self, logits: Tensor, rows: Sequence[Row]) -> list[int]:
        """The draws over all tokens, which say what the faster ones have to give. Adjusted logits [rows, vocab]"""
        log_p = log_probs(logits, [row.request.sampling for row in rows])
        cumulative = torch.exp(log_p.double()).cumsum(dim=-1)  # [rows, vocab]
        u = to_device([self.draw(row) for row in rows], np.float64, logits.device)
        target = u[:, None] * cumulative[:, -1:]  # the last entry is 1 up to rounding
        picks: list[int] = torch.searchsorted(cumulative, target, right=True).squeeze(-1).tolist()
        return picks

    def draw(self, row: Row) -> float:
        """The uniform number in [0, 1) that decides this position."""
        return uniform(row.request.seed, row.request.choice, row.position)

    def walk(self, tree: TokenTree, picks: Sequence[Any]) -> Verdict:
        return follow_picks(tree, Drawing(self, picks))

    def pick(self, judged: NodeScores) -> int:
        """One row's token: what two numbers give that lie around its own by more than sums in float32 may err, where
        they give the same."""
        logits, sampling = adjust_logits(judged.logits[None], [judged.row]), judged.row.request.sampling
        (scores,), (temperature,) = prepared(host_array(logits), [sampling])
        if temperature != 1.0:
            scores = scores / np.float32(temperature)  # rounded as `run` rounds it
        p, u = distribution_of(scores, _BARE), self.draw(judged.row)
        if p.total > 0:
            token = p.at(max(u - _DOUBT, 0.0))
            if token == p.at(min(u + _DOUBT, _BELOW_ONE)):
                return token
        return self.run(tensor_of(logits), [judged.row])[0]

    def rank(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        """log q"""
        return log_probs(adjust_logits(logits, rows), [row.request.sampling for row in rows])

    def best(self, scores: np.ndarray, held: SparseLogits, rows: Sequence[Row], count: int) -> list[TopK]:
        """The `count` best by `rank` of each row of scores [rows, held]."""
        return most_likely(scores, held, [row.request.sampling for row in rows], count)


class Drawing(Sequence[int]):
    """The tokens of a tree's rows, each drawn where it is asked for."""

    def __init__(self, rule: Match, picks: Sequence[Any]) -> None:
        self._rule, self._picks, self._drawn = rule, picks, dict[int, int]()

    def __len__(self) -> int:
        return len(self._picks)

    def __getitem__(self, node: Any) -> Any:
        if node not in self._drawn:
            pick = self._picks[node]
            self._drawn[node] = self._rule.pick(pick) if isinstance(pick, NodeScores) else pick
        return self._drawn[node]


def build(options: Options) -> Match:
    """The rule."""
    return Match()
