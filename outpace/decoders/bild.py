"""The draft writes while it is confident; the target checks this in one pass and rolls back to the first bad token.

After BiLD, Kim et al., arXiv:2302.07863; here for decoder-only models.

The draft hands over where its likeliest token has less than `fallback`, or after `most` tokens. With its own rule,
rollback, this is lossy; with another rule the text is that rule's, and only the draft's length is BiLD's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from outpace.core.errors import check_range, check_whole
from outpace.core.tree import TokenTree, best_nodes
from outpace.core.types import Commit, Draft, Verify
from outpace.decoders.base import Coroutine, RequestContext

LOSSLESS = False
COST = "drafting and a pass, in turn"
NEEDS = "drafter"
RULE = "rollback"  # where none is asked for
NODES = 11  # of a pass, unless it is told: the root, and ten tokens


@dataclass(frozen=True)
class Options:
    """`fallback`: the draft stops where the probability of its likeliest token is lower; `most`: the most tokens that
    it writes before the target checks them."""

    fallback: float = 0.6
    most: int = 10

    def __post_init__(self) -> None:
        check_range("fallback", self.fallback, 0.0, 1.0)
        check_whole("most", self.most, 1, 256)


def decode(place: RequestContext, options: Options) -> Coroutine:
    """Write, verify, roll back."""
    rule = place.request.rule
    tree = TokenTree(place.last_token)
    while True:
        sure = 1  # nodes, or draws, while the draft was sure
        for _ in range(min(options.most, place.budget - 1)):
            known = len(tree)
            if not (yield Draft(tree)) or _is_unsure(tree, range(known, len(tree)), options.fallback):
                break
            sure = 1 + sum(len(drawn.tokens) for drawn in tree.drawn.values())
        if rule.traits.q_at_leaves:
            yield Draft(tree)
        count = min(sure, place.budget) if tree.drawn else place.budget
        tree = tree.copy(best_nodes(tree, count, rule.traits.q_at_leaves))
        picks = yield Verify(tree)
        tree = yield Commit(tree, rule.walk(tree, picks))


def _is_unsure(tree: TokenTree, new: Sequence[int], fallback: float) -> bool:
    """Whether the draft's likeliest tokens have less than this chance where it wrote the last layer. A drawn layer may
    then be taken back: what it was drawn from says so, not what came out."""
    drawn = [tree.drawn[parent] for parent in {tree.parents[node] for node in new} if parent in tree.drawn]
    if not drawn:
        return max(math.exp(tree.scores[node] - tree.scores[tree.parents[node]]) for node in new) < fallback
    return max((each.q if each.raw is None else each.raw()).most for each in drawn) < fallback
