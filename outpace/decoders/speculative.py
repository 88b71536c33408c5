"""Drafting and verification alternate: a chain where the drafter's width is 1, otherwise the best nodes of its tree.

Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318; trees: SpecInfer, arXiv:2305.09781.
"""

from __future__ import annotations

from dataclasses import dataclass

from outpace.core.options import MethodOptions, one_of, whole
from outpace.core.tree import TokenTree, best_nodes
from outpace.core.types import Commit, Draft, Verify
from outpace.decoders._lengths import Confidence, Expected, Fixed, Heuristic
from outpace.decoders.base import Decoder, DecoderGenerator, RequestContext

LENGTHS = ("fixed", "heuristic", "confidence", "expected")


class Speculative(Decoder):
    """Drafts up to `draft_length` levels, then verifies the best nodes."""

    name = "speculative"
    cost = "drafting and a pass, one after the other"
    length_option = "draft_length"

    @dataclass(frozen=True)
    class Options(MethodOptions):
        draft_length: int = whole(
            4, 1, 256, help="draft steps before the target verifies (gamma for a chain, the depth of a tree)"
        )
        lengths: str = one_of(
            "fixed",
            LENGTHS,
            "fixed; heuristic: begins at `draft_length`, two more after a fully accepted draft, one less after any"
            " other; confidence: stops early where the drafter's probability is below 0.4, a threshold that is then"
            " adapted; expected: stops early where the chance that any token is rejected exceeds 0.3",
        )

    def decode(self, context: RequestContext, options: Options) -> DecoderGenerator:
        rule, lengths = context.request.rule, _lengths(options)
        tree = TokenTree(context.last_token)
        while True:
            tree.max_nodes = context.budget
            for _ in range(lengths.limit if context.budget > 1 else 0):
                known = len(tree)
                if not (yield Draft(tree)) or lengths.is_enough(tree, range(known, len(tree))):
                    break
            if rule.traits.q_at_leaves:
                yield Draft(tree)
            tree = tree.copy(best_nodes(tree, context.budget, rule.traits.q_at_leaves))
            picks = yield Verify(tree)
            verdict = rule.walk(tree, picks)
            lengths.learn(tree, verdict.path)
            tree = yield Commit(tree, verdict)


def _lengths(options: Speculative.Options) -> Fixed:
    if options.lengths == "confidence":
        return Confidence(options.draft_length)
    if options.lengths == "expected":
        return Expected(options.draft_length)
    return Heuristic(options.draft_length) if options.lengths == "heuristic" else Fixed(options.draft_length)
