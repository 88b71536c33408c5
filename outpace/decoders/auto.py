"""The planner: drafts and verifies as much as pays at the moment, and decodes plainly where drafting does not pay.

Our own: each draft layer and each verified row must bring more tokens than its measured time costs at the present rate
(Dinkelbach, 1967). Draft lengths by measured speed: Leviathan et al., arXiv:2211.17192, section 3.

A node is worth the chance that the target walks it. Of a tree the best n nodes are verified, n where their chances less
the price of their rows are most: this is the tree's worth. One more layer of the draft is grown while the worth that it
adds outweighs its seconds. The drafter's chances are trusted as far as they came true, and taken at their word where
the drafter fits them itself. Rows are tried from few to many, twice as many as are known at most. Where a layer does
not pay it is tried again now and then, so seldom that all trials together cost a small share of the time. The choices
are `_planner.py`'s; where target and draft can, they carry out some rounds by its plan in one call.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from outpace.core.carried import Carried
from outpace.core.errors import UserError
from outpace.core.tree import TokenTree
from outpace.core.types import CarryOut, Commit, Draft, Rule, Verify
from outpace.decoders.base import Coroutine, RequestContext
from outpace.planning.planner import UNPLANNED, Planner, PlannerAhead
from outpace.planning.planner import Options as Options

LOSSLESS = True
COST = "as speculative, while that pays; host time for planning"
NEEDS = "drafter"


def decode(place: RequestContext, options: Options) -> Coroutine:
    """Plan, grow, verify, learn, commit."""
    if not place.request.rule.traits.same_text:
        raise UserError(
            "method auto prunes drafts by token and by time, which a rule that judges drawn tokens does not allow"
        )
    planner = PlannerAhead(place, options)
    tree = TokenTree(place.last_token)
    try:
        while True:
            planner.begin()
            if done := (yield from _carry_out(tree, planner, place)):
                tree = yield from _commit(tree, done, planner, place.request.rule)
                continue
            if not planner.is_plain:
                yield from _grow(tree, planner)
            if len(tree) > 1 and len(nodes := planner.chosen(tree)) < len(tree):
                tree = tree.copy(nodes)
            more = 0 if planner.asks else place.left if planner.is_plain else UNPLANNED
            picks = yield Verify(tree, more)
            verdict = place.request.rule.walk(tree, picks)
            planner.is_over(tree, verdict.path)
            tree = yield Commit(tree, verdict)
    finally:
        planner.end()


def _carry_out(
    tree: TokenTree, planner: PlannerAhead, place: RequestContext
) -> Generator[Any, Any, Sequence[Carried] | None]:
    """Whole rounds in one call, where that can be done; else the copies of the round are in the tree."""
    leaves_copies = place.carries is not None and planner.leaves_copies(place.carries)
    if not leaves_copies:
        yield from _copy(tree, planner)
    plan = None if place.carries is None or planner.is_plain else planner.plan(tree)
    done: Sequence[Carried] | None = None
    if plan is not None and (plan.drafts or place.requests > 1):
        done = yield CarryOut(tree, plan)
    if leaves_copies and not done:
        yield from _copy(tree, planner)
    return done


def _commit(
    tree: TokenTree, done: Sequence[Carried], planner: PlannerAhead, rule: Rule
) -> Generator[Any, Any, TokenTree]:
    """Rounds that were carried out, one after the other; the next round's root."""
    for number, carried in enumerate(done):
        if number:
            planner.goes_on()
        tree = carried.onto(tree, *planner.names)
        planner.carried(carried)
        verdict = rule.walk(tree, carried.picks)
        if verdict.path != carried.path:
            raise RuntimeError(f"the kernels walked {carried.path} where the rule walks {verdict.path}")
        planner.is_over(tree, verdict.path)
        tree = yield Commit(tree, verdict)
    return tree


def _copy(tree: TokenTree, planner: Planner) -> Generator[Any, Any, None]:
    """What costs no model, where it pays."""
    for copier in planner.copiers:
        if copier.is_asked:
            yield Draft(tree, copier.source)
            planner.copied(tree, copier)


def _grow(tree: TokenTree, planner: Planner) -> Generator[Any, Any, None]:
    """Layers of the models, while they pay."""
    for grower in planner.growers:
        while planner.pays(tree, grower):
            if not (yield Draft(tree, grower.source)):
                break
            planner.grown(tree, grower)
