"""The planner of method auto: chooses for one request, round by round, which sources draft, how many layers are grown
and how many rows are verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log

from outpace.core.options import MethodOptions, number, whole
from outpace.core.tree import TokenTree
from outpace.planning.acceptance import AcceptanceModel
from outpace.planning.cost_model import YIELD, CostModel
from outpace.planning.sources import LookupSource, ModelSource, PlanningContext, RepetitionDetector

MAX_LOOKUP_CHANCE = 0.5  # if lookups continue the root with a higher chance, a model's layer shows no typical yield
_BEAM = 4  # leaves that one layer is assumed to expand, and extra rows by which the price of a row is estimated
_PRICE_MARGIN = 1.1  # factor on prices: corrects for the optimism of a maximum of estimates (winner's curse)
# An answer's first rounds decode plainly until the time of such a round is known, but at most this many: rounds in the
# same passes as another request's prompt are not timed.
_MAX_UNTIMED_ROUNDS = 24
_CROWDED, _PROBE_EVERY = 0.35, 64  # price of a row in tokens above which a batch is crowded; rounds between its probes
_MIN_FIRST_LAYER_CHANCE = 0.4  # acceptance chance that a model's first layer needs to be tried on a new text
_MIN_VALUE_OF_NODE = 0.25  # nodes whose chance is below this fraction of a row's price are not attached
_UNKNOWN = 2  # most layers before the time of a draft step and the price are known


@dataclass(frozen=True)
class PlannerOptions(MethodOptions):
    """`deepest`: the most draft layers in a round; `trials`: the share of time for trying again what did not pay."""

    deepest: int = whole(16, 1, 256)
    trials: float = number(0.01, 0.0, 1.0)


class Planner:
    """Plans the rounds of one request by the engine's cost model and by what the request's drafts were worth so far."""

    def __init__(self, context: PlanningContext, options: PlannerOptions) -> None:
        self._context, self._options = context, options
        self._costs: CostModel = context.costs
        self._acceptance = AcceptanceModel(self._costs, context.sources)
        lookups = [source for source in context.sources if not source.runs_model]
        self.lookups = [
            LookupSource(one, self._costs.initial_lookup_gain(one.name, context.requests)) for one in lookups
        ]
        self._repetitions = RepetitionDetector(context.committed)
        self.models = [ModelSource(one, options.deepest, context) for one in context.sources if one.runs_model]
        self._worth = 0.0  # of this round's tree
        self._lookup_chance = 0.0  # that the walk reaches a lookup node of this round's tree
        self._price = 0.0  # tokens that a second is worth in this round
        self._row = 0.0  # tokens that one of a few more rows is worth in it
        self._seconds = 0.0  # duration of the request's rounds, each counted as a plain one
        self._plain = 0.0  # seconds of a plain round
        self._at_leaves = 1.0
        self._rounds = 0
        self._is_probe = False  # this round drafts in a crowded batch, whether it pays or not
        self.is_plain = False  # this round decodes plainly in any case
        self.uses_drafts = False  # some source drafts in this round

    def begin(self) -> None:
        """Begin a round: read the prices and choose the lookup sources. The round decodes plainly until a plain round
        has been timed, and in a batch so crowded that one more row costs a good part of a token: there drafting gains
        less than the host's time for it costs, except for lookups."""
        requests = self._context.requests
        prices = self._costs.prices(requests)
        self._price, self._plain = _PRICE_MARGIN * prices.tokens_per_second, prices.plain_round_seconds
        is_crowded = requests > 1 and self._price * prices.extra_row_seconds > _CROWDED
        self._is_probe = is_crowded and self._costs.is_periodic(_PROBE_EVERY)
        gains = self._is_probe or not is_crowded or any(map(self._gains, self.lookups))
        is_new = self._rounds < _MAX_UNTIMED_ROUNDS and not prices.is_known
        self.is_plain = self._context.budget < 2 or is_new or self._costs.needs_plain_round(requests) or not gains
        self._rounds, self.uses_drafts = self._rounds + 1, False
        for source in self.lookups:
            source.is_asked = False
        if self.is_plain:
            return
        self._worth = self._lookup_chance = 0.0
        self._row = self._price * self._costs.extra_seconds(self._context.rows_of_others + 1, _BEAM)[-1] / _BEAM
        self._acceptance.begin()
        for model in self.models:
            model.layers, model.is_trial = 0, False
        for source in self.lookups:
            source.is_asked = self._gains(source) or self._is_probe or source.is_due(self._repetitions)
            self.uses_drafts = self.uses_drafts or source.is_asked

    def _gains(self, lookup: LookupSource) -> bool:
        """Return whether a lookup source gives more than the host's time for it costs."""
        return lookup.gain.value > self._price * self._costs.draft_seconds(lookup.source)

    def looked_up(self, tree: TokenTree) -> None:
        """Note that a lookup source has added its nodes."""
        self._lookup_chance = sum(map(self._acceptance.of(tree).__getitem__, tree.children(0)))

    def pays(self, tree: TokenTree, model: ModelSource) -> bool:
        """Return whether another layer of the draft model brings more than it costs, or is due for a trial."""
        requests = self._context.requests
        cost = self._price * self._costs.draft_seconds(model.source, requests)
        if model.is_trial or model.layers >= (self._options.deepest if cost else _UNKNOWN):
            return False
        if not model.has_read and not model.is_worth_reading():
            return False
        self._at_leaves = self._reach(tree, model)
        if self._brings(model, self._at_leaves, cost):
            return self._ask(tree, model)
        model.is_trial = self._is_due(model)
        return model.is_trial and self._ask(tree, model)

    def _brings(self, model: ModelSource, at_leaves: float, cost: float) -> bool:
        """Return whether a layer below leaves with this chance brings more than its cost, or is grown to see what it
        gives for this text, whatever it gave for others."""
        if model.layer_yield.value * at_leaves > cost:
            return True
        return (
            self._acceptance.trust(model.source) * (1.0 - self._lookup_chance) > _MIN_FIRST_LAYER_CHANCE
            and model.explores()
        )

    def _ask(self, tree: TokenTree, model: ModelSource) -> bool:
        """Prepare the request for a layer, which takes longer if the model must first read text."""
        if not model.layers:
            tree.min_score = self._min_score(self._acceptance.trust(model.source))
            if not model.is_following:
                self._costs.note_catch_up(model.source)
        self.uses_drafts = True
        return True

    def _min_score(self, trust: float) -> float:
        """The path score below which a node is not attached."""
        return log(_MIN_VALUE_OF_NODE * self._row / trust) if self._row > 0.0 < trust else -inf

    def grown(self, tree: TokenTree, model: ModelSource) -> None:
        """Learn from a layer that the model has added."""
        model.has_read = True
        # After lookups a layer adds what they leave to add, which says nothing about other rounds.
        if self._lookup_chance <= MAX_LOOKUP_CHANCE:
            chances, before = sorted(self._acceptance.of(tree)[1:], reverse=True), self._worth
            rows, self._worth = self._best(chances[: self._context.budget - 1])
            most = self._costs.max_extra_rows(self._context.rows_of_others)
            is_cut = len(chances) >= rows > most  # by the limit on untimed rows, not by what pays
            if not is_cut:
                model.gave(self._worth - before, self._at_leaves)
        self._costs.record_step(model.source, self._context.requests)
        if model.is_trial and not model.layers:
            model.trial_cost = self._costs.last_draft_seconds
        model.layers += 1

    def _is_due(self, model: ModelSource) -> bool:
        """Return whether a layer that does not pay is tried again."""
        cost = self._costs.draft_seconds(model.source, self._context.requests)
        if not model.layers:
            cost = max(model.trial_cost, 3 * cost) + model.prefill_seconds
        is_representative = not model.layers or self._lookup_chance <= MAX_LOOKUP_CHANCE
        failures = max(model.failures, self._costs.failed_trials(model.source, self._context.requests))
        share = self._options.trials / 2 ** (0 if model.layers else failures)
        grown_at = model.grown_at[model.layers] if model.layers else 0.0
        idle = self._seconds - grown_at if model.layers else self._costs.seconds_idle(model.source)
        return is_representative and cost * self._context.requests < share * idle

    def chosen(self, tree: TokenTree) -> list[int]:
        """Return the nodes to verify: the root and those with the best calibrated chances, closed under ancestors. Now
        and then fewer than pay, to time so few rows."""
        chances = self._acceptance.of(tree)
        order = sorted(range(1, len(tree)), key=chances.__getitem__, reverse=True)[: self._context.budget - 1]
        return sorted([0, *order[: self._count([*map(chances.__getitem__, order)]) - 1]])

    def _count(self, chances: Sequence[float]) -> int:
        """Return how many rows to verify, the root's included, of nodes with these falling chances."""
        for model in self.models:
            if model.is_first_layer_trial:
                return 2
        others = self._context.rows_of_others
        best, _ = self._best(chances)
        fewer = (best + 1) // 2
        return fewer if best > 1 and self._costs.should_probe(others + fewer) else best

    def _best(self, chances: Sequence[float]) -> tuple[int, float]:
        """Return how many rows pay, the root's included, and what they bring above their price."""
        return self._costs.best_rows(chances, self._context.rows_of_others, self._price)

    def end_round(self, tree: TokenTree, path: Sequence[int]) -> None:
        """End a round after the target has accepted this path of the tree."""
        if self.uses_drafts:
            self.learn(tree, path)
        else:
            self._end_plain_round()

    def _end_plain_round(self) -> None:
        """Count a round in which no source drafted."""
        self._seconds += self._plain
        for model in self.models:
            model.is_following = False

    def learn(self, tree: TokenTree, path: Sequence[int]) -> None:
        """Learn from a round with drafts, of whose tree the target accepted this path."""
        self._seconds += self._plain
        for model in self.models:
            model.is_following = model.layers > 0
            model.grown_at[: model.layers] = [self._seconds] * model.layers
            if model.layers:
                is_trial = model.is_first_layer_trial
                model.failures = model.failures + 1 if is_trial else 0
                if self._context.requests > 1:
                    self._costs.record_trial(model.source, self._context.requests, pays=not is_trial)
                model.end_round(self._price)
        self._acceptance.learn(tree, path)
        for source in self.lookups:
            if source.is_asked:
                self._learn_lookup(source, tree, path)

    def end(self) -> None:
        """End the request."""
        self._acceptance.work_in()

    def _learn_lookup(self, lookup: LookupSource, tree: TokenTree, path: Sequence[int]) -> None:
        """Learn how many tokens a lookup source added to this round, minus the price of its rows."""
        name, gain, count = lookup.source.name, 0.0, len(tree) - 1
        if rows := tree.sources.count(name):
            seconds = self._costs.extra_seconds(self._context.rows_of_others + 1, count)[-1] / count
            gain = [*map(tree.sources.__getitem__, path)].count(name) - self._price * seconds * rows
        lookup.gain.learn(gain)
        lookup.asked(self._gains(lookup), self._repetitions)
        self._costs.lookup_gain(name, self._context.requests).learn(gain)

    def _reach(self, tree: TokenTree, model: ModelSource) -> float:
        """Return the chance that the walk reaches the parents of the model's next layer: the likeliest leaves and, for
        the first layer, the root where no lookup node continues it. Each counts with its excess over the price of a row
        there, because four unlikely leaves give less than one that is as likely as all of them."""
        chances, least = self._acceptance.of(tree), self._row / YIELD
        leaves = sorted(map(chances.__getitem__, tree.leaves()), reverse=True)[:_BEAM]
        if not model.layers:
            remaining = 1.0 - sum(map(chances.__getitem__, tree.children(0)))
            leaves.append(self._acceptance.trust(model.source) * remaining)
        reach = 0.0
        for chance in leaves:
            reach += max(0.0, chance - least)
        return reach
