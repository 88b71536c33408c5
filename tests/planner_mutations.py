"""Mistakes in the planner and the cost model: each must fail a test of the suite, named here."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import test_plan as plan_tests
from mutation_checks import Original
from part_mutations import Mistakes, mutations, returning

from outpace.core.stats import DecayedMean
from outpace.core.tree import TokenTree
from outpace.planning import estimators
from outpace.planning.cost_model import CostModel
from outpace.planning.estimators import ContextCost, Excess, ExplorationBudget, LatencyCurve, LevelMeans
from outpace.planning.plan import BatchState
from outpace.planning.planner import Planner
from outpace.planning.sources import AcceptanceModel, ModelSource, PlanningContext, RepetitionDetector


def uncorrected(of: Original, self: Any, tree: Any) -> Any:
    return [exp(score) for score in tree.scores]


def corrected_in_any_case(init: Original, self: Any, costs: Any, sources: Any, text: Any) -> None:
    """Chances that a drafter fits itself are corrected too."""
    init(self, costs, sources, text)
    for source in sources:
        self._means.setdefault(source.name, DecayedMean(0.0, 0.0))


def of_own_rounds(factors: Original, self: Any) -> Any:
    """A request's factors without the prior of all requests, and of the last few rounds."""
    for mean in self._means.values():
        mean._fade = 0.8
    return {name: self._means[name].value if known else 0.0 for name, known in factors(self).items()}


def with_zero(attribute: str) -> Original:
    """A method that runs as if this attribute was 0."""

    def mistake(original: Original, self: Any, *given: Any) -> Any:
        value = getattr(self, attribute)
        setattr(self, attribute, 0.0)
        try:
            return original(self, *given)
        finally:
            setattr(self, attribute, value)

    return mistake


def with_tokens_left(original: Original, self: Any, *given: Any) -> Any:
    """A method that runs as if many tokens were left."""
    left, self._context.tokens_left = self._context.tokens_left, 1000
    try:
        return original(self, *given)
    finally:
        self._context.tokens_left = left


def always_deeper(next_width: Original, self: Any, tree: Any, model: Any) -> Any:
    return int(model.levels < self._options.deepest)


def unrelated(value: Original, self: Any, level: int) -> float:
    tokens, chances = self._sums[level] if level < len(self._sums) else (0.0, 0.0)
    return (tokens + 2.0 * self._prior) / (chances + 2.0)


def of_one_source(learn: Original, self: Any, tree: TokenTree, path: Sequence[int]) -> Any:
    """Every node counts for the first source, whatever drafter added it."""
    names = ["ngram"] * len(tree)
    of = SimpleNamespace(sources=names, roles=tree.roles, scores=tree.scores, children=tree.children)
    return learn(self, of, path)


def of_one_request(draft: Original, self: Any, source: Any, requests: Any = 1, width: Any = 1) -> Any:
    return draft(self, source)


def whole_trees(chosen: Original, self: Any, tree: Any) -> Any:
    return list(range(min(len(tree), self._context.budget)))


def with_its_drafting(
    round_: Original, self: Any, requests: Any, rows: Any, tokens: Any, seconds: Any, drafting: Any, **given: Any
) -> Any:
    return round_(self, requests, rows, tokens, seconds, 0.0, **given)


def falling(convex: Original, self: Any) -> tuple[list[int], list[float]]:
    """The times as they are."""
    known = self._known_times()
    return sorted(known), [known[rows] for rows in sorted(known)]


def medians_joined(convex: Original, self: Any) -> tuple[list[int], list[float]]:
    """The times as they are, made not to fall."""
    known = self._known_times()
    return sorted(known), [min(known[more] for more in known if more >= rows) for rows in sorted(known)]


def current_rate(price: Original, self: Any, requests: Any) -> Any:
    """Without plain decoding's rate as the least."""
    return self._rates[requests].value if requests in self._rates else 0.0


def never_forgetting(learn: Original, self: Any, above: float, below: float = 1.0) -> None:
    self._numerator, self._denominator = self._numerator + above, self._denominator + below
    self.value = self._numerator / self._denominator


