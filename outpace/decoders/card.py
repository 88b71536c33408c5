"""CARD: the drafter fills a shared cache without pause; the target queries it, verifies, and corrects its direction.

Query-and-correct, arXiv:2508.04462.

Beyond the paper: the best subtree is verified instead of a chain, the secondary cache B (other scored candidates) is
searched before a miss is declared, late children are accepted, and after a miss the target may wait for a short
just-in-time draft.
"""

from __future__ import annotations

from dataclasses import dataclass

from outpace.card.cache import VisibilityOptions
from outpace.core.drafting import DraftDirectives
from outpace.core.options import MethodOptions, whole
from outpace.core.types import Await, Verify
from outpace.decoders.base import Decoder, DecoderGenerator, RequestContext, walk_and_correct


class Card(Decoder):
    """Queries the cache, verifies what it finds, corrects the drafter. An empty query is plain decoding."""

    name = "card"
    cost = "a pass, with the draft running in parallel"
    drafting = "parallel"

    @dataclass(frozen=True)
    class Options(MethodOptions):
        """`just_in_time`: layers for which the target waits after a miss, for a bounded time; 0: it never waits.

        For ablations: `chain` true verifies one branch instead of the best tree; `secondary` false does not look in the
        secondary cache B; `late` false drops nodes that arrived during the target's pass; `correction` false drops
        everything that was drafted before the new root was known; `lockstep`: draft forwards in each target pass, after
        which each side waits for the other, as in the authors' code; 0: the drafter never waits.
        """

        just_in_time: int = whole(1, 0, 16)
        chain: bool = False
        secondary: bool = True
        late: bool = True
        correction: bool = True
        lockstep: int = whole(0, 0, 256)

    def decode(self, context: RequestContext, options: Options) -> DecoderGenerator:
        candidates = context.candidates
        candidates.visibility = VisibilityOptions(options.secondary, options.late, options.chain, options.correction)
        in_step = DraftDirectives(layers=options.lockstep) if options.lockstep else None
        while True:
            if candidates.missed and options.just_in_time:
                yield Await(options.just_in_time)
            tree = candidates.query(context.budget)
            if in_step:
                context.set_directives(in_step)
            picks = yield Verify(tree)
            if in_step:
                yield Await(options.lockstep)
            yield walk_and_correct(context, tree, picks)
