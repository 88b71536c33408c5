"""Draw x from p at each node and continue while x is a child: exact for any picked tree, without q.

Sample-and-match (no paper); the rule for drafts that come from a table.

The draw inverts p's distribution function at one uniform number keyed by position: the text depends on the seed alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from outpace.core.adjust import adjust_logits
from outpace.core.arrays import to_device, torch
from outpace.core.logits import host_rows, tensor_of
from outpace.core.noise import uniform
from outpace.core.sampling import log_probs
from outpace.core.tree import Siblings, TokenTree
from outpace.core.types import Row, RuleTraits, Verdict
from outpace.rules._ratio import NodeScores
from outpace.rules.base import LogProbRule

if TYPE_CHECKING:
    from torch import Tensor


class Match(LogProbRule):
    """Picks the lowest x whose cumulative p exceeds u."""

    cost = "p and its cumulative sum for each node that the walk reaches"
    traits = RuleTraits(lossless=True, siblings=Siblings.PICKED, same_text=True, takes_arrays=True)

    def reduce(self, logits: Tensor | np.ndarray, rows: Sequence[Row]) -> list[Any]:
        """Return the rows themselves on the host, to be drawn when the walk reaches them; else each row's token."""
        if host_rows(logits) is None:
            return self.run(adjust_logits(tensor_of(logits), rows), rows)
        return [NodeScores(row, scores) for row, scores in zip(rows, logits, strict=True)]

    def run(self, logits: Tensor, rows: Sequence[Row]) -> list[int]:
        """Draw on a device, over all tokens of adjusted logits [rows, vocab]."""
        log_p = log_probs(logits, [row.request.sampling for row in rows])
        cumulative = torch.exp(log_p.double()).cumsum(dim=-1)  # [rows, vocab]
        u = to_device([self.draw(row) for row in rows], np.float64, logits.device)
        target = u[:, None] * cumulative[:, -1:]  # the last entry is 1 up to rounding
        picks: list[int] = torch.searchsorted(cumulative, target, right=True).squeeze(-1).tolist()
        return picks

    def draw(self, row: Row) -> float:
        """Return the uniform number in [0, 1) that decides this position."""
        return uniform(row.request.seed, row.request.choice, row.position)

    def walk(self, tree: TokenTree, picks: Sequence[Any]) -> Verdict:
        return Verdict(*tree.follow([*picks], self.pick))

    def pick(self, node: NodeScores | int) -> int:
        if not isinstance(node, NodeScores):
            return node
        return node.p.token_at(self.draw(node.row))
