"""The planner: drafts and verifies as much as pays at the moment, and decodes plainly where drafting does not pay.

Our own: each draft layer and each verified row must bring more tokens than its measured time costs at the present rate
(Dinkelbach, 1967). Draft lengths by measured speed: Leviathan et al., arXiv:2211.17192, section 3.

The value of a node is the chance that the target accepts it. Of a tree the best n nodes are verified, where n maximises
the sum of their chances minus the price of their rows: the worth of the tree. Another layer of the draft is grown while
it adds more worth than its time costs. The drafter's chances are scaled by how often they came true, unless the drafter
calibrates them itself. Row counts are tried from small to large, at most twice the largest that was timed. A layer that
does not pay is tried again now and then, so rarely that all trials together cost a small share of the time. The
choices are made in `planning/planner.py`; where target and draft support it, they run some rounds by its plan natively.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from outpace.core.carried import Carried
from outpace.core.errors import UserError
from outpace.core.tree import TokenTree
from outpace.core.types import CarryOut, Commit, Draft, Rule, Verify
from outpace.decoders.base import Decoder, DecoderGenerator, RequestContext
from outpace.planning.planner import ROUNDS_UNTIL_REPLAN, Planner, PlannerOptions


class Auto(Decoder):
    """Plans, grows the tree, verifies, learns and commits."""

    name = "auto"
    cost = "as speculative, while that pays; host time for planning"
    Options = PlannerOptions

    def decode(self, context: RequestContext, options: PlannerOptions) -> DecoderGenerator:
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
                if done := (yield from _native_rounds(tree, planner, context)):
                    tree = yield from _commit(tree, done, planner, context.request.rule)
                    continue
                if not planner.is_plain:
                    yield from _grow(tree, planner)
                if len(tree) > 1 and len(nodes := planner.chosen(tree)) < len(tree):
                    tree = tree.copy(nodes)
                more = 0 if planner.uses_drafts else context.tokens_left if planner.is_plain else ROUNDS_UNTIL_REPLAN
                picks = yield Verify(tree, more)
                verdict = context.request.rule.walk(tree, picks)
                planner.end_round(tree, verdict.path)
                tree = yield Commit(tree, verdict)
        finally:
            planner.end()


def _native_rounds(
    tree: TokenTree, planner: Planner, context: RequestContext
) -> Generator[Any, Any, Sequence[Carried] | None]:
    """Ask for native rounds where they are available. Return None after adding the round's lookup nodes to the tree
    where they are not."""
    native_lookup = context.native_sources is not None and planner.is_lookup_native(context.native_sources)
    if not native_lookup:
        yield from _look_up(tree, planner)
    plan = None if context.native_sources is None or planner.is_plain else planner.plan(tree)
    done: Sequence[Carried] | None = None
    if plan is not None and (plan.drafts or context.requests > 1):
        done = yield CarryOut(tree, plan)
    if native_lookup and not done:
        yield from _look_up(tree, planner)
    return done


def _commit(tree: TokenTree, done: Sequence[Carried], planner: Planner, rule: Rule) -> Generator[Any, Any, TokenTree]:
    """Commit native rounds one after the other; return the next round's root."""
    for number, carried in enumerate(done):
        if number:
            planner.begin_next_native()
        tree = carried.onto(tree, *planner.names)
        planner.learn_native(carried)
        verdict = rule.walk(tree, carried.picks)
        if verdict.path != carried.path:
            raise RuntimeError(f"the kernels walked {carried.path} where the rule walks {verdict.path}")
        planner.end_round(tree, verdict.path)
        tree = yield Commit(tree, verdict)
    return tree


def _look_up(tree: TokenTree, planner: Planner) -> Generator[Any, Any, None]:
    """Let the sources that run no model propose, where they pay."""
    for source in planner.lookups:
        if source.is_asked:
            yield Draft(tree, source.source)
            planner.looked_up(tree, source)


def _grow(tree: TokenTree, planner: Planner) -> Generator[Any, Any, None]:
    """Add layers of the draft models, while they pay."""
    for source in planner.models:
        while planner.pays(tree, source):
            if not (yield Draft(tree, source.source)):
                break
            planner.grown(tree, source)
