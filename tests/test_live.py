"""Lookahead and Ouroboros in the simulator, which runs the models and prices their passes."""

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
    """A toy that counts its passes."""

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
def test_a_live_chain_costs_as_much_as_its_replay(trace: Trace, length: int) -> None:
    """A chain at temperature 0 does not ask about wrong branches, so the two ways must agree."""
    setup = replace(SETUPS["speculative-chain"], lengths=())
    prices = costs.PassCosts("by rows", lambda rows: 5.0 + rows, lambda rows: 1.0)
    live = _run_live(LiveModels(trace, TARGET, DRAFT), setup, prices, length)
    replayed = run_setup(index_trace(trace), setup, prices, 2, length)
    assert live.figures.passes == replayed.figures.passes
    for name in ("seconds", "by_task", "target_idle", "rows_per_token"):
        assert getattr(live, name) == pytest.approx(getattr(replayed, name))


@pytest.mark.parametrize("name", ["lookahead", "ouroboros"])
def test_the_passes_of_the_models_are_priced(trace: Trace, name: str) -> None:
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


def test_lookahead_uses_answers_on_wrong_branches(trace: Trace) -> None:
    """Without them the pool would have only n-grams of the text, and none for a first text."""
    setup = replace(SETUPS["lookahead"], options={**SETUPS["lookahead"].options, "from_text": False})
    (outcome,) = run(LiveModels(trace, TARGET, DRAFT), trace, setup, 5.0)
    assert outcome.figures.accepted > 0
    assert outcome.rows_per_token > 10


def test_models_of_another_trace_are_refused(trace: Trace) -> None:
    with pytest.raises(UserError, match="another text than the trace"):
        run(LiveModels(trace, QuickToy(16, 3, 6), DRAFT), trace, SETUPS["lookahead"], 5.0)


def test_a_sampled_trace_is_refused(trace: Trace) -> None:
    with pytest.raises(UserError, match="temperature 0 only"):
        LiveModels(replace(trace, temperature=0.8), TARGET, DRAFT)


def test_setups_that_need_the_models_are_refused_without_them() -> None:
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
