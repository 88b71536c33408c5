"""The walk of the rules that take what the target finds good enough: the longest path of such tokens, then its own.

The target's own token is the one that plain decoding writes there: its likeliest at temperature 0, else argmax(log p +
g) with noise keyed by position. So where nothing is good enough, the text is plain decoding's. Elsewhere it depends on
what was drafted; a drafter that learns from answer to answer may lead to another text for the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from outpace.core.adjust import adjust_logits
from outpace.core.logits import SparseLogits
from outpace.core.sampling import log_probs
from outpace.core.tree import Role, Siblings, TokenTree, path_to
from outpace.core.types import Row, Rule, TopK, Verdict
from outpace.rules._ratio import NodeScores
from outpace.rules.base import most_likely, takes_arrays
from outpace.rules.greedy import Greedy
from outpace.rules.gumbel import Gumbel

if TYPE_CHECKING:
    from torch import Tensor


class Relaxed(Rule):
    """Accepts by `acceptable`; whatever was drafted, and however."""

    lossless = False
    siblings = Siblings.PICKED

    def __init__(self) -> None:
        self._greedy, self._sampled = Greedy(), Gumbel()

    def acceptable(self, judged: NodeScores) -> Callable[[int], bool]:
        """Says of a token whether it is good enough after this node."""
        raise NotImplementedError

    @takes_arrays
    def reduce(self, logits: Tensor | np.ndarray, rows: Sequence[Row]) -> list[NodeScores]:
        return [NodeScores(row, scores) for row, scores in zip(rows, logits, strict=True)]

    def walk(self, tree: TokenTree, picks: Sequence[NodeScores]) -> Verdict:
        depth: dict[int, int] = {0: 0}
        good: dict[int, Callable[[int], bool]] = {}
        for node in range(1, len(tree)):
            parent = tree.parents[node]
            if parent not in depth or parent >= len(picks) or tree.roles[node] is Role.PROBE:
                continue
            if parent not in good:
                good[parent] = self.acceptable(picks[parent])
            if good[parent](tree.tokens[node]):
                depth[node] = depth[parent] + 1
        path = path_to(tree, max(depth, key=depth.__getitem__))
        own = [self._own(picks[node]) for node in path if node < len(picks)]
        relaxed = sum(tree.tokens[node] != token for node, token in zip(path[1:], own, strict=False))
        return Verdict(path, own[-1] if len(own) == len(path) else None, relaxed)

    def rank(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        """log q"""
        return log_probs(adjust_logits(logits, rows), [row.request.sampling for row in rows])

    def best(self, scores: np.ndarray, held: SparseLogits, rows: Sequence[Row], count: int) -> list[TopK]:
        """The `count` best by log q of each row of scores [rows, held]."""
        return most_likely(scores, held, [row.request.sampling for row in rows], count)

    def _own(self, judged: NodeScores) -> int:
        rule: Greedy | Gumbel = self._greedy if judged.row.request.sampling.is_greedy else self._sampled
        return rule.reduce(judged.logits[None], [judged.row])[0]
