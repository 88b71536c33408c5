"""The planner: drafts and verifies as much as pays at the moment, and decodes plainly where drafting does not pay.

Our own: each draft level and each verified row must bring more tokens than its measured time costs at the present rate
(Dinkelbach, 1967). Draft lengths by measured speed: Leviathan et al., arXiv:2211.17192, section 3.

The value of a node is the chance that the target accepts it. Of a tree the best n nodes are verified, where n maximises
the sum of their chances minus the price of their rows: the worth of the tree. Another level of the draft is grown while
it adds more worth than its time costs. The drafter's chances are scaled by how often they came true, unless the drafter
calibrates them itself. Row counts are tried from small to large, at most twice the largest that was timed. A level that
does not pay is tried again now and then, so rarely that all trials together cost a small share of the time. The
choices are made in `planning/planner.py`.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from outpace.core.errors import UserError
from outpace.core.options import whole
from outpace.core.tree import TokenTree, best_chain
from outpace.core.types import Commit, Draft, Verify
from outpace.decoders.base import Decoder, DecoderGenerator, RequestContext
from outpace.planning.planner import Planner, PlannerOptions


class Auto(Decoder):
    """Plans, grows the tree, verifies, learns and commits."""

    name = "auto"
    cost = "as speculative, while that pays; host time for planning"

    usual_nodes = 32

    @dataclass(frozen=True)
    class Options(PlannerOptions):
        deepest: int = whole(32, 0, 256, help="most draft levels in a round")

    def decode(self, context: RequestContext, options: Options) -> DecoderGenerator:
        if not context.request.rule.traits.same_text:
            raise UserError(
                "method auto chooses drafts by their tokens and by measured times, which does not go with a rule whose"
                " text depends on the drafts"
            )
        planner = Planner(context, options)
        tree = TokenTree(context.last_token)
        try:
            while True:
                planner.begin()
                if not planner.is_plain:
                    yield from _look_up(tree, planner)
                    if context.chains:  # so that the model extends only the branch that can be verified
                        tree = tree.copy(best_chain(tree))
                    yield from _grow(tree, planner)
                    if context.chains:  # the model may have added branches
                        tree = tree.copy(best_chain(tree))
                    if len(nodes := planner.nodes_to_verify(tree)) < len(tree):
                        tree = tree.copy(nodes)
                picks = yield Verify(tree)
                verdict = context.request.rule.walk(tree, picks)
                planner.learn(tree, verdict.path)
                tree = yield Commit(tree, verdict, plan=planner.plan)
        finally:
            planner.end()


def _look_up(tree: TokenTree, planner: Planner) -> Generator[Any, Any, None]:
    """Let the sources that run no model propose, where they pay."""
    for source in planner.lookups:
        if source.is_active:
            yield Draft(tree, source.source)
            planner.record_lookup(tree)


def _grow(tree: TokenTree, planner: Planner) -> Generator[Any, Any, None]:
    """Add levels of the draft models, while they pay."""
    for source in planner.models:
        while width := planner.next_width(tree, source):
            if not (yield Draft(tree, source.source, width)):
                break
            source.levels += 1
