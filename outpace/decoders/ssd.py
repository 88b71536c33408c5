"""SSD: while the target verifies a chain, the drafter drafts a chain for each likely outcome of that verification.

Speculative speculative decoding, arXiv:2603.03251.

An outcome is the number of accepted tokens and the token that the target writes next. Chains for the `width` likeliest
outcomes are drafted together, one token of each in a forward. If the actual outcome is among them, the next chain is
ready (a hit); otherwise it is drafted while the target waits.
"""

from __future__ import annotations

from dataclasses import dataclass

from outpace.card.cache import VisibilityOptions
from outpace.core.drafting import DraftDirectives
from outpace.core.options import MethodOptions, whole
from outpace.core.types import Await, Verify
from outpace.decoders.base import Decoder, DecoderGenerator, RequestContext, walk_and_correct


class Ssd(Decoder):
    """Verifies the chain that was drafted for the last outcome, or waits until one is drafted."""

    name = "ssd"
    cost = "a pass; after a miss, drafting before it"
    drafting = "parallel"
    length_option = "draft_length"

    @dataclass(frozen=True)
    class Options(MethodOptions):
        draft_length: int = whole(
            4, 1, 256, help="tokens in a chain; the drafter's `width` is the number of outcomes that are drafted for"
        )

    def decode(self, context: RequestContext, options: Options) -> DecoderGenerator:
        candidates, length = context.candidates, options.draft_length
        candidates.visibility = VisibilityOptions(chain=True)
        context.set_directives(DraftDirectives(outcomes=length))
        while True:
            yield Await(depth=length)
            tree = candidates.query(min(length + 1, context.budget))
            picks = yield Verify(tree)
            yield walk_and_correct(context, tree, picks)
