"""Children drawn from q, with q kept beside them: what the rules need that judge by the ratio p / q."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outpace.core.adjust import adjusted
from outpace.core.chance import Key
from outpace.core.errors import UserError, check_whole
from outpace.core.lazy import torch
from outpace.core.noise import DRAW
from outpace.core.sampling import unscaled
from outpace.core.tree import Drawn, Siblings, TokenTree
from outpace.core.types import Request, Row
from outpace.rules.base import rank_rows

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Draws:
    """How many children are drawn below a node, by its depth; the last number holds for all deeper ones. With a rule
    that takes chains it is one."""

    by_depth: tuple[int, ...]

    @classmethod
    def read(cls, text: str) -> Draws:
        """From whole numbers with commas between them; UserError for anything else."""
        parts = str(text).split(",")
        if not all(part.strip().isdecimal() for part in parts):
            raise UserError(f"draws is {text!r}, it must be whole numbers with commas between them, as in 2,1")
        for part in parts:
            check_whole("draws", int(part), 1, 64)
        return cls(tuple(map(int, parts)))

    def below(self, tree: TokenTree, node: int, request: Request) -> int:
        """Of one node. A token that was drawn several times stands for as many branches."""
        if not request.rule.fan:
            return 1
        parent = tree.parents[node]
        times = tree.drawn[parent].tokens.count(tree.tokens[node]) if node else 1
        return times * self.by_depth[min(tree.depth(node), len(self.by_depth) - 1)]


def is_drawn(request: Request) -> bool:
    """Whether the request's rule judges children that were drawn."""
    return request.rule.siblings is not Siblings.PICKED


def draw_layer(tree: TokenTree, frontier: Sequence[int], logits: Tensor, rows: Sequence[Row], draws: Draws) -> int:
    """Draws the children of these nodes of one request, whose scores the draft gives as logits [nodes, vocab]; the
    number of nodes added."""
    request = rows[0].request
    ranks = rank_rows(logits, rows)
    raws = _unscaled(logits, rows) if request.rule.raw else [None] * len(rows)
    return sum(
        draw_children(tree, node, log_q, request, draws.below(tree, node, request), raw)
        for node, log_q, raw in zip(frontier, ranks, raws, strict=True)
    )


def _unscaled(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    try:
        return unscaled(adjusted(logits, rows))
    except UserError:  # a constraint that failed: its request ends where the target asks it
        return unscaled(adjusted(logits, [row._replace(is_open=True) for row in rows]))


def draw_children(
    tree: TokenTree, node: int, log_q: Tensor, request: Request, count: int = 1, raw: Tensor | None = None
) -> int:
    """Draws `count` children of `node` from q (log q [vocab], normalised), or fewer where q has no more and they are
    drawn without replacement; the number of nodes added. Nothing is drawn anew for the same node."""
    q = torch.exp(log_q.double()).cpu()
    total = float(q.sum())
    if not total > 0:  # a constraint allows none of the tokens that the draft has
        return 0
    q /= total
    kind = request.rule.siblings
    key = Key(request.seed, request.choice, tree.ids[node], DRAW)
    tokens: list[int] = []
    left = q
    while len(tokens) < count:
        tokens.append(request.rule.chance.draw(key.again(len(tokens)), left))
        if kind is Siblings.WITHOUT_REPLACEMENT:
            left = left.index_fill(0, torch.tensor(tokens), 0.0)
            if not left.any():
                break
    return tree.draw(node, Drawn(q, tuple(tokens), raw), kind)
