"""What is timed before the first request: rounds of several sizes and a draft's step, and nothing else of it stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from doubles import QuickToy, decode, make_drafter, make_request
from engine_runs import finish, submit
from test_library import folder

import outpace
from outpace.api import profile as profiles
from outpace.decoders.auto import Auto
from outpace.engine import warmup
from outpace.engine.engine import Engine, EngineOptions
from outpace.engine.warmup import warm_up
from outpace.models.load import load_model

WHOLE = 60.0  # seconds, more than any of these take


def engine_of(target: Any, drafter: str | None = "model", **options: Any) -> Engine:
    made = make_drafter(drafter, target) if drafter else None
    return Engine(target, made, options=EngineOptions(**{"nodes": 8, **options}))


class Counting(QuickToy):
    """Counts its passes."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def score(self, parts: Any, **options: Any) -> Any:
        self.rows.append(sum(len(part.tokens) for part in parts))
        return super().score(parts, **options)


def test_rounds_of_every_size_and_the_step_are_timed() -> None:
    target = Counting()
    with engine_of(target) as engine:
        warm_up(engine, [1], WHOLE)
        costs = engine.costs
        assert target.rows == list(warmup._ROWS), "each of its rounds is one pass over as many rows"
        assert [costs.is_timed(rows, 2) for rows in (1, 2, 3, 4, 8)] == [True, True, False, True, True]
        (source,) = engine.drafting.drafter.capabilities.sources
        assert costs.draft_seconds(source) > 0
        assert set(costs.state_dict()["draft"]) == {source.name}


def test_only_timings_remain() -> None:
    with engine_of(QuickToy(), reuse=True) as engine:
        warm_up(engine, [1], WHOLE)
        assert [*engine.running, *engine.waiting] == []
        assert engine.memory.used == 0, "its keys and values are not kept for others"
        assert engine.costs.speedup(1) == 0, "what it wrote says nothing of how fast others are written"
        learnt = engine.costs.state_dict()
        assert (learnt["acceptance"], learnt["trust"]) == ({}, {})


def rounded(state: Any) -> Any:
    """Return a state with its numbers rounded: restoring a mean multiplies it by its weight and divides again."""
    return json.loads(json.dumps(state), parse_float=lambda digits: round(float(digits), 12))


@pytest.mark.parametrize("drafter", ["model", "both"])
def test_drafters_keep_their_statistics(drafter: str) -> None:
    with engine_of(QuickToy(), drafter) as engine:
        made = engine.drafting.drafter.capabilities.learnt
        finish(engine, *submit(engine, make_request([1, 2, 3], max_tokens=30), method=Auto))
        before = made.state_dict()
        warm_up(engine, [1], WHOLE)
        assert rounded(made.state_dict()) == rounded(before)
        assert before != make_drafter(drafter, engine.target).capabilities.learnt.state_dict(), (
            "it had learnt something"
        )


class Capturing(Counting):
    """Takes a second for its first pass over each number of rows, which it captures; a millisecond for others."""

    num_captures = 0

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def score(self, parts: Any, **options: Any) -> Any:
        found = super().score(parts, **options)
        is_first = self.rows.count(self.rows[-1]) == 1
        self.now += 1.0 if is_first else 0.001
        if is_first:
            self.num_captures += 1
        return found


def test_captured_passes_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what they take nor that they take long: what fits into the time that is given is timed all the same."""
    target, draft = Capturing(), Capturing()
    monkeypatch.setattr(warmup.time, "perf_counter", lambda: target.now + draft.now)
    drafter = make_drafter("perfect", draft)
    with Engine(target, drafter, options=EngineOptions(nodes=8), clock=lambda: target.now + draft.now) as engine:
        warm_up(engine, [1], 0.1)
        costs, (source,) = engine.costs, engine.drafting.drafter.capabilities.sources
        assert target.rows == list(warmup._ROWS)
        assert [costs.is_timed(rows, 1) for rows in (1, 2, 4, 8)] == [True] * 4
        assert [costs.is_timed(rows, 2) for rows in (1, 2, 4, 8)] == [True, False, False, False], "one of two is left"
        assert len(costs._steps[source.name]._samples[1]) == len(draft.rows) - len(set(draft.rows)) - 1, (
            "one more reads what was written without drafts"
        )
        assert max(costs.pass_seconds(rows) for rows in (1, 2, 4, 8)) < 0.01
        assert 0 < costs.draft_seconds(source) < 0.01


def test_it_ends_when_its_time_is_over_and_fits_small_trees() -> None:
    target = Counting()
    with engine_of(target, nodes=4) as engine:
        warm_up(engine, [1], 0.0)
        assert not target.rows
        assert [*engine.running, *engine.waiting] == []
        warm_up(engine, [1], WHOLE)
        assert max(target.rows) == 4, "trees may be smaller than those that are timed"


@pytest.mark.parametrize("drafter", ["model", "both", "ngram"])
def test_texts_are_the_same_after_it(drafter: str) -> None:
    target = QuickToy()
    request = make_request([1, 2, 3], max_tokens=24)
    (expected,) = decode([request], target=target).texts
    with engine_of(target, drafter) as engine:
        warm_up(engine, [1], WHOLE)
        assert finish(engine, *submit(engine, request, method=Auto)) == [expected]


def test_a_drafter_that_fails_is_dropped_as_for_any_request() -> None:
    with engine_of(QuickToy(), "failing") as engine:
        with pytest.warns(UserWarning, match="the drafter failed"):
            warm_up(engine, [1], WHOLE)
        assert engine.drafting.drafter is None
        assert engine.costs.is_timed(8, 2), "rounds are timed all the same"


def test_a_target_that_fails_is_reported_to_the_first_request() -> None:
    class Broken(QuickToy):
        def score(self, parts: Any, **options: Any) -> Any:
            raise RuntimeError("out of order")

    with engine_of(Broken()) as engine:
        warm_up(engine, [1], WHOLE)
        (run,) = submit(engine, make_request([1, 2]), method=Auto)
        finish(engine, run)
    assert str(run.error) == "out of order"


def test_too_little_memory_is_reported_to_the_first_request() -> None:
    target = Counting()
    with engine_of(target, kv_memory=1e-9) as engine:
        warm_up(engine, [1], WHOLE)
        assert not target.rows
        with pytest.raises(outpace.UserError, match=r"the budget is 0\.00"):
            submit(engine, make_request([1, 2]), method=Auto)


def test_an_llm_times_rounds_where_no_profile_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = load_model(folder(tmp_path, "target"))
    monkeypatch.setattr(profiles, "entry_path", lambda name, cache: tmp_path / name)
    monkeypatch.setattr(profiles, "FEWEST", 1)
    seen = []
    for method in ("auto", "speculative", "autoregressive", "auto"):
        with outpace.LLM(target, "layers:0", method=method) as llm:
            timed = llm.engine.costs.num_rounds
            llm.generate("hello", max_tokens=8)
            seen.append((method, timed > 0, profiles.read(profiles.subject(llm.target, llm.draft)) is not None))
    assert seen == [
        ("auto", True, False),
        ("speculative", False, True),
        ("autoregressive", False, True),
        ("auto", False, True),
    ]
