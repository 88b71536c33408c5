"""SSD: while the target verifies a chain, the drafter drafts a chain for each likely outcome of that verification.

Speculative speculative decoding, arXiv:2603.03251.

An outcome is how much of the chain is accepted, and the token that the target writes next. The `width` likeliest of
them are drafted for together, one token of each chain in a forward. Where the outcome is among them the next chain is
there (a hit); else it is drafted while the target waits.
"""

from __future__ import annotations

from dataclasses import dataclass

from outpace.card.cache import VisibilityOptions
from outpace.core.drafting import DraftDirectives
from outpace.core.errors import check_whole
from outpace.core.types import Await, Commit, Verify
from outpace.decoders.base import Coroutine, RequestContext

LOSSLESS = True
COST = "a pass; after a miss, drafting before it"
NEEDS = "worker"


@dataclass(frozen=True)
class Options:
    """`draft_length`: tokens in a chain; the drafter's `width` is the number of outcomes that are drafted for."""

    draft_length: int = 4

    def __post_init__(self) -> None:
        check_whole("draft_length", self.draft_length, 1, 256)


def decode(place: RequestContext, options: Options) -> Coroutine:
    """Verify the chain that is there, or is drafted now; commit; look the outcome up."""
    candidates, length = place.candidates, options.draft_length
    candidates.sight = VisibilityOptions(chain=True)
    place.order(DraftDirectives(outcomes=length))
    while True:
        yield Await(depth=length)
        tree = candidates.query(min(length + 1, place.budget))
        picks = yield Verify(tree)
        candidates.late(tree)
        verdict = place.request.rule.walk(tree, picks)
        hit, correction = candidates.correct(tree, verdict, len(picks))
        place.correct(correction)
        yield Commit(tree, verdict, hit)
