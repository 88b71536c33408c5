"""PEARL: while the target verifies a chain, the drafter goes on with the next one, as if all of it were accepted.

Parallel speculative decoding with adaptive draft length, arXiv:2408.11850.

Pre-verify: after a rejection the target scores the root alone, and the token it picks there judges the first token of
the chain that is drafted meanwhile. Post-verify: it scores a chain, and its last row judges the first token of the
next. A rejection drops everything that was drafted below it.
"""

from __future__ import annotations

from dataclasses import dataclass

from outpace.card.cache import VisibilityOptions
from outpace.core.drafting import DraftDirectives
from outpace.core.options import MethodOptions, whole
from outpace.core.types import Await, Verify
from outpace.decoders.base import Decoder, DecoderGenerator, RequestContext, walk_and_correct


class Pearl(Decoder):
    """Pre-verifies after a rejection, else post-verifies; the drafter is at most one chain ahead."""

    name = "pearl"
    cost = "a pass or draft_length draft steps, whichever takes longer"
    drafting = "parallel"
    length_option = "draft_length"

    @dataclass(frozen=True)
    class Options(MethodOptions):
        draft_length: int = whole(
            4, 1, 256, help="tokens in a chain (gamma); best is the number that is drafted during one target pass"
        )

    @classmethod
    def num_nodes(cls, options: Options) -> int:
        """Return the chain's length: a pass over the root and all but the last token verifies the whole chain."""
        return options.draft_length

    def decode(self, context: RequestContext, options: Options) -> DecoderGenerator:
        candidates, gamma = context.candidates, options.draft_length
        candidates.visibility = VisibilityOptions(chain=True)
        context.set_directives(DraftDirectives(depth=gamma, width=1))
        while True:
            if not candidates.missed:
                yield Await(depth=gamma - 1)
            tree = candidates.query(1 if candidates.missed else min(gamma, context.budget))
            picks = yield Verify(tree)
            yield Await(depth=len(tree))
            commit = walk_and_correct(context, tree, picks)
            context.set_directives(DraftDirectives(depth=gamma if candidates.missed else 2 * gamma - 1, width=1))
            yield commit
