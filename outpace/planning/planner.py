"""The planner of methods auto and planned: chooses for one request, round by round, which sources draft, how many
levels are grown, how wide each is, and how many rows are verified. docs/planner.md derives its formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import inf, log

from outpace.core.options import MethodOptions, number, whole
from outpace.core.stats import RoundPlan
from outpace.core.tree import TokenTree
from outpace.core.types import WORKER
from outpace.planning.cost_model import PRIOR_GAIN, CostModel
from outpace.planning.plan import BatchPlan, best_width
from outpace.planning.sources import AcceptanceModel, LookupSource, ModelSource, PlanningContext, RepetitionDetector

# Above this chance that lookups continue the root, a model's level is not typical of what the model adds.
MAX_LOOKUP_CHANCE = 0.25
_BEAM = 4  # rows over which the price of one more row is averaged
_PRICE_MARGIN = 1.1  # factor on prices: corrects for the optimism of a maximum of estimates (winner's curse)
# Factor on prices of waits for a worker that has drafted already: the level would be there in the next round anyway.
_WAIT_MARGIN = 1.5
# An answer's first rounds decode plainly until the time of such a round is known, but at most this many: rounds in the
# same passes as another request's prompt are not timed.
_MAX_UNTIMED_ROUNDS = 24
_MIN_VALUE_OF_NODE = 0.25  # nodes whose chance is below this fraction of a row's price are not attached
_MIN_PARENT_CHANCE = (
    0.1  # levels are not learnt from where rows cost so much that less than this is left of a certain leaf
)
_UNKNOWN = 2  # maximum number of levels before the time of a draft step is known


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
        lookups = [source for source in context.sources if not source.runs_model]
        self.lookups = [
            LookupSource(source, self._costs.initial_lookup_gain(source.name, context.requests)) for source in lookups
        ]
        self._repetitions = RepetitionDetector(context.committed)
        self.models = [ModelSource(source, context) for source in context.sources if source.runs_model]
        self._chances: list[float] = []  # acceptance of the nodes of this round's tree, descending
        self._worth = 0.0  # worth of these nodes, in tokens
        self._lookup_chance = 0.0  # chance that the target accepts a lookup node of this round's tree
        self._num_lookup_nodes = 0  # lookup nodes of this round's tree
        self.price = 0.0  # tokens that a second is worth in this round
        self._row = 0.0  # price of one more row in this round, in tokens
        # Chance that the target accepts a parent of the level that is grown, less the price of rows.
        self._parent_chance = 0.0
        self._rounds = 0
        self._widths: list[int] = []  # widths of this round's levels
        self._draft_seconds = 0.0  # expected seconds of this round's draft steps
        self._why = ""
        self.plan: RoundPlan | None = None  # this round's plan, once the nodes to verify are chosen
        self.is_plain = False  # this round decodes plainly in any case
        self.uses_drafts = False  # some source drafts in this round

    def begin(self) -> None:
        """Begin a round: read the prices and choose the lookup sources. The round decodes plainly until a plain round
        has been timed."""
        context, costs = self._context, self._costs
        self.uses_drafts, self.plan = False, None
        self.price = _PRICE_MARGIN * costs.tokens_per_second(context.requests)
        is_new = self._rounds < _MAX_UNTIMED_ROUNDS and not costs.is_known(context.requests)
        self.is_plain = context.budget < 2 or is_new or costs.needs_plain_round(context.requests)
        self._rounds += 1
        for model in self.models:
            model.levels, model.first, model.trial_level, model.is_trial = 0, 0, -1, False
        self._chances, self._worth = [], 0.0
        self._widths, self._draft_seconds, self._why = [], 0.0, "no source has anything to add"
        self._lookup_chance, self._num_lookup_nodes = 0.0, 0
        if self.is_plain:
            self._why = "a plain round is timed" if context.budget > 1 else "no row is left for drafts"
            for source in self.lookups:
                source.is_active = False
            return
        self._row = self.price * costs.extra_seconds(context.rows_of_others + 1, _BEAM)[-1] / _BEAM
        self._choose_lookups()
        self.uses_drafts = any(source.is_active for source in self.lookups)

    def _choose_lookups(self) -> None:
        """Choose the lookup sources that are active in this round. Called once per round: `is_due` counts calls."""
        for source in self.lookups:
            source.is_active = self._lookup_pays(source) or source.is_due(self._repetitions)

    def _lookup_pays(self, lookup: LookupSource) -> bool:
        """Return whether the tokens that a lookup source adds are worth more than the CPU time that it takes."""
        return lookup.gain.value > self.price * self._costs.draft_seconds(lookup.source)

    def record_lookup(self, tree: TokenTree) -> None:
        """Record that a lookup source has added its nodes."""
        self._lookup_chance = sum(map(self._acceptance.chances(tree).__getitem__, tree.children(0)))
        self._num_lookup_nodes = len(tree) - 1

    def load_candidates(self, tree: TokenTree, model: ModelSource) -> float:
        """Record the candidates that a worker drafted before this round; return their worth in tokens."""
        model.levels = model.first = tree.deepest
        self.uses_drafts = len(tree) > 1
        self._chances = self._sorted_chances(tree)
        self._worth = self._best(self._chances)[1]
        return self._worth

    def _sorted_chances(self, tree: TokenTree) -> list[float]:
        """Return the acceptance chances of the best nodes that fit into the budget besides the root, best first."""
        return sorted(self._acceptance.chances(tree)[1:], reverse=True)[: self._context.budget - 1]

    def next_width(self, tree: TokenTree, model: ModelSource, leaves: Sequence[float] | None = None) -> int:
        """Return how many nodes the draft model should expand in another level; 0 if that neither brings more than it
        costs nor is due for a trial. `leaves`: predicted chances of the nodes to expand, if the tree lacks them."""
        is_together = self._context.requests > 1 and model.source.name != WORKER.name
        if is_together and self._context.batch.is_tried and not self._batch_plan(model).levels:
            self._why = "no level pays for all requests together"
            return 0
        is_deep = model.levels - model.first >= self._max_levels(model)
        if self.is_plain or model.is_trial or is_deep or model.levels >= self._context.tokens_left - 1:
            self._why = "a trial of one level" if model.is_trial else "as deep as allowed"
            return 0
        parents = self._parent_chances(tree, model, leaves)
        reading = model.catch_up_seconds
        width = self._width_of_batch(model, parents) if is_together else self._width_alone(model, parents, reading)
        if not width:
            width = self._try(model)
            if not width:
                return 0
        self._parent_chance = parents[width - 1] if len(parents) >= width else 0.0
        if not model.levels:
            tree.min_score = self._min_score(self._acceptance.calibration_factor(model.source))
            model.gain -= self.price * reading
        self.uses_drafts = True
        self._context.batch.add_level(model.levels)
        self._widths.append(width)
        requests = self._context.requests
        self._draft_seconds += self._costs.draft_seconds(model.source, requests, width) * requests
        return width

    def _max_levels(self, model: ModelSource) -> float:
        """Return the most levels that a round may have: no more than rows that may be verified."""
        context, costs = self._context, self._costs
        is_known = costs.draft_seconds(model.source, context.requests) > 0.0
        rows = max(costs.max_extra_rows(context.requests - 1) // context.requests, 1)
        if rows > 1 and costs.captures[""].seconds(context.requests, context.budget):
            rows = min(rows, max(self._max_rows(self._batch_plan(model).levels) - 1, 1))
        return min(self._options.deepest, context.budget - 1, rows, inf if is_known else _UNKNOWN)

    def _batch_plan(self, model: ModelSource) -> BatchPlan:
        """Return the plan for all requests together, without the limit on rows that were never timed: the way to a
        depth that pays may lead through depths that do not."""
        max_levels = min(self._options.deepest, self._context.budget - 1)
        return self._context.batch.plan(model.source, max_levels, self._costs)

    def _width_of_batch(self, model: ModelSource, parents: Sequence[float]) -> int:
        """Return the width of another level that all requests grow, or 0 if they should not. As others grow it anyway,
        only this request's further nodes count."""
        plan, batch = self._batch_plan(model), self._context.batch
        self.price = max(self.price, plan.rate)
        if model.levels >= plan.levels:
            self._why = f"{plan.levels} levels pay for all requests together"
            return 0
        if not model.levels and not model.has_read:
            if not batch.new_readers:
                self._why = "the draft model has not read the text"
                return 0
            batch.new_readers -= 1
        before = self._costs.step_seconds(model.source, plan.drafting)
        captures = self._costs.captures[model.source.name]

        def seconds(width: int) -> float:
            if width > 1 and captures.seconds(plan.drafting, width):
                return inf
            return self._costs.step_seconds(model.source, plan.drafting + width - 1) - before

        width, _ = best_width(parents, model.gains.value(model.levels), self.price, seconds)
        return width or int(not model.levels)

    def _width_alone(self, model: ModelSource, parents: Sequence[float], reading: float) -> int:
        """Return the width of another level of this request's tree, or 0 if none pays."""
        price = self._second_price(model)
        gain = model.gains.value(model.levels)
        width, above = best_width(parents, gain, price, partial(self._costs.draft_seconds, model.source, 1))
        self._why = f"a level adds {gain * parents[0] if parents else 0.0:.2f}, must add {self._step_price(model):.2f}"
        if model.levels or model.source.name == WORKER.name:
            return width
        if parents and self._batch_plan(model).levels:
            return width or 1
        once = reading / self._context.expected_tokens + self._costs.excess(self._context.requests).of_drafts
        return width if above > self.price * once else 0

    def _try(self, model: ModelSource) -> int:
        """Return 1 if another level is due for a trial although it does not pay as far as is known, else 0."""
        explores = self._should_explore(model)
        if not explores and not self._is_due(model):
            return 0
        model.is_trial, model.trial_level, model.trial_tokens = not explores, model.levels, 0.0
        model.trial_price = self.price * (self._trial_seconds(model) - model.catch_up_seconds)
        return 1

    def _second_price(self, model: ModelSource) -> float:
        """Return how many tokens a second of the model's draft steps must add."""
        return self.price * (_WAIT_MARGIN if model.first else 1.0)

    def _step_price(self, model: ModelSource) -> float:
        """Return how many tokens the model's next draft step must add to pay for this request's share of it."""
        return self._second_price(model) * self._costs.draft_seconds(model.source, self._context.requests)

    def _parent_chances(
        self, tree: TokenTree, model: ModelSource, predicted: Sequence[float] | None = None
    ) -> list[float]:
        """Return the chance that the target accepts one of the likeliest 1, 2, ... parents of the model's next level.

        Parents are leaves, and the root and lookup nodes that the model has not expanded, with the chance that no
        lookup node continues them. Each counts with its excess over the price of a row, because four unlikely leaves
        are worth less than one leaf that is as likely as the four together.
        """
        chances, row_chance = self._acceptance.chances(tree), self._row / PRIOR_GAIN
        factor = self._acceptance.calibration_factor(model.source)
        if predicted:
            parents = [factor * leaf for leaf in predicted]
        else:
            parents = tree.parent_chances(chances, model.source.name, self._num_lookup_nodes, factor, not model.levels)
            deepest = self._context.tokens_left - 2  # below it only the target writes
            if tree.deepest > deepest:
                leaves = tree.leaves()
                kept = [chance for chance, leaf in zip(parents, leaves, strict=False) if tree.depth(leaf) <= deepest]
                parents = [*kept, *parents[len(leaves) :]]
        best = sorted(parents, reverse=True)[: model.source.width]
        return [*accumulate(chance - row_chance for chance in best if chance > row_chance)]

    def _min_score(self, factor: float) -> float:
        """Return the path score below which a node is not attached."""
        return log(_MIN_VALUE_OF_NODE * self._row / factor) if self._row > 0.0 < factor else -inf

    def record_level(self, tree: TokenTree, model: ModelSource) -> None:
        """Learn from a level that the model has added."""
        # Next to likely lookups a level adds less than usual, which says nothing about other rounds.
        if self._lookup_chance <= MAX_LOOKUP_CHANCE:
            before, self._chances = self._worth, self._sorted_chances(tree)
            rows, worth = self._best(self._chances)
            self._worth = worth
            max_rows = self._costs.max_extra_rows(self._context.rows_of_others)
            is_cut = len(self._chances) >= rows > max_rows  # by the limit on untimed rows, not by what pays
            max_parent_chance = (
                1.0 - self._row / PRIOR_GAIN
            )  # scales samples, so that each weighs as much as a certain leaf
            if not is_cut and self._parent_chance and max_parent_chance > _MIN_PARENT_CHANCE:
                model.record_gain((worth - before) / max_parent_chance, self._parent_chance / max_parent_chance)
            if model.trial_level == model.levels:
                model.trial_tokens = worth - before
        model.levels += 1

    def _should_explore(self, model: ModelSource) -> bool:
        """Return whether to grow a first level to see what the model gains for this text, whatever it gained for
        others. This may cost what the model is assumed to save, halved for each preceding answer for which it did not
        pay."""
        if model.levels or not model.is_new_text or self._context.requests > 1:
            return False
        if self._lookup_chance > MAX_LOOKUP_CHANCE:
            return False
        cost = self._trial_seconds(model)
        return self._costs.exploration.is_due(model.text_option, cost, 0.0, credit=model.may_save())

    def _is_due(self, model: ModelSource) -> bool:
        """Return whether a level that does not pay is tried again: of a batch by one request, and only a first one."""
        requests, batch = self._context.requests, self._context.batch
        if (model.levels and self._lookup_chance > MAX_LOOKUP_CHANCE) or (
            requests > 1 and (model.levels or batch.is_tried)
        ):
            return False
        if requests > 1 and model.source.name != WORKER.name and self._batch_plan(model).levels:
            return False
        batch.is_tried = True
        option, cost = model.level_option(model.levels), self._trial_seconds(model)
        is_unknown = requests > 1 and not self._costs.exploration.was_used(option)
        credit = requests * model.may_save() if is_unknown else 0.0
        return self._costs.exploration.is_due(option, cost, self._options.trials, credit)

    def _trial_seconds(self, model: ModelSource) -> float:
        """Return the cost of another level with one row, for one request."""
        requests, costs = self._context.requests, self._costs
        seconds = costs.draft_seconds(model.source, 1)
        if model.levels:
            seconds += costs.extra_seconds(requests + model.levels, 1)[-1]
        else:
            seconds += max(costs.pass_seconds(requests + 1) - costs.plain_seconds(requests), 0.0)
            seconds += model.catch_up_seconds + costs.excess(requests).of_drafts
            seconds += costs.estimates(model.source, requests).capture(1, 1)
        return seconds

    def nodes_to_verify(self, tree: TokenTree) -> list[int]:
        """Return the nodes to verify: the root and those with the best calibrated chances, closed under ancestors."""
        chances = self._acceptance.chances(tree) if len(tree) > 1 else [1.0]
        best = sorted(range(1, len(tree)), key=chances.__getitem__, reverse=True)
        if tree.deepest > tree.max_depth:
            best = [node for node in best if tree.depth(node) <= tree.max_depth]
        order = (
            [] if self.is_plain else best[: self._max_rows(max([model.levels for model in self.models], default=0)) - 1]
        )
        nodes = order[: self._count([*map(chances.__getitem__, order)]) - 1] if order else []
        seconds = self._costs.pass_seconds(self._context.rows_of_others + 1 + len(nodes))
        tokens = 1.0 + sum(map(chances.__getitem__, nodes))
        self.plan = RoundPlan((*self._widths,), tokens, seconds + self._draft_seconds, self.price, self._why)
        return sorted([0, *nodes])

    def _max_rows(self, levels: int) -> int:
        """Return how many rows the request may have: no more than the captured graphs serve, except for this many
        levels."""
        context, captures = self._context, self._costs.captures[""]
        rows = context.budget
        while rows > levels + 1 and captures.seconds(context.requests, rows):
            rows = max((rows + 1) // 2, levels + 1)
        return rows

    def _count(self, chances: Sequence[float]) -> int:
        """Return how many rows to verify, the root's included, of nodes with these falling chances."""
        for model in self.models:
            if model.is_first_level_trial:
                return 2
        return self._best(chances)[0]

    def _best(self, chances: Sequence[float]) -> tuple[int, float]:
        """Return how many rows pay, the root's included, and what they bring above their price. Copies carry a share
        of what their round takes more than a plain one; with levels of a model the plan includes this."""
        requests = self._context.requests
        share = 0.0 if any(model.levels for model in self.models) else self._costs.share_of_drafts(requests)
        return self._costs.best_rows(chances, self._context.rows_of_others, self.price, share)

    def learn(self, tree: TokenTree, path: Sequence[int]) -> None:
        """Learn from the drafts of a round in which the target accepted this path of the tree."""
        if not self.uses_drafts:
            return
        for model in self.models:
            if not model.levels:
                continue
            self._learn_acceptance(model, tree, path)
            step = self._step_price(model)
            gains: dict[tuple[str, int, int], float] = {}  # the smallest gain of the levels that share an option
            for level in range(model.first, model.levels):
                gain, option = inf, model.level_option(level)
                if level == model.trial_level:
                    gain = max(model.trial_tokens, float(len(path) > level + 1)) - model.trial_price
                gains[option] = min(gains.get(option, inf), gain)
            for option, gain in gains.items():
                self._costs.exploration.record_use(option, gain)
            model.end_round(len(path), step)
        self._acceptance.learn(tree, path)
        for source in self.lookups:
            if source.is_active:
                self._learn_lookup(source, tree, path)

    def _learn_acceptance(self, model: ModelSource, tree: TokenTree, path: Sequence[int]) -> None:
        """Learn which levels were accepted after the level above. A level that was grown and not worth verifying was
        not accepted; nothing is known of one that was cut by the limit on rows."""
        acceptance, levels = self._costs.acceptance(model.source), model.levels
        if len(tree) > self._costs.max_extra_rows(self._context.rows_of_others):
            levels = min(levels, tree.deepest)
        for level in range(min(levels, len(path))):
            acceptance.learn(level, float(len(path) > level + 1), 1.0)

    def end(self) -> None:
        self._acceptance.flush()
        for model in self.models:
            model.end()

    def _learn_lookup(self, lookup: LookupSource, tree: TokenTree, path: Sequence[int]) -> None:
        """Learn how many tokens a lookup source added to this round, minus the price of its rows."""
        name, gain, count = lookup.source.name, 0.0, len(tree) - 1
        if rows := tree.sources.count(name):
            seconds = self._costs.extra_seconds(self._context.rows_of_others + 1, count)[-1] / count
            gain = [*map(tree.sources.__getitem__, path)].count(name) - self.price * seconds * rows
        lookup.gain.learn(gain)
        lookup.update_backoff(self._lookup_pays(lookup), self._repetitions)
        self._costs.lookup_gain(name, self._context.requests).learn(gain)