def paying_for_gains(width: Original, gains: Any, price: Any, seconds: Any) -> Any:
    """The price of a second with the wrong sign."""
    return width(gains, -price, seconds)


def each_for_itself(plan: Original, batch: Any, levels: Any, known: Any) -> Any:
    """A batch planned as one request."""
    return plan(BatchState(1, 1, 0, 0, batch.tokens_left / batch.requests), levels, known)


def of_every_round(record: Original, self: Any, *given: Any, every: Any = False) -> Any:
    return record(self, *given, every=True)


def as_before(drafted: Original, self: Any, steps: Any) -> Any:
    return self._drafted.value(steps, 0.0)


def without(**changes: Any) -> Original:
    """A plan that leaves out some of what is known."""
    return lambda plan, batch, levels, known: plan(batch, levels, known._replace(**changes))


MISTAKES: Mistakes = {
    "test_planner.py::test_a_few_bad_rounds_do_not_end_a_draft_that_pays": [
        ("planner: a few bad rounds end a draft", AcceptanceModel, "_current_factors", of_own_rounds),
    ],
    "test_planner.py::test_chances_of_a_calibrated_drafter_are_not_corrected": [
        ("planner: fitted chances are corrected too", AcceptanceModel, "__init__", corrected_in_any_case),
    ],
    "test_planner.py::test_a_level_gains_less_below_four_unlikely_leaves_than_below_a_likely_one": [
        ("planner: unlikely leaves add up", Planner, "_level_gains", with_zero("_row")),
    ],
    "test_planner.py::test_nodes_with_small_chances_are_not_verified_if_rows_cost_time": [
        ("planner: rows cost nothing", Planner, "_best_rows", with_zero("price")),
        ("planner: the whole tree is verified", Planner, "nodes_to_verify", whole_trees),
    ],
    "test_planner.py::test_a_draft_that_fails_is_tried_less_and_less": [
        ("planner: a drafter's chances are not corrected", AcceptanceModel, "chances", uncorrected),
        ("planner: one more level whatever it costs", Planner, "next_width", always_deeper),
        ("planner: what failed is tried as often as before", ExplorationBudget, "record_use", returning(None)),
    ],
    "test_planner.py::test_factors_and_costs_are_kept_by_source": [
        ("planner: all nodes are the first source's", AcceptanceModel, "learn", of_one_source),
    ],
    "test_planner.py::test_speedups": [
        ("planner: nothing is tried again", ExplorationBudget, "is_due", returning(False)),
    ],
    "test_planner.py::test_a_crowded_batch_remembers_for_the_next_request_that_trials_failed": [
        ("planner: failed trials are forgotten", ExplorationBudget, "record_use", returning(None)),
    ],
    "test_planner.py::test_a_long_prompt_is_not_read_for_a_few_tokens": [
        ("planner: any prompt is worth reading", ModelSource, "may_try", returning(True)),
    ],
    "test_planner.py::test_no_level_is_planned_that_cannot_be_written": [
        ("planner: levels beyond the end are planned", Planner, "next_width", with_tokens_left),
    ],
    "test_planner.py::test_a_level_has_no_parents_where_the_text_ends": [
        ("planner: the last tokens have children", Planner, "_level_gains", with_tokens_left),
    ],
    "test_planner.py::test_each_text_finds_out_what_its_draft_is_worth": [
        ("planner: nothing is tried again in a new text", ModelSource, "may_try", returning(False)),
    ],
    "test_planner.py::test_requests_share_the_rows_that_cost_little": [
        ("planner: requests do not share the rows that they choose", PlanningContext, "set_rows", returning(None)),
    ],
    "test_planner.py::test_in_a_crowded_batch_only_requests_with_good_copies_look_them_up": [
        ("planner: copies' rows cost nothing", Planner, "_learn_lookup", with_zero("price")),
    ],
    "test_plan.py::test_a_level_is_as_wide_as_pays": [
        ("planner: a price with the wrong sign", plan_tests, "best_width", paying_for_gains),
    ],
    "test_plan.py::test_reading_is_weighed_against_the_rest_of_the_answers": [
        ("planner: reading is not charged", plan_tests, "plan_batch", without(reading=lambda tokens: 0.0)),
    ],
    "test_plan.py::test_levels_are_chosen_by_the_time_of_all_answers": [
        ("planner: a batch is planned as one request", plan_tests, "plan_batch", each_for_itself),
        ("planner: captures are not charged", plan_tests, "plan_batch", without(capture=lambda drafting, levels: 0.0)),
    ],
    "test_plan.py::test_the_loop_closes_where_drafts_cost_what_is_not_timed": [
        ("planner: the loop never closes", Excess, "learn", returning(None)),
    ],
    "test_plan.py::test_a_round_after_one_of_the_other_kind_is_not_timed": [
        ("costs: plain rounds pay for the drafts before them", CostModel, "record_round", of_every_round),
    ],
    "test_plan.py::test_fewer_steps_may_have_less_in_excess_until_one_knows": [
        ("costs: one step is believed to cost what five did", Excess, "drafted", as_before),
    ],
    "test_asking.py::test_rejected_copies_are_queried_less_and_less_often": [
        ("planner: copies are asked as often as before", ExplorationBudget, "record_use", returning(None)),
    ],
    "test_asking.py::test_a_repetition_is_copied_at_once": [
        ("planner: no text repeats itself", RepetitionDetector, "follow", returning(0)),
    ],
    "test_costs.py::test_outliers_do_not_move_the_time_of_a_pass": [
        ("costs: means instead of what is usual", estimators, "below_median", lambda original, values: fmean(values)),
    ],
    "test_costs.py::test_a_pass_takes_longer_with_more_tokens_in_the_texts": [
        ("costs: reading the texts' keys takes no time", ContextCost, "_fitted", returning(0.0)),
    ],
    "test_costs.py::test_plain_decoding_is_timed_when_it_has_settled": [
        ("costs: plain decoding is timed soon after drafts", CostModel, "_settling_rounds", returning(1)),
    ],
    "test_costs.py::test_timing_plain_decoding_again_costs_little_of_the_time": [
        ("costs: plain decoding is always timed again", CostModel, "speedup", returning(1.0)),
    ],
    "test_costs.py::test_drafting_is_not_part_of_a_round": [
        ("costs: a round with its drafting", CostModel, "record_round", with_its_drafting),
    ],
    "test_costs.py::test_times_between_known_rows_are_interpolated_and_never_fall": [
        ("costs: more rows may be cheaper", LatencyCurve, "_convex", falling),
    ],
    "test_costs.py::test_no_row_is_free_because_few_samples_say_so": [
        ("costs: rows are free where few samples say so", LatencyCurve, "_convex", medians_joined),
        ("costs: rows that were never timed are free", LatencyCurve, "_row_seconds", returning(0.0)),
    ],
    "test_costs.py::test_old_times_of_many_rows_are_forgotten_and_those_of_few_rows_are_not": [
        ("costs: the times of a busy machine are kept", LatencyCurve, "_forget_old", returning(None)),
    ],
    "test_costs.py::test_a_draft_step_is_timed_by_the_nodes_that_all_requests_expand": [
        ("costs: a step costs each request what it costs one", CostModel, "draft_seconds", of_one_request),
    ],
    "test_costs.py::test_a_prefill_shows_what_many_rows_cost": [
        ("costs: a prefill says nothing of rows", LatencyCurve, "learn_prefill", returning(None)),
    ],
    "test_costs.py::test_the_price_is_at_least_that_of_plain_decoding": [
        ("costs: the price is the current rate", CostModel, "tokens_per_second", current_rate),
    ],
    "test_costs.py::test_a_mean_forgets": [
        ("costs: nothing is forgotten", DecayedMean, "learn", never_forgetting),
    ],
    "test_costs.py::test_the_acceptance_of_a_level_starts_from_that_of_the_level_above": [
        ("costs: levels are unrelated", LevelMeans, "value", unrelated),
    ],
}
PLANNER_MUTATIONS = mutations(MISTAKES)
