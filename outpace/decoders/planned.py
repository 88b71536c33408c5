"""CARD with planned waits: the target verifies at once, or first waits for more draft levels where these pay.

Our own, after CARD, arXiv:2508.04462. Time is priced in tokens (Dinkelbach, 1967). The planner is that of method
`auto`; it plans a wait for a level of the parallel drafter like a draft step.

While the target runs, the drafter makes the levels that fit into the pass and then rests, so that it is free when the
correction comes. Where parallel drafting does not pay, it drafts only while the target waits.
"""

from __future__ import annotations

from outpace.core.types import Await, Verify
from outpace.decoders.base import Decoder, DecoderGenerator, RequestContext, walk_and_correct
from outpace.planning.parallel_policy import SEQUENTIAL, ParallelDraftPolicy
from outpace.planning.planner import Planner, PlannerOptions


class Planned(Decoder):
    """Plans, waits, queries, verifies, corrects."""

    name = "planned"
    cost = "a pass with the draft running in parallel, and waits for the draft where these pay; host time for planning"
    drafting = "parallel"
    usual_nodes = 32
    Options = PlannerOptions

    def decode(self, context: RequestContext, options: PlannerOptions) -> DecoderGenerator:
        candidates, planner = context.candidates, Planner(context, options)
        worker = planner.models[0]
        policy = ParallelDraftPolicy(context, context.draft_seconds, options.trials, context.round_trip)
        try:
            while True:
                planner.begin()
                tree = candidates.query(context.budget)
                policy.learn(not candidates.missed, planner.load_candidates(tree, worker))
                worker.drafts_during_passes = policy.mode != SEQUENTIAL
                while not (candidates.is_given_up or policy.is_round_trip_long):
                    if not planner.next_width(tree, worker, candidates.best_chances(worker.source.width, leaves=True)):
                        break
                    if policy.mode == SEQUENTIAL:
                        context.set_directives(policy.before_pass)
                    levels = candidates.levels
                    yield Await(levels + 1)
                    if candidates.levels == levels:  # the drafter is too far away, or too slow
                        break
                    tree = candidates.query(context.budget)
                    worker.levels += 1
                tree = tree.copy(planner.nodes_to_verify(tree))
                context.set_directives(policy.for_pass(len(tree), planner.price))
                picks = yield Verify(tree)
                commit = walk_and_correct(context, tree, picks)
                if policy.mode != SEQUENTIAL:  # sent at once, before the target has decided whether to wait
                    context.set_directives(policy.before_pass)
                planner.learn(tree, commit.verdict.path)
                yield commit._replace(plan=planner.plan)
        finally:
            planner.end()
