"""Admission control: bounds of the queue, the estimate of its speed, and the selector that batches refusals."""

from __future__ import annotations

import asyncio
import selectors
import socket
import threading
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from timed import Stopwatch

from outpace.server import admission, run
from outpace.server.admission import MAX_RETRY_AFTER, Admission, QueueEstimator
from outpace.server.choices import Choice, ChoiceGroup
from outpace.server.errors import ApiError
from outpace.server.options import ServerLimits
from outpace.server.run import BatchingSelector


def group(max_tokens: int = 1000) -> Any:
    """A request of three tokens that waits until its `began` is set."""
    request = SimpleNamespace(prompt=[1, 2, 3], max_tokens=max_tokens)
    choice: Any = Choice(cast(Any, SimpleNamespace(request=request)), [0])
    choice.run = SimpleNamespace(history=SimpleNamespace(began=0.0), tokens=[])
    return ChoiceGroup([choice], [[1, 2, 3]], "")


def begin(group: Any, when: float) -> None:
    group.choices[0].run.history.began = when


def write(target: Any, clock: Stopwatch, seconds: int, tokens: int, *more: Any) -> None:
    """Record `tokens` a second for a number of seconds."""
    for _ in range(seconds):
        clock.now += 1.0
        target.record(tokens, *more)


@pytest.fixture
def clock() -> Stopwatch:
    return Stopwatch()


@pytest.fixture
def estimator(clock: Stopwatch) -> QueueEstimator:
    """An estimator with waiting requests."""
    found = QueueEstimator(clock)
    assert found.seconds(1.0) is None
    found.record(0, True)
    return found


def test_the_estimate_uses_the_last_seconds(clock: Stopwatch, estimator: QueueEstimator) -> None:
    write(estimator, clock, 60, 10_000, True)
    assert estimator.seconds(10_000) == pytest.approx(1.0)
    write(estimator, clock, round(admission.WINDOW) + 1, 50, True)
    assert estimator.seconds(100) == pytest.approx(2.0)


def test_time_without_waiting_requests_does_not_count(clock: Stopwatch, estimator: QueueEstimator) -> None:
    write(estimator, clock, 5, 200, True)
    write(estimator, clock, 1, 1, False)  # the last waiting request was started
    write(estimator, clock, 5, 1, False)
    clock.now += 5.0
    estimator.record(1, True)
    write(estimator, clock, 5, 200, True)
    estimator.record(0, False)
    clock.now += 5.0
    assert estimator.seconds(200) == pytest.approx(1.0)


def test_the_estimate_needs_recent_measurements(clock: Stopwatch, estimator: QueueEstimator) -> None:
    write(estimator, clock, 2, 10, True)
    assert estimator.seconds(1.0) is None  # fewer tokens than one answer in so short a time
    write(estimator, clock, 1, 200, True)
    assert estimator.seconds(1.0) is not None
    estimator.record(0, False)
    clock.now += 2 * admission.WINDOW
    assert estimator.seconds(1.0) is None


def crowded(limits: ServerLimits, tokens: int, waiting: int) -> tuple[Admission, Stopwatch]:
    """One answer is written at `tokens` a second while other requests wait."""
    clock = Stopwatch()
    queue = Admission(limits, batch=1, clock=clock)
    groups = [group() for _ in range(waiting + 1)]
    for one in groups:
        queue.admit(one)
    begin(groups[0], 1.0)
    queue.record(0)
    write(queue, clock, 16, tokens)
    return queue, clock


def test_a_request_that_cannot_start_in_time_is_refused_at_once() -> None:
    """Five answers of 128 tokens and the end of a sixth, at 10 tokens a second and with a margin: 96 seconds."""
    queue, _ = crowded(ServerLimits(queue_timeout=97.0), 10, 5)
    queue.check()
    queue, _ = crowded(ServerLimits(queue_timeout=95.0), 10, 5)
    with pytest.raises(ApiError, match="5 answers are waiting, which may take 96 seconds, and 95 are allowed") as no:
        queue.check()
    assert (no.value.status, no.value.code) == (429, "queue_slow")
    assert no.value.retry_after == pytest.approx(1.0 + 12.8)  # the excess, and one answer
    assert "retry-after" in no.value.headers


