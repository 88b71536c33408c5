"""Draft, then verify, in turn: a chain where the drafter is one wide, else the best nodes of its tree.

Leviathan, Kalman, Matias, arXiv:2211.17192; Chen et al., arXiv:2302.01318; trees: SpecInfer, arXiv:2305.09781.
"""

from __future__ import annotations

from dataclasses import dataclass

from outpace.core.errors import check_whole
from outpace.core.tree import TokenTree, best_nodes
from outpace.core.types import Commit, Draft, Verify
from outpace.decoders.base import Coroutine, Place

LOSSLESS = True
NEEDS = "drafter"


@dataclass(frozen=True)
class Options:
    """`draft_length`: how often the drafter is asked before the target judges (gamma for a chain, else depth)."""

    draft_length: int = 4

    def __post_init__(self) -> None:
        check_whole("draft_length", self.draft_length, 1, 256)


def decode(place: Place, options: Options) -> Coroutine:
    """Grow, verify, commit."""
    rule = place.request.rule
    tree = TokenTree(place.last_token)
    while True:
        for _ in range((options.draft_length if place.budget > 1 else 0) + rule.leaf_q):
            if not (yield Draft(tree)):
                break
        tree = tree.copy(best_nodes(tree, place.budget, rule.leaf_q))
        picks = yield Verify(tree)
        tree = yield Commit(tree, rule.walk(tree, picks))
