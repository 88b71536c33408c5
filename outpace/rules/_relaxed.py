"""The lossy rules that accept a token if the target finds it good enough: the longest such path, then the target's own.

The target's own token is the one that plain decoding writes there: its likeliest at temperature 0, else argmax(log p +
g) with noise keyed by position. So if nothing is good enough, the text is plain decoding's. Otherwise it depends on the
draft; a drafter that learns from earlier answers may lead to another text for the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from outpace.core.tree import Role, Siblings, TokenTree
from outpace.core.types import Row, RuleTraits, Verdict
from outpace.rules._ratio import NodeScores
from outpace.rules.base import LogProbRule
from outpace.rules.greedy import Greedy
from outpace.rules.gumbel import Gumbel

if TYPE_CHECKING:
    from torch import Tensor

_PLAIN: dict[bool, Greedy | Gumbel] = {True: Greedy(), False: Gumbel()}  # the rules of plain decoding, by `is_greedy`


def longest_path(tree: TokenTree, num_rows: int, cost: Callable[[int, int], int | None]) -> list[int]:
    """Return the longest path of accepted nodes; among equally long ones the cheapest, then the first.

    Only the first `num_rows` nodes, which have rows, may have accepted children. `cost(parent, node)` is None for a
    node that is not accepted.
    """
    found: dict[int, tuple[int, int]] = {0: (0, 0)}  # path length and negated cost, by accepted node
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        if parent not in found or parent >= num_rows or tree.roles[node] == Role.PROBE:
            continue
        if (more := cost(parent, node)) is not None:
            length, credit = found[parent]
            found[node] = length + 1, credit - more
    return tree.path(max(found, key=found.__getitem__))


class Relaxed(LogProbRule):
    """Accepts tokens by `acceptable`, however they were drafted."""

    traits = RuleTraits(lossless=False, siblings=Siblings.PICKED, takes_arrays=True)

    def acceptable(self, scores: NodeScores) -> Callable[[int], bool]:
        """Return a function that says whether a token is good enough after this node."""
        raise NotImplementedError

    def reduce(self, logits: Tensor | np.ndarray, rows: Sequence[Row]) -> list[NodeScores]:
        return [NodeScores(row, scores) for row, scores in zip(rows, logits, strict=True)]

    def walk(self, tree: TokenTree, picks: Sequence[NodeScores]) -> Verdict:
        good: dict[int, Callable[[int], bool]] = {}

        def cost(parent: int, node: int) -> int | None:
            if parent not in good:
                good[parent] = self.acceptable(picks[parent])
            return 0 if good[parent](tree.tokens[node]) else None

        path = longest_path(tree, len(picks), cost)
        own = [self._own(picks[node]) for node in path if node < len(picks)]
        relaxed = sum(tree.tokens[node] != token for node, token in zip(path[1:], own, strict=False))
        return Verdict(path, own[-1] if len(own) == len(path) else None, relaxed)

    def _own(self, scores: NodeScores) -> int:
        return _PLAIN[scores.row.request.sampling.is_greedy].reduce(scores.logits[None], [scores.row])[0]
