"""Lookahead and Ouroboros in the simulator: the models run themselves, and what they did is priced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from doubles import QuickToy
from test_trace import loaded

from outpace.core.errors import UserError
from outpace.models.base import Part
from outpace.simulate import costs
from outpace.simulate.indexed_trace import index_trace
from outpace.simulate.run import LiveModels, Outcome, _run_live, run_setup, simulate
from outpace.simulate.setups import PLAIN, Setup, SetupSizes, select_setups, setups
from outpace.simulate.trace import RecordOptions, Trace, record, synthetic_trace

TARGET, DRAFT = QuickToy(16, 3, 5), QuickToy(16, 3, 5, 0.6)
SETUPS = {setup.name: setup for setup in setups(SetupSizes(nodes=12, width=3, tree_nodes=64))}


class Counting(QuickToy):
    """Counts its forwards."""

    passes = 0

    def score(self, forest: Sequence[Part]) -> Any:
        self.passes += 1
        return super().score(forest)


@pytest.fixture(scope="module")
def trace() -> Trace:
    options = RecordOptions(max_tokens=40)
    prompts = [[1, 2, 3], [4, 5], [9, 9, 1]]
    return record(loaded(TARGET, "target"), loaded(DRAFT, "draft"), prompts, options, tasks=["a", "b", "a"])


def run(live: LiveModels, trace: Trace, setup: Setup, *ratios: float) -> list[Outcome]:
    found = simulate(trace, [SETUPS[PLAIN], setup], [costs.by_ratio(ratio) for ratio in ratios], live=live)
    return list(found)[len(ratios) :]


@pytest.mark.parametrize("length", [1, 3, 6])
def test_a_chain_takes_what_its_replay_takes(trace: Trace, length: int) -> None:
    """A chain at temperature 0 does not ask about wrong branches, so the two ways must agree."""
    setup = replace(SETUPS["speculative-chain"], lengths=())
    prices = costs.PassCosts("by rows", lambda rows: 5.0 + rows, lambda rows: 1.0)
    mine = _run_live(LiveModels(trace, TARGET, DRAFT), setup, prices, length)
    other = run_setup(index_trace(trace), setup, prices, 2, length)
    assert mine.seconds == pytest.approx(other.seconds)
    assert mine.figures.passes == other.figures.passes
    assert mine.by_task == pytest.approx(other.by_task)
    assert mine.target_idle == pytest.approx(other.target_idle)
    assert mine.rows_per_token == other.rows_per_token


@pytest.mark.parametrize("name", ["lookahead", "ouroboros"])
def test_what_the_models_did_is_priced(trace: Trace, name: str) -> None:
    target, draft = Counting(16, 3, 5), Counting(16, 3, 5, 0.6)
    setup = replace(SETUPS[name], lengths=(3,) if name == "ouroboros" else ())
    for outcome in run(LiveModels(trace, target, draft), trace, setup, 4.0, 9.0):
        passes = outcome.figures.passes
        forwards = outcome.seconds - passes * outcome.ratio
        assert outcome.figures.emitted == outcome.tokens == 120
        assert (0 < forwards <= draft.passes) if name == "ouroboros" else forwards == draft.passes == 0
        assert outcome.figures.accepted > 0
        assert outcome.speedup == pytest.approx(120 * outcome.ratio / outcome.seconds)
        assert set(outcome.speedups) == {"a", "b"}
        assert passes + 3 <= target.passes <= 2 * (passes + 3), "it ran once, or once more for the length"


def test_the_window_tells_of_wrong_branches(trace: Trace) -> None:
    """Without what the target says there, the pool has the n-grams of the text alone, and of a first text none."""
    setup = replace(SETUPS["lookahead"], options={**SETUPS["lookahead"].options, "from_text": False})
    (outcome,) = run(LiveModels(trace, TARGET, DRAFT), trace, setup, 5.0)
    assert outcome.figures.accepted > 0
    assert outcome.rows_per_token > 10


def test_other_models_are_noticed(trace: Trace) -> None:
    with pytest.raises(UserError, match="another text than the trace"):
        run(LiveModels(trace, QuickToy(16, 3, 6), DRAFT), trace, SETUPS["lookahead"], 5.0)


def test_a_sampled_trace_is_refused(trace: Trace) -> None:
    with pytest.raises(UserError, match="temperature 0 only"):
        LiveModels(replace(trace, temperature=0.8), TARGET, DRAFT)


def test_without_the_models_there_are_no_such_rows() -> None:
    names = {setup.name for setup in select_setups(SetupSizes(), [])}
    with_models = {setup.name for setup in select_setups(SetupSizes(), [], has_models=True)}
    assert with_models - names == {"lookahead", "ouroboros"}
    with pytest.raises(UserError, match="lookahead needs the target's answers on wrong branches"):
        select_setups(SetupSizes(), ["card", "lookahead"])


def test_each_tasks_speed(trace: Trace) -> None:
    """All tokens over all seconds, of a task's answers and of all."""
    both = partial(simulate, chosen=[SETUPS[PLAIN], SETUPS["card"]], costs=[costs.by_ratio(5.0)])
    _, outcome = both(trace)
    counts = {task: sum(len(a.tokens) for a in trace.answers if a.task == task) for task in ("a", "b")}
    assert sum(counts[task] * outcome.by_task[task] for task in counts) == pytest.approx(outcome.seconds)
    assert outcome.speedups == {task: pytest.approx(5.0 / outcome.by_task[task]) for task in counts}
    assert next(iter(both(synthetic_trace(0.5, 1, 20)))).speedups == {"stated": 1.0}
