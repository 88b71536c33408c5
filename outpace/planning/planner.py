"""The planner of methods auto and planned: chooses for one request, round by round, which sources draft, how many
levels are grown, how wide each is, and how many rows are verified. docs/planner.md derives its formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from outpace.core.options import MethodOptions, number, whole
from outpace.core.stats import RoundPlan
from outpace.core.tree import TokenTree
from outpace.core.types import WORKER
from outpace.planning.cost_model import CostModel
from outpace.planning.plan import BatchPlan, best_width
from outpace.planning.sources import AcceptanceModel, LookupSource, ModelSource, PlanningContext, RepetitionDetector

# Above this chance that lookups continue the root, a model's level is not typical of what the model adds.
MAX_LOOKUP_CHANCE = 0.25
_ROWS = 4  # rows over which the price of one more row is averaged
# Factor on prices of waits for a worker: after a hit, the level would be there in the next round anyway.
_WAIT_MARGIN = 1.5
_MAX_DRAFTING = 1.5  # passes that the draft steps of a round take at most, so that tokens come steadily


@dataclass(frozen=True)
class PlannerOptions(MethodOptions):
    """Options of the methods that plan."""

    deepest: int = whole(16, 0, 256, help="most draft levels in a round")
    trials: float = number(0.01, 0.0, 1.0, help="share of time for trying again what did not pay")


class Planner:
    """Plans the rounds of one request, from the engine's cost model and from the tokens that its drafts added so far.

    A round is worth the expected tokens of its verified nodes minus the price of the time for drafting and verifying
    them. The price is the current rate in tokens per second, so that a round that pays raises the rate.
    """

    def __init__(self, context: PlanningContext, options: PlannerOptions) -> None:
        self._context, self._options = context, options
        self._costs: CostModel = context.costs
        self._acceptance = AcceptanceModel(self._costs, context.sources, context.committed)
        self._repetitions = RepetitionDetector(context.committed)
        self.lookups = [LookupSource(source, context) for source in context.sources if not source.runs_model]
        self.models = [ModelSource(source, context) for source in context.sources if source.runs_model]
        self._lookup_chance = 0.0  # chance that the target accepts a lookup node of this round's tree
        self._num_lookup_nodes = 0  # lookup nodes of this round's tree
        self.price = 0.0  # tokens that a second is worth in this round
        self._row = 0.0  # price of one more row in this round, in tokens
        self._widths: list[int] = []  # widths of this round's levels
        self._draft_seconds = 0.0  # expected seconds of this round's draft steps
        self._why = ""
        self.plan: RoundPlan | None = None  # this round's plan, once the nodes to verify are chosen
        self.is_plain = False  # this round decodes plainly
        self.uses_drafts = False  # some source drafts in this round

    def begin(self) -> None:
        """Begin a round: choose the lookup sources, and whether anything drafts. The round decodes plainly where the
        time of such a round is not known, or was not measured for long."""
        context, batch = self._context, self._context.batch
        self.uses_drafts, self.price, self.plan = False, batch.price, None
        if context.budget < 2 or batch.is_plain:
            self._decode_plainly("a plain round is timed" if context.budget > 1 else "no row is left for drafts")
            return
        self._widths, self._draft_seconds, self._why = [], 0.0, "no source has anything to add"
        self._lookup_chance, self._num_lookup_nodes = 0.0, 0
        if self.lookups:
            repeated = self._repetitions.follow()
            for source in self.lookups:
                source.is_active = source.should_draft(self.price, self._options.trials, repeated)
                self.uses_drafts |= source.is_active
        for model in self.models:
            model.begin_round()
        self.is_plain = not self.uses_drafts and not any(map(self._may_draft, self.models))
        if self.is_plain:
            self._decode_plainly("no draft level pays")
        else:
            self._row = self.price * self._costs.extra_seconds(context.rows_of_others + 1, _ROWS)[-1] / _ROWS

    def _decode_plainly(self, why: str) -> None:
        """Let no source draft in this round, for this reason."""
        self.is_plain = True
        self.plan = self._context.batch.plain_plan(why)

    def _may_draft(self, model: ModelSource) -> bool:
        """Return whether the model may grow a first level in this round: one that pays, or a trial."""
        return model.source.name == WORKER.name or self._batch_plan(model).levels > 0 or self._should_try(model)

    def record_lookup(self, tree: TokenTree) -> None:
        """Record that a lookup source has added its nodes."""
        self._lookup_chance = sum(map(self._acceptance.chances(tree).__getitem__, tree.children(0)))
        self._num_lookup_nodes = len(tree) - 1

    def load_candidates(self, tree: TokenTree, model: ModelSource) -> float:
        """Record the candidates that a worker drafted before this round; return their worth in tokens."""
        model.levels = model.first = tree.deepest
        self.uses_drafts = len(tree) > 1
        return self._best_rows(sorted(self._acceptance.chances(tree)[1:], reverse=True)[: self._context.budget - 1])[1]

    def next_width(self, tree: TokenTree, model: ModelSource, leaves: Sequence[float] | None = None) -> int:
        """Return how many nodes the draft model should expand in another level; 0 if that neither brings more than it
        costs nor is due for a trial. `leaves`: predicted chances of the nodes to expand, if the tree lacks them."""
        if model.levels == model.first:
            model.max_levels = min(model.first + self._max_levels(model), self._context.tokens_left - 1)
        if self.is_plain or model.levels >= model.max_levels or (model.is_trial and model.levels):
            self._why = "a trial of one level" if model.is_trial else "as deep as allowed"
            return 0
        width = 1 if model.is_trial else self._width(tree, model, leaves) or int(self._should_try(model))
        if width:
            context = self._context
            self.uses_drafts = True
            self._widths.append(width)
            self._draft_seconds += self._costs.draft_seconds(model.source, context.requests, width) * context.requests
        return width

    def _max_levels(self, model: ModelSource) -> int:
        """Return the most levels that a round may have: no more than rows that may be verified."""
        context, costs = self._context, self._costs
        if context.requests > 1:
            self._batch_plan(model)  # decides how many draft
        drafting = context.batch.num_drafting
        rows = max(costs.max_extra_rows(context.requests - 1) // drafting, 1)
        if rows > 1 and costs.captures[""].seconds(context.requests, context.budget):
            levels = self._batch_plan(model).levels if drafting == context.requests else 1
            rows = min(rows, max(self._max_rows(levels) - 1, 1))
        return min(rows, self._max_steps(model))

    def _max_steps(self, model: ModelSource) -> int:
        """Return the most draft steps of a round, whatever is known of its rows: they take at most `_MAX_DRAFTING`
        times as long as a pass of plain decoding, except a worker's."""
        context, costs = self._context, self._costs
        most = min(self._options.deepest, context.budget - 1)
        step = costs.draft_seconds(model.source, context.requests) * context.requests
        if not step or model.source.name == WORKER.name:
            return most
        return min(most, max(int(_MAX_DRAFTING * costs.pass_seconds(context.requests) / step), 1))

    def _batch_plan(self, model: ModelSource) -> BatchPlan:
        """Return the plan for all requests together, without the limit on rows that were never timed: the way to a
        depth that pays may lead through depths that do not."""
        if model.plan is None:
            model.plan = self._context.batch.plan(model.source, model.acceptance, self._max_steps(model))
        return model.plan

    def _width(self, tree: TokenTree, model: ModelSource, leaves: Sequence[float] | None) -> int:
        """Return the width of another level, or 0 if none pays; `leaves` as of `next_width`."""
        context, is_worker = self._context, model.source.name == WORKER.name
        if not is_worker:
            plan = self._batch_plan(model)
            if model.levels >= plan.levels and (context.requests > 1 or not plan.levels):
                self._why = f"{plan.levels} levels pay for all requests together"
                return 0
            if not (model.levels or model.has_read or context.batch.may_read()):
                self._why = "the draft model has not read the text"
                return 0
            if context.requests > 1:
                return 1
        gains = self._level_gains(tree, model, leaves)
        if width := best_width(gains, self._second_price(model), self._seconds_of_width(model)):
            return width
        self._why = f"a level adds {gains[0] if gains else 0.0:.2f} of {self._step_price(model):.2f}"
        return int(not is_worker and not model.levels)

    def _seconds_of_width(self, model: ModelSource) -> Callable[[int], float]:
        """Return the seconds of another level of a request that runs alone, by its width."""
        costs, source = self._costs, model.source
        if source.name == WORKER.name:
            return lambda _: costs.step_seconds(source, 1)
        excess = costs.excess(1)
        more = excess.drafted(model.levels + 1) - excess.drafted(model.levels) if model.levels else 0.0
        return lambda width: more + costs.step_seconds(source, width)

    def _second_price(self, model: ModelSource) -> float:
        """Return how many tokens a second of the model's draft steps must add."""
        return self.price * (_WAIT_MARGIN if model.source.name == WORKER.name else 1.0)

    def _step_price(self, model: ModelSource) -> float:
        """Return how many tokens the model's next draft step must add to pay for this request's share of it."""
        return self._second_price(model) * self._costs.draft_seconds(model.source, self._context.requests)

    def _level_gains(
        self, tree: TokenTree, model: ModelSource, predicted: Sequence[float] | None = None
    ) -> list[float]:
        """Return the tokens that the model's next level adds above the price of its rows, below the likeliest 1, 2, ...
        parents.

        Parents are leaves, and the root and lookup nodes that the model has not expanded, with the chance that no
        lookup node continues them.
        """
        chances = [] if predicted else self._acceptance.chances(tree)
        factor, acceptance = self._acceptance.calibration_factor(model.source), model.acceptance.value(model.levels)
        if predicted:
            parents = [factor * leaf for leaf in predicted]
        else:
            parents = tree.parent_chances(chances, model.source.name, self._num_lookup_nodes, factor, not model.levels)
            deepest = self._context.tokens_left - 2  # below it only the target writes
            if tree.deepest > deepest:
                leaves = tree.leaves()
                kept = [chance for chance, leaf in zip(parents, leaves, strict=False) if tree.depth(leaf) <= deepest]
                parents = [*kept, *parents[len(leaves) :]]
        gains = [acceptance * chance - self._row for chance in sorted(parents, reverse=True)[: model.source.width]]
        return [*accumulate([gain for gain in gains if gain > 0.0])]

    def _should_try(self, model: ModelSource) -> bool:
        """Return whether to grow another level although it does not pay as far as is known: of a batch by one request,
        and only a first level. At the beginning of an answer this may cost what the model is assumed to save in it."""
        requests, batch = self._context.requests, self._context.batch
        is_typical = self._lookup_chance <= MAX_LOOKUP_CHANCE
        if model.drafts_during_passes or not is_typical:
            return False
        if requests > 1 and (model.levels or batch.is_tried):
            return False
        if requests > 1 and model.source.name != WORKER.name and self._batch_plan(model).levels:
            return False
        batch.is_tried = True
        seconds = self._trial_seconds(model)
        model.is_trial = model.may_try(seconds, self._options.trials)
        model.trial_seconds, model.trial_price = seconds, self.price * (seconds - model.catch_up_seconds)
        return model.is_trial

    def _trial_seconds(self, model: ModelSource) -> float:
        """Return the cost of another level with one row, for one request."""
        requests, costs = self._context.requests, self._costs
        seconds = costs.draft_seconds(model.source, 1)
        if model.levels:
            return seconds + costs.extra_seconds(requests + model.levels, 1)[-1]
        rows = max(costs.pass_seconds(requests + 1) - costs.plain_seconds(requests), 0.0)
        capture = costs.estimates(model.source, model.acceptance, requests).capture(1, 1)
        return seconds + rows + model.catch_up_seconds + costs.excess(requests).of_drafts + capture

    def nodes_to_verify(self, tree: TokenTree) -> list[int]:
        """Return the nodes to verify: the root and those with the best calibrated chances, closed under ancestors."""
        chances = self._acceptance.chances(tree) if len(tree) > 1 else [1.0]
        order: list[int] = []
        if not self.is_plain:
            order = sorted(range(1, len(tree)), key=chances.__getitem__, reverse=True)
            if tree.deepest > tree.max_depth:
                order = [node for node in order if tree.depth(node) <= tree.max_depth]
            order = order[: self._max_rows(max([model.levels for model in self.models], default=0)) - 1]
        is_first_level_tried = any(model.is_trial and model.levels - model.first == 1 for model in self.models)
        count = 1 if is_first_level_tried else self._best_rows([*map(chances.__getitem__, order)])[0] - 1
        nodes = order[:count]
        seconds = self._costs.pass_seconds(self._context.rows_of_others + 1 + len(nodes))
        tokens = 1.0 + sum(map(chances.__getitem__, nodes))
        expected = tokens, seconds + self._draft_seconds, self.price, self._why, self._context.batch.estimates
        self.plan = RoundPlan((*self._widths,), *expected)
        return sorted([0, *nodes])

    def _max_rows(self, levels: int) -> int:
        """Return how many rows the request may have: no more than the captured graphs serve, except for this many
        levels."""
        context, captures = self._context, self._costs.captures[""]
        rows = context.budget
        while rows > levels + 1 and captures.seconds(context.requests, rows):
            rows = max((rows + 1) // 2, levels + 1)
        return rows

    def _best_rows(self, chances: Sequence[float]) -> tuple[int, float]:
        """Return how many rows pay, the root's included, and what they bring above their price. Lookups carry a share
        of what their round takes more than a plain one; with levels of a model the plan includes this."""
        requests = self._context.requests
        share = 0.0 if any(model.levels for model in self.models) else self._costs.share_of_drafts(requests)
        return self._costs.best_rows(chances, self._context.rows_of_others, self.price, share)

    def learn(self, tree: TokenTree, path: Sequence[int]) -> None:
        """Learn from the drafts of a round in which the target accepted this path of the tree."""
        if not self.uses_drafts:
            return
        for model in self.models:
            if model.levels:
                self._learn_levels(model, tree, path)
        self._acceptance.learn(tree, path)
        for source in self.lookups:
            if source.is_active:
                self._learn_lookup(source, tree, path)

    def _learn_levels(self, model: ModelSource, tree: TokenTree, path: Sequence[int]) -> None:
        """Learn which of a model's levels were accepted after the level above. A level that was grown and not worth
        verifying was not accepted; nothing is known of one that was cut by the limit on rows."""
        levels = model.levels
        if len(tree) > self._costs.max_extra_rows(self._context.rows_of_others):
            levels = min(levels, tree.deepest)
        if self._lookup_chance <= MAX_LOOKUP_CHANCE:
            for level in range(min(levels, len(path))):
                model.record_acceptance(level, float(len(path) > level + 1))
        deepest = model.levels - 1
        for level in {model.first, deepest}:
            is_tried = model.is_trial and level == deepest
            gain = float(len(path) > model.levels) - model.trial_price if is_tried else inf
            self._costs.exploration.record_use(model.level_option(level), gain)
            if gain <= 0.0 and not level:
                model.spent += model.trial_seconds
        model.end_round(len(path))

    def end(self) -> None:
        """End the request."""
        self._acceptance.flush()

    def _learn_lookup(self, lookup: LookupSource, tree: TokenTree, path: Sequence[int]) -> None:
        """Learn how many tokens a lookup source added to this round, minus the price of its rows."""
        name, gain, count = lookup.source.name, 0.0, len(tree) - 1
        if rows := tree.sources.count(name):
            seconds = self._costs.extra_seconds(self._context.rows_of_others + 1, count)[-1] / count
            gain = [*map(tree.sources.__getitem__, path)].count(name) - self.price * seconds * rows
        lookup.learn(gain, self.price)
