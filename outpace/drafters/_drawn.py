"""A child drawn from q, with q kept beside it: what the rules need that judge by the ratio p / q."""

from __future__ import annotations

import torch
from torch import Tensor

from outpace.core.chance import Key
from outpace.core.noise import DRAW
from outpace.core.tree import Siblings, TokenTree
from outpace.core.types import Request


def draw_child(tree: TokenTree, node: int, log_q: Tensor, request: Request) -> int:
    """Draws one child of `node` from q (log q [vocab], normalised); the number of nodes added.

    Keyed by the node's id. Nothing is drawn anew for the same node: it has one child.
    """
    q = torch.exp(log_q.double()).cpu()
    total = float(q.sum())
    if not total > 0:  # a constraint allows none of the tokens that the draft has
        return 0
    q /= total
    token = request.rule.chance.draw(Key(request.seed, request.choice, tree.ids[node], DRAW), q)
    tree.q[node] = q
    tree.add(node, token, tree.scores[node] + min(float(log_q[token]), 0.0), siblings=Siblings.DRAWN)
    return 1
