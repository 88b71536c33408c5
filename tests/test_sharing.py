"""How a pass is shared by prompts, and that one request's fault is nobody else's."""

from __future__ import annotations

import pytest
from doubles import QuickToy, make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.core.types import Row
from outpace.decoders import autoregressive
from outpace.engine.engine import Engine, EngineOptions
from outpace.engine.request import Running
from outpace.engine.sharing import share_prompt_room
from outpace.rules.greedy import Greedy

TARGET = QuickToy(16, 3, 0)


@settings(deadline=None)  # no test asserts a time
@given(st.lists(st.integers(1, 400), max_size=12), st.integers(1, 300))
def test_all_room_is_used_and_nobody_reads_more_than_is_left(remaining: list[int], room: int) -> None:
    given_ = share_prompt_room(remaining, room)
    assert sum(given_) == min(sum(remaining), room)
    assert all(0 <= mine <= left for mine, left in zip(given_, remaining, strict=True))
    if remaining:
        assert given_[0] >= min(remaining[0], room - room // 2), "the oldest has half of the room at least"


@pytest.mark.parametrize(
    ("remaining", "room", "expected"),
    [
        ([1000], 256, [256]),
        ([1000, 20, 60], 256, [176, 20, 60]),
        ([1000, 500, 60], 256, [128, 68, 60]),
        ([10, 500, 60], 256, [10, 186, 60]),
    ],
)
def test_half_goes_to_the_oldest_and_the_rest_to_the_shortest(
    remaining: list[int], room: int, expected: list[int]
) -> None:
    assert share_prompt_room(remaining, room) == expected


def test_a_short_prompt_beside_a_long_one_waits_for_one_pass_only() -> None:
    with Engine(TARGET, options=EngineOptions(chunk=16)) as engine:
        long = submit(engine, make_request([1, 2, 3, 4] * 100, max_tokens=4))
        engine.step()
        short = submit(engine, make_request([5, 6, 7], max_tokens=4))
        engine.step()
        engine.step()
        assert short.tokens
        assert long.is_prefilling


class Faulty(Greedy):
    """Raises for one request's rows once that has written two tokens."""

    def reduce(self, logits, rows: list[Row]):  # type: ignore[no-untyped-def]
        if any(row.request.seed == 13 and len(row.committed) > 6 for row in rows):
            raise ZeroDivisionError("a rule's own mistake")
        return super().reduce(logits, rows)


def test_a_rule_that_raises_ends_its_own_request_alone() -> None:
    rule = Faulty()
    prompts = [[1, 2, 3, 4, start] for start in range(4)]
    alone = [write(make_request(prompt, rule, 12)) for prompt in prompts]
    with Engine(TARGET, options=EngineOptions(reuse=True)) as engine:
        runs = [
            submit(engine, make_request(prompt, rule, 12, seed=13 if number == 2 else 0))
            for number, prompt in enumerate(prompts)
        ]
        finish(engine, runs)
        assert [run.finish_reason for run in runs] == ["length", "length", "error", "length"]
        assert isinstance(runs[2].error, ZeroDivisionError)
        assert runs[2].tokens == alone[2][:2]
        assert [run.tokens for run in runs[:2]] == alone[:2]
        assert write(make_request(prompts[2], rule, 12)) == alone[2], "nothing of it is left behind"


def test_who_watches_and_raises_ends_one_request_alone() -> None:
    def watch(tokens, drafted):  # type: ignore[no-untyped-def]
        raise KeyError("a caller's own mistake")

    with Engine(TARGET) as engine:
        broken = engine.submit(make_request([1, 2], max_tokens=8), autoregressive, autoregressive.Options(), watch)
        other = submit(engine, make_request([3, 4], max_tokens=8))
        finish(engine, [broken, other])
        assert (broken.finish_reason, other.finish_reason) == ("error", "length")
        assert isinstance(broken.error, KeyError)
        assert other.tokens == write(make_request([3, 4], max_tokens=8))


def submit(engine: Engine, request) -> Running:  # type: ignore[no-untyped-def]
    return engine.submit(request, autoregressive, autoregressive.Options())


def finish(engine: Engine, runs: list[Running]) -> None:
    for _ in range(200):
        if all(run.finish_reason is not None for run in runs):
            return
        engine.step()
    raise AssertionError("requests do not end")


def write(request) -> list[int]:  # type: ignore[no-untyped-def]
    with Engine(TARGET) as engine:
        run = submit(engine, request)
        finish(engine, [run])
        return run.tokens
