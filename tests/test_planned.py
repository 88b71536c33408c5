"""CARD that plans: its budget and its choice of rows, and what it makes of ratios and devices on a stated pair."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import pytest
from doubles import make_request

from outpace.card.cache import CandidateCache
from outpace.decoders.base import RequestContext
from outpace.decoders.planned import Planned, WaitPlanner
from outpace.planning.cost_model import CostModel, best_rows
from outpace.planning.estimators import ExplorationBudget
from outpace.simulate import costs
from outpace.simulate.indexed_trace import index_trace
from outpace.simulate.run import Outcome, run_setup
from outpace.simulate.setups import Setup
from outpace.simulate.trace import synthetic_trace

TREE = {"width": 6, "tree_nodes": 512}


@cache
def simulated(method: str, ratio: float, devices: int = 2, **options: Any) -> Outcome:
    """360 tokens of a pair whose draft is right in six places of ten."""
    setup = Setup(method, method, method, 16, TREE | options)
    return run_setup(index_trace(synthetic_trace(0.6, 2, 180)), setup, costs.by_ratio(ratio), devices)


def test_the_budget_spends_a_share_and_half_of_it_after_each_failure() -> None:
    budget = ExplorationBudget(0.1)
    assert not budget.is_due("layer", 1.0)
    budget.advance(11.0)
    assert budget.is_due("layer", 1.0)
    assert budget.is_due("layer", 1.0), "to ask changes nothing"
    budget.record_trial("layer", False)
    budget.advance(11.0)
    assert not budget.is_due("layer", 1.0)
    assert budget.is_due("rows", 1.0), "of each thing separately"
    budget.advance(11.0)
    assert budget.is_due("layer", 1.0)
    budget.record_trial("layer", True)
    budget.advance(11.0)
    assert budget.is_due("layer", 1.0)


@pytest.mark.parametrize(
    ("chances", "more", "price", "expected"),
    [
        ([], [], 1.0, (1, 0.0)),
        ([0.5, 0.2, 0.1], [0.0, 0.0, 0.0], 1.0, (4, 0.8)),
        ([0.5, 0.2, 0.1], [0.1, 0.2, 0.4], 1.0, (3, 0.5)),
        ([0.5, 0.2, 0.1], [1.0, 2.0, 3.0], 1.0, (1, 0.0)),
        ([0.3, 0.3, 0.3], [0.4, 0.4, 0.4], 1.0, (4, 0.5)),  # a first row that does not pay alone
        ([0.5, 0.2, 0.1], [0.0], 1.0, (2, 0.5)),  # the others' time is not known yet
    ],
)
def test_rows_are_taken_while_they_pay(
    chances: list[float], more: list[float], price: float, expected: tuple[int, float]
) -> None:
    assert best_rows(chances, more, price) == pytest.approx(expected)


class Leaves:
    """A candidate cache that knows only its leaves' chances."""

    missed, layers, is_given_up = True, 0, False

    def __init__(self, *chances: float) -> None:
        self.chances = list(chances)

    def __len__(self) -> int:
        return len(self.chances)

    def best_probabilities(self, most: int, ends: int) -> tuple[list[float], list[float]]:
        return self.chances[:most], (self.chances or [1.0])[:ends]  # the root alone is a leaf


def gain(*chances: float) -> float:
    """Tokens that a layer below such leaves is expected to add."""
    context = RequestContext(request=make_request((1, 2)), committed=[1, 2], costs=CostModel(), budget=8)
    context.candidates = cast(CandidateCache, Leaves(*chances))
    planner = WaitPlanner(context, Planned.Options())
    planner.begin()
    return planner._gain


def test_a_layer_gains_by_the_chance_at_its_leaves_and_by_how_few_they_are() -> None:
    assert gain(0.6) > gain(0.3, 0.3) > gain(0.2, 0.2, 0.2) > 0
    assert gain(0.3, 0.3) > gain(0.2, 0.2)
    assert gain() == gain(1.0), "below a root alone the walk is there in any case"


def test_the_cheaper_a_layer_the_more_it_waits() -> None:
    found = {ratio: simulated("planned", ratio) for ratio in (2.0, 7.0, 30.0)}
    waits = [outcome.target_idle * ratio for ratio, outcome in found.items()]  # in draft steps
    assert waits == sorted(waits)
    lengths = [outcome.figures.mean_accepted_length for outcome in found.values()]
    assert lengths == sorted(lengths)


@pytest.mark.parametrize("ratio", [7.0, *(pytest.param(ratio, marks=pytest.mark.long) for ratio in (3.5, 15.0))])
def test_it_is_no_slower_than_card_and_auto(ratio: float) -> None:
    known = min(simulated(method, ratio).seconds for method in ("card", "auto"))
    assert simulated("planned", ratio).seconds < 1.02 * known


def test_where_forwards_are_cheap_it_gains_on_both() -> None:
    known = min(simulated(method, 15.0).seconds for method in ("card", "auto"))
    assert 1.02 * simulated("planned", 15.0).seconds < known


def test_it_waits_after_hits_too() -> None:
    assert simulated("planned", 15.0).seconds < simulated("planned", 15.0, hits=False).seconds


def test_a_drafter_that_rests_is_there_when_it_is_wanted() -> None:
    assert simulated("planned", 7.0).seconds < simulated("planned", 7.0, rests=False).seconds


def test_on_one_device_it_drafts_in_turn() -> None:
    found = {turns: simulated("planned", 7.0, 1, turns=turns) for turns in (True, False)}
    assert found[True].seconds < 0.95 * found[False].seconds
    assert found[True].draft_idle > found[False].draft_idle
