"""Several plain rounds in one step of the engine: the texts of single rounds, and what may not be put off."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from doubles import QuickToy, make_drafter, make_request
from test_native import TINIES, tiny

from outpace.core.types import LogprobsOptions, Request
from outpace.decoders import Auto, Autoregressive, Speculative
from outpace.engine.engine import Engine, EngineOptions
from outpace.engine.sequence import TARGET, TokenSequence
from outpace.models.llama.native.runtime import NativeLlama

kernels = pytest.importorskip("outpace_kernels")
LONG = 1000.0  # seconds: as many rounds as there can be


class Clock:
    """A second passes whenever it is looked at."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1.0
        return self.seconds


@pytest.fixture(scope="module")
def model() -> NativeLlama:
    return tiny(TINIES["tiny"])


def requests(count: int, **options: Any) -> list[Request]:
    chance = random.Random(count)
    prompts = [[chance.randrange(97) for _ in range(chance.randint(2, 30))] for _ in range(count)]
    return [make_request(prompt, max_tokens=chance.randint(1, 60), **options) for prompt in prompts]


def runs_of(
    model: Any, asked: Sequence[Request], burst: float, decoder: Any = Autoregressive, drafter: Any = None, **more: Any
) -> tuple[list[TokenSequence], int]:
    """The requests' ends, and in how many steps."""
    options = EngineOptions(chunk=16, batch=4, burst=burst, **more)
    with Engine(model, drafter, options=options, clock=Clock()) as engine:
        runs = [engine.submit(request, decoder, decoder.Options()) for request in asked]
        steps = 0
        while any(run.finish_reason is None for run in runs):
            engine.step()
            steps += 1
    assert not any(run.error for run in runs)
    return runs, steps


@pytest.mark.parametrize("count", [1, 2, 3, 9])
@pytest.mark.parametrize("stops", [frozenset(), frozenset(range(40, 60))])
def test_texts_are_those_of_single_rounds(model: NativeLlama, count: int, stops: frozenset[int]) -> None:
    """With other requests in the batch, in sequence where the batch is full, and up to stop tokens."""
    asked = requests(count, stop_ids=stops)
    (single, many), (together, few) = (runs_of(model, asked, burst) for burst in (0.0, LONG))
    assert few < many or sum(len(run.tokens) for run in single) < 4 * count
    for one, other in zip(single, together, strict=True):
        assert (one.tokens, one.finish_reason) == (other.tokens, other.finish_reason)
        assert [step[:6] for step in one.history.steps] == [step[:6] for step in other.history.steps]
        assert one.history.sources == other.history.sources == [TARGET] * len(one.tokens)
        assert len(other.history.steps) == len(other.tokens)


def test_time_is_shared_among_the_rounds_and_bounds_them(model: NativeLlama) -> None:
    (asked,) = requests(1)
    (run,), few = runs_of(model, [replace(asked, max_tokens=40)], 4.0)  # a pass takes one second by this clock
    (alone,), many = runs_of(model, [replace(asked, max_tokens=40)], 0.0)
    assert many - few == pytest.approx(39 - 39 / 4, abs=2)
    assert run.tokens == alone.tokens
    steps = run.history.steps
    assert all(step.seconds > 0 and 0 < step.target_seconds <= step.seconds for step in steps)
    first, second = steps[1:5], steps[5:9]
    assert len({step.seconds for step in first}) == len({step.seconds for step in second}) == 1


@pytest.mark.parametrize(
    "options", [{"logprobs": LogprobsOptions(2)}, {"rounds": True}, {"prediction": (1, 2)}, {"temperature": 0.8}]
)
def test_single_rounds_where_more_than_tokens_are_asked_for(model: NativeLlama, options: dict[str, Any]) -> None:
    rule = {"rule": "gumbel"} if "temperature" in options else {}
    asked = make_request([5, 6, 7], max_tokens=20, **rule, **options)
    (run,), steps = runs_of(model, [asked], LONG)
    assert steps >= 20 == len(run.tokens)
    plain = requests(1)[0]
    (run, other), together = runs_of(model, [asked, replace(plain, max_tokens=20)], LONG)
    assert together >= 20
    assert (other.tokens,) == tuple(one.tokens for one in runs_of(model, [replace(plain, max_tokens=20)], 0.0)[0])


