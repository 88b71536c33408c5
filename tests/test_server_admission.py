"""Who may wait: what stands in the queue is counted once in a moment, and how fast it moves is what was written lately
while somebody waited."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from outpace.server import admission, pace
from outpace.server.admission import LONGEST, Admission
from outpace.server.choices import Choice, Group
from outpace.server.errors import ApiError
from outpace.server.options import Limits
from outpace.server.pace import Pace


def group(max_tokens: int = 1000) -> Any:
    """A request of three tokens that waits until its `began` is set."""
    request = SimpleNamespace(prompt=[1, 2, 3], max_tokens=max_tokens)
    choice: Any = Choice(cast(Any, SimpleNamespace(request=request)), [0])
    choice.run = SimpleNamespace(history=SimpleNamespace(began=0.0), tokens=[])
    return Group([choice], [[1, 2, 3]], "")


def begin(group: Any, when: float) -> None:
    group.choices[0].run.history.began = when


def test_room_is_seen_a_moment_later_though_the_engine_told_nothing() -> None:
    """It takes up an answer before it writes any of it."""
    now = 100.0
    queue, first, second = Admission(Limits(max_queue=1), batch=1, clock=lambda: now), group(), group()
    queue.admit(first)
    queue.admit(second)
    assert queue.is_full
    begin(first, now)
    now += 2 * admission.MOMENT
    assert queue.is_full  # one runs, one waits
    begin(second, now)
    assert queue.is_full  # as it was a moment ago
    now += 2 * admission.MOMENT
    assert not queue.is_full
    begin(second, 0.0)
    queue.wrote(1)  # the engine told something: it is looked at anew
    assert queue.is_full


class Clock:
    """A stated time."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def write(target: Any, clock: Clock, seconds: int, tokens: int, *more: Any) -> None:
    """So many a second, for so many seconds."""
    for _ in range(seconds):
        clock.now += 1.0
        target.wrote(tokens, *more)


def test_the_pace_is_that_of_the_last_seconds() -> None:
    clock = Clock()
    found = Pace(clock)
    found.wrote(0, True)
    write(found, clock, 60, 10_000, True)
    assert found.seconds(10_000) == pytest.approx(1.0)
    write(found, clock, round(pace.WINDOW) + 1, 50, True)
    assert found.seconds(100) == pytest.approx(2.0)


def test_time_in_which_nobody_waits_does_not_count() -> None:
    """Neither an idle server nor one with few requests shows how fast a queue moves."""
    clock = Clock()
    found = Pace(clock)
    found.wrote(0, True)
    write(found, clock, 5, 200, True)
    write(found, clock, 1, 1, False)  # the last of those who waited was taken up
    write(found, clock, 5, 1, False)
    clock.now += 5.0
    found.wrote(1, True)
    write(found, clock, 5, 200, True)
    found.rest()
    clock.now += 5.0
    assert found.seconds(200) == pytest.approx(1.0)


def test_a_pace_is_unknown_before_it_is_measured_and_once_that_is_long_ago() -> None:
    clock = Clock()
    found = Pace(clock)
    assert found.seconds(1.0) is None
    found.wrote(0, True)
    write(found, clock, 2, 10, True)
    assert found.seconds(1.0) is None  # less than an answer's worth of tokens in so short a time
    write(found, clock, 1, 200, True)
    assert found.seconds(1.0) is not None
    found.rest()
    clock.now += 2 * pace.WINDOW
    assert found.seconds(1.0) is None


def test_a_step_that_does_not_end_slows_the_pace() -> None:
    clock = Clock()
    found = Pace(clock)
    found.wrote(0, True)
    write(found, clock, 4, 200, True)
    clock.now += 4.0
    assert found.seconds(100) == pytest.approx(1.0)


def crowded(limits: Limits, tokens: int, waiting: int) -> tuple[Admission, Clock]:
    """One answer is written at so many tokens a second, so many requests wait behind it."""
    clock = Clock()
    queue = Admission(limits, batch=1, clock=clock)
    groups = [group() for _ in range(waiting + 1)]
    for one in groups:
        queue.admit(one)
    begin(groups[0], clock.now)
    queue.wrote(0)
    write(queue, clock, 16, tokens)
    return queue, clock


def test_who_cannot_begin_in_time_is_refused_at_once() -> None:
    """Behind five answers of 128 tokens and the end of a sixth, at 10 tokens a second, which varies: 96 seconds."""
    queue, _ = crowded(Limits(queue_timeout=97.0), 10, 5)
    queue.check()
    queue, _ = crowded(Limits(queue_timeout=95.0), 10, 5)
    with pytest.raises(ApiError, match="5 answers wait for room, which may take 96 seconds, and 95 are allowed") as no:
        queue.check()
    assert (no.value.status, no.value.code) == (429, "queue_slow")
    assert no.value.retry_after == pytest.approx(1.0 + 12.8)  # what is too much, and an answer
    assert "retry-after" in no.value.headers


def test_answers_that_may_be_short_are_expected_to_be() -> None:
    clock = Clock()
    queue, groups = Admission(Limits(), batch=1, clock=clock), [group(10) for _ in range(31)]
    for one in groups:
        queue.admit(one)
    begin(groups[0], clock.now)
    queue.wrote(0)
    write(queue, clock, 16, 10)
    queue.check()  # 30 of them and the end of one that is written: 53.5 seconds
    queue.admit(group(60))
    with pytest.raises(ApiError, match="may take 61 seconds"):
        queue.check()


def test_what_the_engine_takes_up_at_once_is_not_waited_for() -> None:
    """Slow as it was when it was crowded, it has room now."""
    queue, clock = crowded(Limits(), 2, 1)
    for one in list(queue.groups):
        queue.leave(one)
    queue.check()
    wide = Admission(Limits(), batch=8, clock=clock)
    wide._pace = queue._pace
    for _ in range(8):  # as many as there are places
        wide.check()
        wide.admit(group())
    with pytest.raises(ApiError, match="queue is slow"):
        wide.check()


def test_being_asked_whether_there_is_room_promises_nothing() -> None:
    queue, _ = crowded(Limits(max_queue=1), 10, 1)
    before = queue._promised
    assert queue.is_full
    assert queue._promised == before


def test_who_began_has_not_waited_too_long() -> None:
    """One choice of a request is begun with: its others will be."""
    queue, choices = Admission(Limits(), batch=1), [group().choices[0] for _ in range(3)]
    one = Group(choices, [[1, 2, 3]], "")
    assert queue.waited(one).code == "queue_timeout"  # type: ignore[union-attr]
    begin(one, 1.0)
    assert queue.waited(one) is None


def test_who_is_refused_later_is_told_to_come_back_later() -> None:
    admission = Admission(Limits(), batch=1)
    waits = [admission.wait() for _ in range(40)]
    assert all(later > earlier for earlier, later in pairwise(waits[:9]))
    assert waits[0] == pytest.approx(1.0, abs=0.1)  # nothing was measured yet
    assert waits[8] == pytest.approx(9.0, abs=0.1)
    assert max(waits) <= LONGEST


def test_what_is_being_tokenised_has_a_place_in_the_queue() -> None:
    admission = Admission(Limits(max_queue=1), batch=1)
    places = [admission.place(), admission.place()]
    with pytest.raises(ApiError, match="the queue is full: 2 answers wait for room") as refused:
        admission.place()
    assert refused.value.status == 429
    for place in places:
        place.leave()
        place.leave()  # which counts once
    assert admission.preparing == 0
    admission.place()
