"""Children drawn from q, stored together with q, for the rules that judge by the ratio p / q."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from outpace.core.adjust import adjust_logits
from outpace.core.distribution import UNFILTERED, DecisionKey, TokenDistribution, distribution_of
from outpace.core.errors import UserError, check_whole
from outpace.core.logits import SparseLogits, host_array
from outpace.core.noise import DRAW
from outpace.core.tree import DrawnChildren, Siblings, TokenTree
from outpace.core.types import Request, Row


@dataclass(frozen=True)
class DrawCounts:
    """Numbers of children drawn below a node, by its depth; the last number applies to all deeper nodes. Rules that
    take chains draw one."""

    by_depth: tuple[int, ...]

    @classmethod
    def read(cls, text: str) -> DrawCounts:
        """Parse whole numbers separated by commas; UserError for anything else."""
        parts = str(text).split(",")
        if not all(part.strip().isdecimal() for part in parts):
            raise UserError(f"draws is {text!r}, it must be whole numbers with commas between them, as in 2,1")
        for part in parts:
            check_whole("draws", int(part), 1, 64)
        return cls(tuple(map(int, parts)))

    def below(self, tree: TokenTree, node: int, request: Request) -> int:
        """Return the number of children of one node. A token that was drawn k times gets k times as many."""
        if not request.rule.traits.several_draws:
            return 1
        parent = tree.parents[node]
        times = tree.drawn[parent].tokens.count(tree.tokens[node]) if node else 1
        return times * self.by_depth[min(tree.depth(node), len(self.by_depth) - 1)]


def is_drawn(request: Request) -> bool:
    """Whether the request's rule judges drawn children."""
    return request.rule.traits.siblings is not Siblings.PICKED


def draw_layer(
    tree: TokenTree, frontier: Sequence[int], scores: SparseLogits, rows: Sequence[Row], draws: DrawCounts
) -> None:
    """Draw children of these nodes of one request from the draft's logits [nodes, kept tokens]."""
    request = rows[0].request
    for number, (node, row) in enumerate(zip(frontier, rows, strict=True)):
        q, raw = proposed(scores.part(slice(number, number + 1)), row)
        draw_children(tree, node, q, request, draws.below(tree, node, request), raw)


def proposed(scores: SparseLogits, row: Row) -> tuple[TokenDistribution, Callable[[], TokenDistribution] | None]:
    """Return q of one row of draft logits [1, kept tokens] and, for rules that need it, a function that returns the
    unscaled q."""
    own, ids = _adjusted(scores, row)[0], scores.ids
    q = distribution_of(own, row.request.sampling, ids)
    return q, cache(partial(distribution_of, own, UNFILTERED, ids)) if row.request.rule.traits.unscaled_q else None


def _adjusted(scores: SparseLogits, row: Row) -> np.ndarray:
    """Return the row on the host, in memory that no later step overwrites, with penalties and constraints applied. [1,
    kept tokens]"""
    if row.request.adjustments is None and row.request.constraint is None:
        own = host_array(scores.values)
        return own if isinstance(scores.values, np.ndarray) else own.copy()  # a captured pass reuses its output tensor
    try:
        wide = adjust_logits(scores.wide(), [row])
    except UserError:  # a failed constraint ends its request in the target pass
        wide = adjust_logits(scores.wide(), [row._replace(skips_mask=True)])
    return host_array(wide if scores.ids is None else wide[:, scores.ids])


def draw_children(
    tree: TokenTree,
    node: int,
    q: TokenDistribution,
    request: Request,
    count: int = 1,
    raw: Callable[[], TokenDistribution] | None = None,
) -> None:
    """Draw `count` children of `node` from q, or fewer if q has no more tokens to draw without replacement. A node's
    children are drawn once."""
    if not q.total > 0:  # the constraint allows none of the draft's tokens
        return
    kind = request.rule.traits.siblings
    key = DecisionKey(request.seed, request.choice, tree.ids[node], DRAW)
    tokens: list[int] = []
    left = q
    while len(tokens) < count:
        tokens.append(request.rule.random_source.draw(key.again(len(tokens)), left))
        if kind == Siblings.WITHOUT_REPLACEMENT and len(tokens) < count:
            left = left.without(tokens[-1])
            if not left.total > 0:
                break
    tree.draw(node, DrawnChildren(q, tuple(tokens), raw), kind)
    q.forget()