def test_who_comes_in_the_middle_is_not_kept_waiting(model: NativeLlama) -> None:
    """While one prompt is read, and until its first token, every step is one round."""
    first, second = make_request([1, 2], max_tokens=60), make_request(list(range(60)), max_tokens=9)
    with Engine(model, options=EngineOptions(chunk=16, batch=4, burst=5.0), clock=Clock()) as engine:
        runs = [engine.submit(first, Autoregressive, Autoregressive.Options())]
        for _ in range(3):
            engine.step()
        assert len(runs[0].tokens) > 3
        runs.append(engine.submit(second, Autoregressive, Autoregressive.Options()))
        while not runs[1].tokens:
            before = len(runs[0].tokens)
            engine.step()
            assert len(runs[0].tokens) - before <= 1
        while any(run.finish_reason is None for run in runs):
            engine.step()
    for run, request in zip(runs, (first, second), strict=True):
        assert run.tokens == runs_of(model, [request], 0.0)[0][0].tokens


@pytest.mark.parametrize("end", [1, 2, 3, 7])
def test_a_text_that_is_cut_within_a_burst_can_be_gone_on_with(model: NativeLlama, end: int) -> None:
    """What was written behind the cut is forgotten: another turn that begins like it is the same."""
    asked = make_request([3, 1, 4], max_tokens=40)
    whole = runs_of(model, [asked], 0.0)[0][0].tokens
    with Engine(model, options=EngineOptions(burst=LONG), clock=Clock()) as engine:
        left = [2 + end]

        def watch(tokens: Sequence[int], drafted: int) -> int | None:
            assert drafted == 0
            cut, left[0] = min(left[0], len(tokens)), left[0] - len(tokens)
            return cut if left[0] <= 0 else None

        run = engine.submit(asked, Autoregressive, Autoregressive.Options(), watch)
        while run.finish_reason is None:
            engine.step()
        assert run.tokens == whole[: 2 + end]
        assert len(run.history.steps) == 2 + end
        again = engine.submit(replace(asked, prompt=(3, 1, 4, *run.tokens)), Autoregressive, Autoregressive.Options())
        while again.finish_reason is None:
            engine.step()
    assert again.tokens[: len(whole) - 2 - end] == whole[2 + end :]


def test_a_row_without_a_pick_ends_the_burst_before_it(model: NativeLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is written as far as it would be by single rounds, and then the request fails as it would there."""
    asked = make_request([3, 1, 4], max_tokens=40)
    whole = runs_of(model, [asked], 0.0)[0][0].tokens
    score_held = model.score_held

    def spoilt(forest: Any) -> Any:
        held = score_held(forest)
        if forest[0].session.length + forest[0].session.pending > 12:
            np.asarray(held.values)[:] = np.nan
            return held._replace(best=[([], [])] * len(held.best))
        return held

    monkeypatch.setattr(model, "score_held", spoilt)
    monkeypatch.setattr(asked.rule, "reduce", _refuses, raising=False)
    for burst in (0.0, LONG):
        with Engine(model, options=EngineOptions(burst=burst), clock=Clock()) as engine:
            run = engine.submit(asked, Autoregressive, Autoregressive.Options())
            while run.finish_reason is None:
                engine.step()
        assert (run.finish_reason, str(run.error)) == ("error", "no order among these scores")
        assert run.tokens == whole[:10]


def _refuses(logits: Any, rows: Sequence[Any]) -> list[int]:
    raise ValueError("no order among these scores")


@pytest.mark.parametrize("decoder", [Auto, Speculative])
def test_the_planner_writes_the_same(model: NativeLlama, decoder: Any) -> None:
    """Rounds without drafts may follow one another; with drafts between them the text is the same."""
    asked = requests(3)
    expected = [run.tokens for run in runs_of(model, asked, 0.0)[0]]
    for burst in (0.0, LONG):
        runs, _ = runs_of(model, asked, burst, decoder, make_drafter("ngram", QuickToy(97)))
        assert [run.tokens for run in runs] == expected


def test_a_model_that_does_not_tell_best_tokens_goes_on_by_single_rounds() -> None:
    toy, asked = QuickToy(), make_request([1, 2, 3], max_tokens=20)
    (run,), steps = runs_of(toy, [asked], LONG)
    assert steps >= len(run.tokens) == 20
