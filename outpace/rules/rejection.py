"""Accept a drafted token with min(1, p / q), else write from the residual norm((p - q)+): keeps p, not the text.

Leviathan, Kalman, Matias, arXiv:2211.17192; Chen et al., arXiv:2302.01318.

For a token drawn from q, which the drafter leaves in the tree. A picked token (an n-gram's) counts as drawn from a q
that is certain of it: it is accepted with p, and the residual is p without it; several picked siblings are tried in
turn. Every uniform number is keyed by the id of its node, which never returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.core.adjust import adjusted
from outpace.core.chance import Key
from outpace.core.noise import ACCEPT, RESIDUAL
from outpace.core.sampling import processed
from outpace.core.tree import Role, Siblings, TokenTree
from outpace.core.types import Row, Rule, Verdict

LOSSLESS = True


@dataclass(frozen=True)
class Options:
    """None."""


class Judged(NamedTuple):
    """A node's row of scores [vocab], of which p is made where the walk comes to the node: most it never does."""

    row: Row
    logits: Tensor

    @property
    def p(self) -> Tensor:
        """p after the node, float64 [vocab], on the host."""
        log_p = processed(adjusted(self.logits[None], [self.row]), [self.row.request.sampling])[0]
        p = torch.exp(log_p.double()).cpu()
        return p / p.sum()


class Rejection(Rule):
    """The ratio rule, for chains that were drawn and for picked trees."""

    lossless = LOSSLESS
    siblings = Siblings.DRAWN

    def reduce(self, logits: Tensor, rows: Sequence[Row]) -> list[Judged]:
        return [Judged(row, scores) for row, scores in zip(rows, logits, strict=True)]

    def walk(self, tree: TokenTree, picks: Sequence[Judged]) -> Verdict:
        path = [0]
        while path[-1] < len(picks):
            judged = picks[path[-1]]
            child, rest = self._accept(tree, path[-1], judged.row, judged.p)
            if child is None:
                return Verdict(path, self.chance.draw(key_of(judged.row, judged.row.node_id, RESIDUAL), rest))
            path.append(child)
        return Verdict(path, None)

    def rank(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        """log q"""
        return processed(adjusted(logits, rows), [row.request.sampling for row in rows])

    def _accept(self, tree: TokenTree, node: int, row: Row, p: Tensor) -> tuple[int | None, Tensor]:
        """The child that is accepted, or None with the distribution of the target's own token."""
        children = [child for child in tree.children(node) if tree.roles[child] is not Role.PROBE]
        kind = tree.siblings.get(node, Siblings.PICKED)
        if kind is Siblings.WITHOUT_REPLACEMENT or (kind is Siblings.DRAWN and len(children) > 1):
            raise ValueError(f"rejection is not exact for {len(children)} {kind.value} children of node {node}")
        for child in children:
            token = tree.tokens[child]
            q = tree.q[node] if kind is Siblings.DRAWN else certain(token, p)
            if self.chance.accepts(key_of(row, tree.ids[child], ACCEPT), float(p[token]) / float(q[token])):
                return child, p
            p = residual(p, q)
        return None, p


def certain(token: int, like: Tensor) -> Tensor:
    """The distribution that gives `token` alone. [vocab]"""
    q = torch.zeros_like(like)
    q[token] = 1.0
    return q


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm((p - q)+) over p's vocabulary; q's may be shorter or longer. [vocab]"""
    count = min(len(p), len(q))
    rest = p.clone()
    rest[:count] = (p[:count] - q[:count]).clamp_(min=0.0)
    total = rest.sum()
    return rest / total if total > 0 else p  # p = q up to rounding: nothing is ever rejected there


def key_of(row: Row, node_id: int, purpose: int) -> Key:
    """What decides a node of this row's request."""
    return Key(row.request.seed, row.request.choice, node_id, purpose)


def build(options: Options) -> Rejection:
    """The rule."""
    return Rejection()
