"""How prompts share a pass, and that one request's fault does not affect the others."""

from __future__ import annotations

import random

import pytest
from doubles import QuickToy, make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.core.types import Row
from outpace.decoders import Autoregressive
from outpace.engine.engine import Engine, EngineOptions
from outpace.engine.prefill import PrefillCostModel, Span, Unread, prefill_time, split_prefill_budget, tokens_within
from outpace.engine.sequence import TokenSequence
from outpace.rules.greedy import Greedy

TARGET = QuickToy(16, 3, 0)


texts = st.lists(st.builds(Unread, st.integers(1, 400), st.integers(0, 20_000)), max_size=12)
slopes = st.floats(0.0, 0.02)


@settings(deadline=None)  # no test asserts a time
@given(texts, st.integers(1, 300), slopes, st.booleans())
def test_the_room_is_time_and_nobody_reads_more_than_is_left(
    unread: list[Unread], room: int, slope: float, is_awaited: bool
) -> None:
    given_ = split_prefill_budget(unread, room, slope, is_awaited)
    assert all(0 <= mine <= text.tokens for mine, text in zip(given_, unread, strict=True))
    if not unread:
        return
    least, longest = -(-room // 16), max(prefill_time(text, 1, slope) for text in unread)
    assert given_[0] >= min(unread[0].tokens, least), "the oldest goes on whatever its tokens take"
    taken = [prefill_time(text, mine, slope) for text, mine in zip(unread, given_, strict=True)]
    assert sum(taken) <= room + prefill_time(unread[0], least, slope) + longest
    if slope == 0.0 and len(unread) == 1 and not is_awaited:
        assert given_ == [min(unread[0].tokens, room)], "alone it has all of it"
    assert max(taken[1:], default=0.0) <= room - room // 2 + longest, "half at most while others are read"
    is_whole = given_[0] == unread[0].tokens
    assert is_whole or prefill_time(unread[0], given_[0] + 1, slope) > room / 3, "a third is the oldest's"


@settings(deadline=None)
@given(st.integers(0, 100_000), st.integers(0, 5_000), slopes)
def test_as_many_tokens_as_take_the_time_are_read(before: int, room: int, slope: float) -> None:
    text = Unread(10**6, before)
    count = tokens_within(text, room, slope)
    assert (
        prefill_time(text, count, slope)
        <= room * (1 + 1e-9)
        < prefill_time(text, count + 1, slope) + 1e-6 * room + 1e-9
    )


@pytest.mark.parametrize(
    ("remaining", "room", "is_awaited", "expected"),
    [
        ([1000], 256, False, [256]),
        ([1000], 256, True, [86]),
        ([1000, 20, 60], 256, False, [128, 20, 60]),
        ([1000, 500, 60], 256, False, [86, 110, 60]),
        ([10, 500, 60], 256, False, [10, 128, 60]),
        ([1000, 50, 60, 70], 256, False, [86, 50, 60, 60]),
        ([1000, 20, 60], 256, True, [86, 20, 60]),
        ([1000, 1000], 256, False, [128, 128]),
    ],
)
def test_a_third_is_the_oldest_s_and_the_rest_goes_to_the_shortest(
    remaining: list[int], room: int, is_awaited: bool, expected: list[int]
) -> None:
    assert split_prefill_budget([Unread(tokens, 0) for tokens in remaining], room, 0.0, is_awaited) == expected


def test_a_token_behind_many_counts_as_the_time_that_it_takes() -> None:
    texts = [Unread(5000, 3000), Unread(60, 0), Unread(60, 0), Unread(60, 0)]
    long, *short = split_prefill_budget(texts, 256, 0.001)
    assert 80 < prefill_time(texts[0], long, 0.001) <= 86, "a third of the time, by a twelfth of the tokens"
    assert long == 21
    assert short == [60, 60, 45]


@pytest.mark.parametrize("slope", [0.0, 0.0005, 0.004])
def test_what_a_token_before_adds_is_learnt_from_passes(slope: float) -> None:
    chance, costs = random.Random(0), PrefillCostModel()
    for _ in range(40):
        spans = [Span(chance.randint(1, 250), chance.randint(0, 4000)) for _ in range(chance.randint(1, 4))]
        rows, before = sum(span.rows for span in spans), sum(s.rows * s.before + s.rows * s.rows / 2 for s in spans)
        held_up = 40.0 if chance.random() < 0.1 else 1.0  # others took the machine
        costs.learn(spans, held_up * 1e-4 * chance.uniform(0.95, 1.05) * (30 + rows + slope * before))
    assert costs.slope == pytest.approx(slope, rel=0.2, abs=1e-4)


def test_nothing_is_learnt_of_the_clock_where_the_cuts_may_show() -> None:
    costs, other = PrefillCostModel(learns=False), PrefillCostModel()
    for _ in range(50):
        for each in (costs, other):
            each.learn([Span(256, 4000)], 1.0)
            each.learn([Span(256, 0)], 1.0)
    assert costs.slope == PrefillCostModel().slope
    assert other.slope < costs.slope / 4


def test_passes_on_a_clock_that_stands_still_say_nothing() -> None:
    costs = PrefillCostModel()
    costs.learn([Span(4, 0)], 0.0)
    assert costs.slope == PrefillCostModel().slope


def test_a_short_prompt_beside_a_long_one_waits_for_one_pass_only() -> None:
    with Engine(TARGET, options=EngineOptions(chunk=16)) as engine:
        long = submit(engine, make_request([1, 2, 3, 4] * 100, max_tokens=4))
        engine.step()
        short = submit(engine, make_request([5, 6, 7], max_tokens=4))
        engine.step()
        engine.step()
        assert short.tokens
        assert long.unread > 0


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
        broken = engine.submit(make_request([1, 2], max_tokens=8), Autoregressive, Autoregressive.Options(), watch)
        other = submit(engine, make_request([3, 4], max_tokens=8))
        finish(engine, [broken, other])
        assert (broken.finish_reason, other.finish_reason) == ("error", "length")
        assert isinstance(broken.error, KeyError)
        assert other.tokens == write(make_request([3, 4], max_tokens=8))


def submit(engine: Engine, request) -> TokenSequence:  # type: ignore[no-untyped-def]
    return engine.submit(request, Autoregressive, Autoregressive.Options())


def finish(engine: Engine, runs: list[TokenSequence]) -> None:
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