def test_max_tokens_bounds_the_expected_length(clock: Stopwatch) -> None:
    queue, groups = Admission(ServerLimits(), batch=1, clock=clock), [group(10) for _ in range(31)]
    for one in groups:
        queue.admit(one)
    begin(groups[0], 1.0)
    queue.record(0)
    write(queue, clock, 16, 10)
    queue.check()  # 30 of them and the end of the running one: 53.5 seconds
    queue.admit(group(60))
    with pytest.raises(ApiError, match="may take 61 seconds"):
        queue.check()


def test_free_slots_are_filled_at_once() -> None:
    """However slow a crowded queue was."""
    queue, clock = crowded(ServerLimits(), 2, 1)
    for one in list(queue.groups):
        queue.remove(one)
    queue.check()
    wide = Admission(ServerLimits(), batch=8, clock=clock)
    wide._estimator = queue._estimator
    for _ in range(8):
        wide.check()
        wide.admit(group())
    with pytest.raises(ApiError, match="queue is slow"):
        wide.check()


def test_a_started_request_has_no_queue_timeout() -> None:
    """One started choice is enough: the others follow."""
    queue, choices = Admission(ServerLimits(), batch=1), [group().choices[0] for _ in range(3)]
    one = ChoiceGroup(choices, [[1, 2, 3]], "")
    assert queue.timeout_error(one).code == "queue_timeout"  # type: ignore[union-attr]
    begin(one, 1.0)
    assert queue.timeout_error(one) is None


def test_later_refusals_have_later_retries() -> None:
    queue = Admission(ServerLimits(), batch=1)
    waits = [queue.retry_after() for _ in range(40)]
    assert all(later > earlier for earlier, later in pairwise(waits[:9]))
    assert waits[0] == pytest.approx(1.0, abs=0.1)  # without measurements
    assert waits[8] == pytest.approx(9.0, abs=0.1)
    assert max(waits) <= MAX_RETRY_AFTER


def test_reservations_count() -> None:
    queue = Admission(ServerLimits(max_queue=1), batch=1)
    reservations = [queue.reserve(), queue.reserve()]
    with pytest.raises(ApiError, match="the queue is full: 2 answers are waiting") as refused:
        queue.reserve()
    assert refused.value.status == 429
    for reservation in reservations:
        reservation.release()
        reservation.release()  # without effect
    assert queue.num_reserved == 0
    queue.reserve()


SocketPair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pairs() -> Iterator[tuple[SocketPair, SocketPair]]:
    """The waker of a loop, and a connection."""
    waker, connection = socket.socketpair(), socket.socketpair()
    yield waker, connection
    for one in (*waker, *connection):
        one.close()


def selector_of(pairs: tuple[SocketPair, SocketPair]) -> BatchingSelector:
    selector = BatchingSelector()
    for number, (reader, _) in enumerate(pairs):
        selector.register(reader, selectors.EVENT_READ, number)
    return selector


def selected(selector: BatchingSelector, timeout: float | None) -> list[int]:
    return sorted(key.data for key, _ in selector.select(timeout))


@pytest.mark.parametrize(
    ("is_full", "timeout", "waits"),
    [(True, None, True), (True, 0.001, True), (True, 300.0, True), (False, None, False), (True, 0, False)],
)
def test_batching_ends_without_the_waker_and_needs_a_full_queue(
    pairs: tuple[SocketPair, SocketPair], monkeypatch: pytest.MonkeyPatch, is_full: bool, timeout: Any, waits: bool
) -> None:
    if not waits:
        monkeypatch.setattr(run.select, "select", None)
    with selector_of(pairs) as selector:
        selector.is_full = lambda: is_full  # type: ignore[method-assign]
        pairs[1][1].send(b"x")
        assert selected(selector, timeout) == [1]


def test_other_threads_wake_a_batching_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first file object that a loop registers is indeed its waker."""
    monkeypatch.setattr(run, "BATCHING_SECONDS", 300.0)

    async def main(selector: BatchingSelector) -> None:
        loop, (reader, writer) = asyncio.get_running_loop(), socket.socketpair()
        waiting, received, woken = threading.Event(), asyncio.Event(), asyncio.Event()
        selector.is_full = lambda: bool(waiting.set()) or True  # type: ignore[method-assign]
        loop.add_reader(reader, lambda: (reader.recv(1), received.set()))
        threading.Thread(target=lambda: (waiting.wait(), loop.call_soon_threadsafe(woken.set))).start()
        threading.Thread(target=writer.send, args=(b"x",)).start()
        await woken.wait()
        await received.wait()
        loop.remove_reader(reader)
        reader.close()
        writer.close()

    run.run_loop(main)
