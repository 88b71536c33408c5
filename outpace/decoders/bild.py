"""The draft writes while it is confident; the target checks this in one pass and rolls back to the first bad token.

After BiLD, Kim et al., arXiv:2302.07863; here for decoder-only models.

Drafting ends where the draft's likeliest token has a probability below `fallback`, or after 10 tokens. With its own
rule, rollback, this is lossy; with another rule the text is that rule's, and only the draft's length is BiLD's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from outpace.core.options import MethodOptions, number
from outpace.core.tree import TokenTree, best_nodes
from outpace.core.types import Commit, Draft, Verify
from outpace.decoders.base import Decoder, DecoderGenerator, RequestContext

MAX_DRAFT = 10  # tokens that the draft writes before the target checks them


class Bild(Decoder):
    """Drafts until the draft model is unsure, verifies, rolls back."""

    name = "bild"
    lossless = False
    cost = "drafting and a pass, one after the other"
    rule = "rollback"

    @dataclass(frozen=True)
    class Options(MethodOptions):
        fallback: float = number(
            0.6, 0.0, 1.0, help="the draft stops where the probability of its likeliest token is lower"
        )

    @classmethod
    def num_nodes(cls, options: Options) -> int:
        return MAX_DRAFT + 1

    def decode(self, context: RequestContext, options: Options) -> DecoderGenerator:
        rule = context.request.rule
        tree = TokenTree(context.last_token)
        while True:
            num_confident = 1  # nodes (or draws) added before the draft became unsure
            for _ in range(min(MAX_DRAFT, context.budget - 1)):
                known = len(tree)
                if not (yield Draft(tree)) or _is_unsure(tree, range(known, len(tree)), options.fallback):
                    break
                num_confident = 1 + sum(len(drawn.tokens) for drawn in tree.drawn.values())
            if rule.traits.q_at_leaves:
                yield Draft(tree)
            count = min(num_confident, context.budget) if tree.drawn else context.budget
            tree = tree.copy(best_nodes(tree, count, rule.traits.q_at_leaves))
            picks = yield Verify(tree)
            tree = yield Commit(tree, rule.walk(tree, picks))


def _is_unsure(tree: TokenTree, new: Sequence[int], fallback: float) -> bool:
    """Return whether the draft's likeliest token is below the threshold everywhere in the last level. For a drawn level
    the distribution decides and not the token that was drawn from it, so that the level may be dropped."""
    drawn = [tree.drawn[parent] for parent in {tree.parents[node] for node in new} if parent in tree.drawn]
    if not drawn:
        return max(math.exp(tree.scores[node] - tree.scores[tree.parents[node]]) for node in new) < fallback
    return max((each.q if each.raw is None else each.raw()).max_probability for each in drawn) < fallback
