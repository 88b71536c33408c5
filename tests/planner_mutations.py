"""Mistakes in the planner and in what it knows of costs; the tests of both must notice each."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from math import exp
from statistics import fmean
from types import ModuleType
from typing import Any

import test_asking
import test_costs
import test_planner
from mutation_checks import Mutation, Original

from outpace.core.tree import TokenTree
from outpace.planning import acceptance, cost_model, estimators, latency_curve, planner, sources
from outpace.planning.sources import PlanningContext


def calls_of(test: Callable[..., None]) -> Iterator[dict[str, Any]]:
    """The arguments of every case of a parametrised test; none where it needs anything else."""
    cases: list[list[dict[str, Any]]] = []
    for mark in getattr(test, "pytestmark", ()):
        if mark.name == "parametrize":
            names, values = mark.args
            names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
            cases.append([dict(zip(names, value if len(names) > 1 else [value], strict=True)) for value in values])
    for chosen in itertools.product(*cases):
        given = {name: value for case in chosen for name, value in case.items()}
        if set(given) == set(inspect.signature(test).parameters):
            yield given


def find_in(*modules: ModuleType) -> str | None:
    """The first test of these modules that fails, as they stand in their files."""
    for module in modules:
        for name, test in list(vars(module).items()):
            for given in calls_of(test) if name.startswith("test_") else ():
                try:
                    test(**given)
                except AssertionError:
                    return name
    return None


def find_in_planner() -> str | None:
    return find_in(test_planner, test_costs, test_asking)


def blindly_trusting(weigh: Original) -> Original:
    def mutated(self: Any, tree: TokenTree) -> list[float]:
        return [exp(score) for score in tree.scores]

    return mutated


def corrected_in_any_case(init: Original) -> Original:
    """Chances that a drafter fits itself are corrected too."""

    def mutated(self: Any, costs: Any, sources: Any) -> None:
        init(self, costs, sources)
        for source in sources:
            self._trust.setdefault(source.name, estimators.DecayedMean(1.0, 2.0))

    return mutated


def of_a_few_rounds(trust: Original) -> Original:
    return lambda self, source: estimators.DecayedMean(self.trust(source).value, 2.0, 0.8)


def adding_up(reach: Original) -> Original:
    """Leaves count with their whole chance, whatever the rows below them cost."""

    def mutated(self: Any, tree: TokenTree, grower: Any) -> float:
        row, self._row = self._row, 0.0
        try:
            return reach(self, tree, grower)
        finally:
            self._row = row

    return mutated


def rows_for_nothing(best: Original) -> Original:
    def mutated(self: Any, chances: Sequence[float]) -> Any:
        price, self._price = self._price, 0.0
        try:
            return best(self, chances)
        finally:
            self._price = price

    return mutated


def always_deeper(pays: Original) -> Original:
    return lambda self, tree, grower: grower.layers < self._options.deepest


def of_one_source(learn: Original) -> Original:
    """Every node counts for the first source, whatever drafter added it."""

    def mutated(self: Any, tree: TokenTree, path: Sequence[int]) -> Any:
        tree.sources = [test_planner.COPIES.name] * len(tree)
        return learn(self, tree, path)

    return mutated


def as_often_as_before(learn: Original) -> Original:
    """What failed is tried again as soon as what did not."""

    def mutated(self: Any, tree: TokenTree, path: Sequence[int]) -> None:
        learn(self, tree, path)
        for grower in self.models:
            grower.failures = 0

    return mutated


def of_one_request(draft: Original) -> Original:
    return lambda self, source, requests=1: draft(self, source)


def rows_unpaid(learn_copies: Original) -> Original:
    def mutated(self: Any, copier: Any, tree: TokenTree, path: Sequence[int]) -> None:
        price, self._price = self._price, 0.0
        learn_copies(self, copier, tree, path)
        self._price = price

    return mutated


def whole_trees(chosen: Original) -> Original:
    return lambda self, tree: list(range(min(len(tree), self._context.budget)))


def with_its_drafting(round_: Original) -> Original:
    return lambda self, requests, rows, tokens, seconds, drafting: round_(self, requests, rows, tokens, seconds, 0.0)


def falling(convex: Original) -> Original:
    def mutated(self: Any) -> tuple[list[int], list[float]]:
        known = self._times.medians or self._times.minima
        return sorted(known), [known[rows] for rows in sorted(known)]

    return mutated


def medians_joined(convex: Original) -> Original:
    """The medians as they are, made not to fall."""

    def mutated(self: Any) -> tuple[list[int], list[float]]:
        known = self._times.medians
        if not known:
            return convex(self)
        return sorted(known), [min(known[more] for more in known if more >= rows) for rows in sorted(known)]

    return mutated


def what_is_written_now(price: Original) -> Original:
    """Without the floor of what plain decoding would write."""
    return lambda self, requests: self._rates[requests].value if requests in self._rates else 0.0


def never_forgetting(learn: Original) -> Original:
    def mutated(self: Any, above: float, below: float = 1.0) -> None:
        self._numerator, self._denominator = self._numerator + above, self._denominator + below
        self.value = self._numerator / self._denominator

    return mutated


def as_often(asked: Original) -> Original:
    def mutated(self: Any, gains: bool, repeats: Any) -> None:
        asked(self, gains, repeats)
        self._wait = sources._SKIPS

    return mutated


def never_in_vain(asked: Original) -> Original:
    def mutated(self: Any, gains: bool, repeats: Any) -> None:
        asked(self, gains, repeats)
        self._min_repetition = sources._REPEATED

    return mutated


def mutation(name: str, owner: Any, attribute: str, make: Callable[[Original], Original]) -> Mutation:
    return Mutation(name, [owner], attribute, make, find_in_planner)


PLANNER_MUTATIONS = [
    mutation(
        "planner: a drafter's chances are taken at their word", acceptance.AcceptanceModel, "of", blindly_trusting
    ),
    mutation(
        "planner: fitted chances are corrected too", acceptance.AcceptanceModel, "__init__", corrected_in_any_case
    ),
    mutation("planner: a few bad rounds end a draft", cost_model.CostModel, "initial_trust", of_a_few_rounds),
    mutation("planner: unlikely leaves add up", planner.Planner, "_reach", adding_up),
    mutation("planner: rows cost nothing", planner.Planner, "_best", rows_for_nothing),
    mutation("planner: one more layer whatever it costs", planner.Planner, "pays", always_deeper),
    mutation("planner: all nodes are the first source's", acceptance.AcceptanceModel, "learn", of_one_source),
    mutation("planner: nothing is tried again", planner.Planner, "_is_due", lambda f: lambda self, grower: False),
    mutation("planner: what failed is tried as often as before", planner.Planner, "learn", as_often_as_before),
    mutation(
        "planner: a crowd's trials start anew with each request",
        cost_model.CostModel,
        "record_trial",
        lambda f: lambda *parts, pays: None,
    ),
    mutation("planner: the whole tree is verified", planner.Planner, "chosen", whole_trees),
    mutation(
        "planner: any prompt is worth reading", sources.ModelSource, "is_worth_reading", lambda f: lambda self: True
    ),
    mutation("planner: nothing is explored", sources.ModelSource, "explores", lambda f: lambda self: False),
    mutation(
        "planner: it explores whatever that gave", sources.ModelSource, "end_round", lambda f: lambda self, price: None
    ),
    mutation("planner: copies are asked as often as before", sources.LookupSource, "asked", as_often),
    mutation("planner: no text repeats itself", sources.RepetitionDetector, "follow", lambda f: lambda self: 0),
    mutation("planner: a repetition in vain says nothing", sources.LookupSource, "asked", never_in_vain),
    mutation("costs: means instead of medians", estimators, "median_low", lambda f: fmean),
    mutation("costs: a round with its drafting", cost_model.CostModel, "record_round", with_its_drafting),
    mutation("costs: more rows may be cheaper", latency_curve.LatencyCurve, "_convex", falling),
    mutation("costs: rows are free where few samples say so", latency_curve.LatencyCurve, "_convex", medians_joined),
    mutation(
        "costs: what a busy machine took is kept",
        latency_curve.LatencyCurve,
        "_forget_old",
        lambda f: lambda self: None,
    ),
    mutation(
        "planner: requests do not share the rows that they choose",
        PlanningContext,
        "set_rows",
        lambda f: lambda self, rows: None,
    ),
    mutation("planner: copies' rows cost nothing", planner.Planner, "_learn_lookup", rows_unpaid),
    mutation(
        "costs: reading is part of a step", cost_model.CostModel, "note_catch_up", lambda f: lambda self, source: None
    ),
    mutation(
        "costs: a step costs each request what it costs one", cost_model.CostModel, "draft_seconds", of_one_request
    ),
    mutation(
        "costs: rows that were never timed are free", latency_curve.LatencyCurve, "_slope", lambda f: lambda *parts: 0.0
    ),
    mutation(
        "costs: a prompt's pass says nothing of rows",
        latency_curve.LatencyCurve,
        "learn_prefill",
        lambda f: lambda *parts: None,
    ),
    mutation(
        "costs: a second is worth what is written now", cost_model.CostModel, "tokens_per_second", what_is_written_now
    ),
    mutation("costs: nothing is forgotten", estimators.DecayedMean, "learn", never_forgetting),
    mutation(
        "costs: a source was asked just now", cost_model.CostModel, "seconds_idle", lambda f: lambda self, source: 0.0
    ),
]
