"""CARD: the drafter fills a shared cache without pause; the target queries it, verifies, and corrects its direction.

Query-and-correct, arXiv:2508.04462.

Beyond the paper: as many nodes of the best subtree as their measured cost is worth are verified instead of a chain,
the secondary cache B (other scored candidates) is searched before a miss is declared, late children are accepted, and
after a miss the target may wait for a short just-in-time draft. `--as-published` is the paper's own form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp
from typing import Any

from outpace.card.cache import VisibilityOptions
from outpace.core.drafting import LEVEL_SHARE, DraftDirectives
from outpace.core.options import MethodOptions, option, switch, whole
from outpace.core.types import Await, Verify
from outpace.decoders.base import Decoder, DecoderGenerator, RequestContext, walk_and_correct

PUBLISHED_STEPS = 7  # draft forwards per target pass: the authors' setting for 1B and 70B
_MAX_TREE_NODES = 1 << 20


class Card(Decoder):
    """Queries the cache, verifies what it finds, corrects the drafter. An empty query is plain decoding."""

    name = "card"
    cost = "a pass, with the draft running in parallel"
    drafting = "parallel"
    usual_nodes = 32

    @dataclass(frozen=True)
    class Options(MethodOptions):
        just_in_time: int = whole(
            1, 0, 16, help="levels for which the target waits after a miss, for a bounded time; 0: it never waits"
        )
        as_published: bool = option(
            False,
            "CARD as in the paper: the drafter expands whole levels, the `width` best new nodes of the last one, with"
            " `width` children each, ranked by the product of q; the target verifies the chain of the best children and"
            " keeps in step with the drafter, as with `lockstep` 7; only C is searched; there is no just-in-time draft",
        )
        chain: bool = option(False, "ablation: true verifies one branch instead of the best tree")
        secondary: bool = option(True, "ablation: false does not look in the secondary cache B")
        late: bool = option(True, "ablation: false drops nodes that arrived during the target's pass")
        correction: bool = switch(True, "ablation: false never sends the drafter what the target wrote")
        lockstep: int = whole(
            0,
            0,
            256,
            help="ablation: draft forwards in each pass, after which both sides wait for each other; 0: none waits",
        )

    @classmethod
    def drafter_defaults(cls, options: Options, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """CARD as published adds K x K children in each draft step, so its tree grows with the square of the width."""
        usual = super().drafter_defaults(options, values)
        if not options.as_published:
            return usual
        given = str((values or {}).get("width", usual["width"]))  # the drafter refuses what is no number
        step = int(given) ** 2 if given.isdecimal() else 0
        nodes = (options.lockstep or PUBLISHED_STEPS) * step + 1
        return usual | {"tree_nodes": min(max(8192, 2 * nodes), _MAX_TREE_NODES)}  # twice: a hit keeps a subtree

    def decode(self, context: RequestContext, options: Options) -> DecoderGenerator:
        if options.as_published:
            steps = options.lockstep or PUBLISHED_STEPS
            options = replace(options, just_in_time=0, chain=True, secondary=False, lockstep=steps)
        candidates = context.candidates
        candidates.visibility = VisibilityOptions(options.secondary, options.late, options.chain or context.chains)
        context.set_directives(directives(options))
        while True:
            if candidates.missed and options.just_in_time:
                yield Await(options.just_in_time)
            if context.chains:
                tree = candidates.query(context.budget)
                tree = tree.copy(range(num_rows(context, [*map(exp, tree.scores)][1:])))
            else:
                tree = candidates.query(context.budget if options.chain else num_rows(context))
            if options.lockstep:
                context.set_directives(directives(options))
            picks = yield Verify(tree)
            if options.lockstep:
                yield Await(options.lockstep)
            yield walk_and_correct(context, tree, picks, options.correction)


def directives(options: Card.Options) -> DraftDirectives:
    """Return how the drafter works between two corrections."""
    share = 1.0 if options.as_published else LEVEL_SHARE
    return DraftDirectives(options.lockstep or None, floor=0.0, share=share, in_levels=options.as_published)


def num_rows(context: RequestContext, chances: Sequence[float] | None = None) -> int:
    """Return how many of the best candidates, root included, are worth their rows at measured times. `chances`: the
    probabilities that each node of a chain is accepted; None: those of all candidates."""
    if chances is None:
        chances = context.candidates.best_chances(context.budget - 1)
    price = context.costs.tokens_per_second(context.requests)
    return context.costs.best_rows(chances, context.rows_of_others, price)[0]
