"""The plan of a batch, by tables, and its parts: reading, captures, and what rounds take beyond what is expected."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from test_costs import DRAFT, costs_of, record_rounds

from outpace.planning.cost_model import CostModel, DraftTimes
from outpace.planning.estimators import CaptureTimes, Excess, Line
from outpace.planning.plan import BatchPlan, BatchState, Estimates, best_width, plan_batch

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

from planner_cases import DRAFTS, Round, Setting, World, build_engine, measure, rounds_of

ALL_READ = BatchState(32, 32, 0, 0, 6000.0)


def estimates_of(**changes: Any) -> Estimates:
    """Passes of 10 s and .03 more for each row, steps of 1.5 s, four of five tokens accepted, no other costs."""
    known: dict[str, Any] = {
        "plain": 11.0,
        "pass_seconds": lambda rows: 10.0 + 0.03 * rows,
        "step_seconds": lambda nodes: 1.5 + 0.02 * nodes,
        "excess": lambda levels: 0.0,
        "acceptance": lambda level: 0.8,
        "reading": lambda tokens: 0.0,
        "capture": lambda drafting, levels: 0.0,
    }
    return Estimates(**known | changes)


@pytest.mark.parametrize(
    ("changes", "levels"),
    [
        ({}, 3),
        ({"acceptance": lambda level: 0.0}, 0),
        ({"acceptance": lambda level: 0.9 if level < 2 else 0.0}, 2),
        ({"step_seconds": lambda nodes: 9.0}, 0),
        ({"pass_seconds": lambda rows: 10.0 + 0.25 * rows}, 0),
        ({"excess": lambda levels: 11.0}, 4),  # of a round: it is shared by more levels
        ({"excess": lambda levels: 3.0 * levels}, 1),  # of each step
        ({"excess": lambda levels: 30.0}, 0),
        ({"plain": 40.0}, 9),  # a drafted round is not believed to be faster than a plain one
        ({"capture": lambda drafting, levels: 500.0 * (levels > 1)}, 1),
        ({"capture": lambda drafting, levels: 5000.0}, 0),
    ],
)
def test_levels_are_chosen_by_the_time_of_all_answers(changes: dict[str, Any], levels: int) -> None:
    plan = plan_batch(ALL_READ, 9, estimates_of(**changes))
    assert plan.levels == levels
    assert plan.drafting == (32 if levels else 0)


def test_the_rate_is_that_of_all_requests() -> None:
    plan = plan_batch(ALL_READ, 1, estimates_of())
    assert plan == BatchPlan(1, 32, pytest.approx(32 * 1.8 / (10.0 + 0.03 * 64 + 1.5 + 0.02 * 32)))
    nothing = plan_batch(ALL_READ, 0, estimates_of())
    assert nothing == BatchPlan(0, 0, pytest.approx(32 / 11.0))


@pytest.mark.parametrize(
    ("readers", "behind", "unread", "left", "drafting"),
    [
        (0, 0, 2000, 6000.0, 32),
        (0, 0, 2000, 100.0, 0),  # the answers are too short for reading
        (0, 0, 200_000, 6000.0, 0),
        (24, 0, 500, 6000.0, 32),
        (24, 0, 200_000, 6000.0, 24),  # those that are read draft without the others
        (1, 0, 200_000, 6000.0, 0),  # a single one is not worth the steps
        (32, 200_000, 0, 6000.0, 0),  # after many rounds of plain decoding
    ],
)
def test_reading_is_weighed_against_the_rest_of_the_answers(
    readers: int, behind: int, unread: int, left: float, drafting: int
) -> None:
    estimates = estimates_of(reading=lambda tokens: 0.02 * tokens)
    assert plan_batch(BatchState(32, readers, behind, unread, left), 9, estimates).drafting == drafting


@pytest.mark.parametrize(
    ("gains", "seconds", "width"),
    [([0.8], 0.1, 1), ([0.5, 0.9, 1.2, 1.4], 0.1, 4), ([0.5, 0.55, 0.57, 0.58], 0.1, 1), ([0.1], 1.0, 0), ([], 0.1, 0)],
)
def test_a_level_is_as_wide_as_pays(gains: list[float], seconds: float, width: int) -> None:
    assert best_width(gains, 1.0, lambda wide: seconds * wide) == width


def test_of_plans_that_are_nearly_as_good_the_one_with_fewer_levels_is_taken() -> None:
    """Requests that draft deep end at different times, and each row may turn out dearer."""
    nearly = estimates_of(
        acceptance=lambda level: 1.0,
        pass_seconds=lambda rows: 10.0 + (rows - 32) * 0.31,
        step_seconds=lambda nodes: 0.0,
    )
    assert plan_batch(ALL_READ, 9, nearly).levels == 1


def test_a_line_finds_what_each_token_and_each_growth_takes() -> None:
    line = Line()
    assert line.value(10, 0.5) == 5.0, "expected before any sample"
    for _ in range(20):
        for tokens in (64, 2048):
            line.learn(tokens, 20.0 + 0.02 * tokens)
    assert line.value(1000, 0.5) == pytest.approx(40.0, rel=0.05)
    for _ in range(40):
        line.learn(64, 30.0)
        line.learn(2048, 1.0)
    assert line.value(10_000, 0.0) == line.value(1, 0.0), "more tokens never take less"


def test_fewer_steps_may_have_less_in_excess_until_one_knows() -> None:
    """A loop that took one round for all of its steps would never try one step."""
    excess = Excess()
    excess.learn(5, 15.0)
    assert excess.drafted(1) == pytest.approx(9.0), "half of it is that of the steps"
    assert excess.drafted(5) == excess.drafted(9) == pytest.approx(15.0)
    for _ in range(9):
        excess.learn(1, 15.0)
    assert excess.drafted(1) == pytest.approx(15.0, rel=0.1)
    excess.learn(0, 2.0)
    assert excess.plain == 2.0
    assert excess.of_drafts > 12.0
    for _ in range(4):
        excess.learn(0, 0.1)
        excess.learn(0, 50.0)
    assert excess.plain == 2.0, "delayed rounds do not count"


def test_a_captured_shape_costs_nothing_again() -> None:
    captures = CaptureTimes()
    captures.record(8, 1)
    assert captures.seconds(8, 2) == 0.0, "nothing was captured"
    captures.record(8, 2, 0.4)
    assert captures.seconds(5, 2) == 0.0, "the same bucket"
    assert captures.seconds(8, 3) == captures.seconds(16, 2) == pytest.approx(0.4)


def plain_and_drafted(gap: float, pauses: int = 40) -> CostModel:
    """One plain round of 32 requests, then two with a step, and so on; a pause follows those with drafts."""
    costs, now = costs_of((32, 10.0), (64, 11.0), requests=32, samples=3), 0.0
    for _ in range(pauses):
        for rows, steps in ((32, 0), (64, 1), (64, 1)):
            costs.begin_round(now)
            seconds = 12.0 if steps else 10.0
            now += seconds
            costs.end_round(32, rows, DraftTimes(1.0 * steps, 1.0 * steps, steps), seconds, now)
            costs.record_round(32, rows, 32, seconds, 1.0 * steps)
            now += gap if steps else 0.0
    costs.begin_round(now)
    return costs


@pytest.mark.parametrize("gap", [0.0, 2.0, 8.0])
def test_a_pause_after_drafts_is_charged_to_them(gap: float) -> None:
    excess = plain_and_drafted(gap).excess(32)
    assert excess.drafted(1) == pytest.approx(gap, abs=0.05)
    assert abs(excess.plain) < 0.05


def test_a_pass_of_an_hour_and_a_clock_that_jumps_are_survived() -> None:
    costs = plain_and_drafted(0.0)
    for seconds in (3600.0, -3600.0):
        costs.begin_round(0.0)
        costs.end_round(32, 64, DraftTimes(1.0, 1.0, 1), seconds, seconds)
        costs.record_round(32, 64, 32, abs(seconds), 1.0)
        costs.begin_round(seconds)
    assert abs(costs.excess(32).drafted(1)) < 4 * 10.0
    assert costs.pass_seconds(64) < 12.0
    for _ in range(60):
        costs.begin_round(0.0)
        costs.end_round(32, 64, DraftTimes(1.0, 1.0, 1), 12.0, 12.0)
        costs.record_round(32, 64, 32, 12.0, 1.0)
        costs.begin_round(12.0)
    assert abs(costs.excess(32).drafted(1)) < 1.0


def test_excess_of_other_numbers_of_requests_starts_from_the_nearest() -> None:
    costs = plain_and_drafted(8.0)
    assert costs.excess(5).drafted(1) == pytest.approx(8.0, abs=0.05)
    costs.excess(5).learn(1, 0.0)
    assert costs.excess(32).drafted(1) == pytest.approx(8.0, abs=0.05)


def test_reading_is_learnt_without_draft_steps() -> None:
    costs = costs_of((1, 6.0))
    costs.expect(DRAFT, 0.1)
    costs.record_draft(DRAFT, 0.6, 1)
    for tokens in (100, 200, 400):
        costs.record_reading(DRAFT, tokens, 1.0 + 0.01 * tokens)
    assert costs.draft_prefill_seconds(DRAFT, 300) == pytest.approx(4.0, rel=0.1)
    assert costs.draft_prefill_seconds(DRAFT, 2) == 0.0, "read with the next step"
    assert costs.draft_seconds(DRAFT) == 0.6


def test_a_round_after_one_of_the_other_kind_is_not_timed() -> None:
    """What drafts leave behind for the next pass would be blamed on plain decoding."""
    costs = costs_of((1, 6.0), samples=3)
    record_rounds(costs, 2, 7.0)
    for _ in range(6):
        costs.record_round(1, 1, 1, 20.0, 0.0)
        costs.record_round(1, 2, 1, 1.0, 0.0)
    assert costs.plain_seconds(1) == 6.0
    assert costs.pass_seconds(2) == 7.0


def first_drafted(setting: Setting, count: int) -> list[tuple[Round, int]]:
    """Return the first rounds with drafts of a batch that starts at once, and the requests that drafted in each."""
    world, found = World(setting), list[tuple[Round, int]]()
    with build_engine(world, "auto") as engine:
        for one in rounds_of(engine, world, "auto", setting.requests, 96):
            if one.steps:
                steps = [sequence.history.steps[-1] for sequence in one.running if sequence.history.steps]
                found.append((one, sum(bool(step.plan and step.plan.widths) for step in steps)))
            if len(found) == count:
                break
    return found


def test_one_request_tries_the_draft_for_all_others() -> None:
    """A trial costs what one request reads; then all others read at once, if its drafts were accepted."""
    setting = Setting(32, prompt=128)
    found = first_drafted(setting, 4)
    requests = [requests for _, requests in found]
    assert requests[0] == 1
    assert requests[-1] == 32
    assert requests == sorted(requests)
    assert found[0][0].seconds < 1.8 * setting.plain_pass


@pytest.mark.parametrize("count", [8, 32])
def test_no_round_grows_more_levels_than_it_may_verify(count: int) -> None:
    """Of the rows that it grew 31 levels for, a batch once verified eight."""
    for one, _ in first_drafted(Setting(count), 12):
        rows = [sequence.history.steps[-1].verified_rows for sequence in one.running]
        assert one.steps < max(rows) + 2


def test_a_batch_takes_a_level_that_pays_only_if_all_take_it() -> None:
    """A step of 1.5 ms for one request and 2.1 for 32 pays for 32."""
    setting = Setting(32, prompt=64, target_pass=5e-3, target_row=1.5e-5, draft_step=1.5e-3, draft_row=1.95e-5)
    plain, chain, auto = (measure(setting, method, 96, 64)[0] for method in ("plain", "chain2", "auto"))
    assert auto > 0.95 * max(plain, chain) > plain


@pytest.mark.parametrize("count", [1, 8, 32])
@pytest.mark.parametrize(
    ("hidden", "amount"), [("none", 0.0), ("gap after a drafted round", 1.0), ("catch-up costs", 0.5)]
)
def test_a_useless_draft_costs_next_to_nothing(count: int, hidden: str, amount: float) -> None:
    setting = Setting(count, DRAFTS["useless"], hidden, amount, prompt=64)
    plain, auto = (measure(setting, method, 192, max(count, 3))[0] for method in ("plain", "auto"))
    assert auto > 0.97 * plain


@pytest.mark.parametrize("count", [1, 8, 32])
@pytest.mark.parametrize("amount", [4.0, 12.0])
def test_the_loop_closes_where_drafts_cost_what_is_not_timed(count: int, amount: float) -> None:
    """After each round with drafts several passes' time is lost: drafting ends, though its steps are cheap."""
    setting = Setting(count, DRAFTS["good"], "gap after a drafted round", amount, prompt=64)
    plain, (auto, drafted) = measure(setting, "plain", 400, count)[0], measure(setting, "auto", 400, count)
    assert auto > 0.85 * plain
    assert drafted < 0.1


def test_a_captured_graph_is_paid_once() -> None:
    """A new shape costs ten passes: a batch stays within few shapes."""
    world = World(Setting(8, hidden="capture (flagged)", amount=10.0, prompt=64))
    with build_engine(world, "auto") as engine:
        for _ in rounds_of(engine, world, "auto", 8, 192):
            pass
    assert world.num_captures["capture (flagged)"] <= 6


def test_a_plan_says_what_it_was_computed_from() -> None:
    batch, known = BatchState(4, 2, 10, 50, 400.0), estimates_of(reading=lambda tokens: 0.1 * tokens)
    found = known.at(batch, 2, 4)
    assert (found.requests, found.levels, found.acceptance) == (4, 2, (0.8, 0.8))
    assert found.pass_seconds == pytest.approx(10.0 + 0.03 * (4 + 4 * 2))
    assert found.step_seconds == pytest.approx(1.5 + 0.02 * 4)
    assert found.reading_seconds == pytest.approx(6.0)
    assert known.at(batch, 0, 4).acceptance == (0.8,), "of one level where none was chosen"
