"""Interrupts at chosen moments, and the fair lock: wherever an interrupt comes, no lock is lost and no thread hangs."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import pytest
from doubles import Candidate, Empty, QuickToy, level_of, make_drafter, make_request, within

from outpace.api.shared_engine import FairLock
from outpace.card.cache import CandidateCache, Correction
from outpace.card.thread import ThreadWorker
from outpace.core.tree import Role
from outpace.core.types import Verdict

ANY_EVENT = ("call", "return", "c_call", "c_return", "c_exception")
TAKEN_EVENTS = ("call", "c_return")  # where a handler of signals may run; the others lie between two such places


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection in the block: an interrupt during the finalization of another test's object would be
    reported for that test."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Interrupt:
    """Raises KeyboardInterrupt at the `first`th start or end of a call, where the interpreter handles signals, and
    another one `then` lines later (0: none). `events` are the counted events of `sys.setprofile`."""

    def __init__(self, first: int, then: int = 0, events: Sequence[str] = ANY_EVENT) -> None:
        self._calls, self._lines, self._events, self.came = first, then, events, False

    def run(self, work: Callable[[], None]) -> None:
        with uncollected():
            sys.settrace(self._trace)
            sys.setprofile(self._profile)
            try:
                work()
            finally:
                sys.setprofile(None)
                sys.settrace(None)

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        self._calls -= event in self._events and frame.f_code is not Interrupt.run.__code__
        if self._calls < 0:
            self.came = True
            raise KeyboardInterrupt

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self.came and event == "line":
            self._lines -= 1
            if not self._lines:
                raise KeyboardInterrupt
        return self._trace


SECONDS = 120.0  # a longer wait counts as a hang


def wait_for_queue(lock: FairLock, count: int) -> None:
    deadline = time.monotonic() + SECONDS
    while len(lock) < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def join(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), "the lock was lost: a thread waits forever"


def in_threads(*works: Callable[[], None]) -> None:
    """Run each function to its end in a thread of its own, concurrently."""
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    join(*threads)


def enqueue(lock: FairLock, note: Callable[[int], None], count: int) -> list[threading.Thread]:
    """Start threads whose `note` waits for the held lock, one after the other."""
    threads = [threading.Thread(target=note, args=(number,)) for number in range(count)]
    for number, thread in enumerate(threads):
        thread.start()
        wait_for_queue(lock, number + 2)
    return threads


def take(lock: FairLock) -> None:
    with lock.hold():
        pass


def is_free(lock: FairLock) -> bool:
    with lock.try_hold() as is_mine:
        return is_mine


def test_threads_get_the_lock_in_the_order_of_their_requests() -> None:
    lock, order = FairLock(), list[int]()

    def note(number: int) -> None:
        with lock.hold():
            order.append(number)

    with lock.hold():
        threads = enqueue(lock, note, 8)
        assert order == []
        assert not is_free(lock)
    join(*threads)
    assert order == list(range(8))
    assert is_free(lock)


def test_an_error_in_the_block_releases_the_lock() -> None:
    lock = FairLock()
    for _ in range(3):
        with pytest.raises(ArithmeticError), lock.hold():
            raise ArithmeticError
        with pytest.raises(ArithmeticError), lock.try_hold():
            raise ArithmeticError
    assert is_free(lock)


def test_the_holder_cannot_wait_for_the_lock() -> None:
    lock = FairLock()
    with lock.hold():
        with pytest.raises(RuntimeError, match="this thread holds the lock already"):
            take(lock)
        assert not is_free(lock)
        assert len(lock) == 1
    assert is_free(lock)


@pytest.mark.parametrize("interrupted", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)])
def test_an_interrupted_waiter_leaves_the_queue(interrupted: Sequence[int]) -> None:
    lock, order = FairLock(), list[int]()

    def note(number: int) -> None:
        with suppress(KeyboardInterrupt), lock.hold():
            order.append(number)

    with uncollected(), lock.hold():
        threads = enqueue(lock, note, 4)
        for number in interrupted:
            ident = ctypes.c_ulong(threads[number].ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(KeyboardInterrupt))
            join(threads[number])
    join(*threads)
    assert order == [number for number in range(4) if number not in interrupted]
    assert is_free(lock)


def interrupted(work: Callable[[FairLock], Any], first: int, then: int, is_contended: bool) -> bool:
    """Return whether an interrupt came while `work` took the lock; check that later threads get it in any case."""
    lock, began, interrupt = FairLock(), threading.Event(), Interrupt(first, then)

    def other() -> None:
        with lock.hold():
            began.set()
            time.sleep(0.002)  # releases the lock while `work` waits

    holder = threading.Thread(target=other)
    if is_contended:
        holder.start()
        began.wait(SECONDS)
    try:
        interrupt.run(lambda: work(lock))
    except KeyboardInterrupt:  # its traceback keeps the interrupted frames alive
        in_threads(lambda: take(lock))
        take(lock)
    if is_contended:
        holder.join(SECONDS)
    in_threads(lambda: take(lock))
    assert is_free(lock)
    return interrupt.came


@pytest.mark.parametrize("then", range(5))
@pytest.mark.parametrize("work", [take, is_free])
@pytest.mark.parametrize("is_contended", [False, True])
def test_an_interrupt_anywhere_does_not_lose_the_lock(
    work: Callable[[FairLock], Any], is_contended: bool, then: int
) -> None:
    """This holds while the traceback is alive, and if a second interrupt comes while the first is handled."""
    first = 0
    while interrupted(work, first, then, is_contended):
        first += 1
    assert first > 10, "too few places were interrupted"


def test_a_thread_that_ended_with_the_lock_does_not_block_others() -> None:
    lock = FairLock()

    def leave_behind() -> None:
        lock.hold().__enter__()  # as after an interrupt that nothing could catch

    in_threads(leave_behind)
    assert len(lock) == 1
    with suppress(RuntimeError):
        in_threads(lambda: take(lock))
    assert is_free(lock)


REQUEST = make_request([1, 2, 3], "greedy", 8)


def everywhere(work: Callable[[Interrupt], None]) -> int:
    """Run `work` repeatedly, interrupted one place later each time, until it completes; return the number of places."""
    first = 0
    while True:
        interrupt = Interrupt(first, events=TAKEN_EVENTS)
        work(interrupt)
        if not interrupt.came:
            return first
        first += 1


def query(cache: CandidateCache) -> None:
    cache.query(4)


def late(cache: CandidateCache) -> None:
    cache.add_late_children(cache.query(1))


def correct(cache: CandidateCache) -> None:
    tree = cache.query(4)
    cache.correct(tree, Verdict([0], 5), len(tree))


def wait(cache: CandidateCache) -> None:
    cache.wait(2, 0.001)


@pytest.mark.parametrize("call", [query, late, correct, wait])
def test_an_interrupted_target_leaves_the_candidates_open(call: Callable[[CandidateCache], None]) -> None:
    def once(interrupt: Interrupt) -> None:
        cache = CandidateCache(3)
        cache.insert(level_of(0, [Candidate(1, 0, 5, -0.1, Role.PRIMARY), Candidate(2, 1, 6, -0.1, Role.PRIMARY)]))
        try:
            interrupt.run(lambda: call(cache))
        except KeyboardInterrupt:
            within(SECONDS, lambda: cache.insert(level_of(cache.query(1).ids[0], [])))

    assert everywhere(once) > 3


@pytest.mark.parametrize("drafter", ["empty", "model"])
def test_an_interrupted_target_leaves_a_worker_that_can_be_closed(drafter: str) -> None:
    def once(interrupt: Interrupt) -> None:
        worker = ThreadWorker(Empty() if drafter == "empty" else make_drafter("model", QuickToy(16, 3, 0))).start()

        def use() -> None:
            cache = CandidateCache(3)
            worker.open(0, REQUEST, cache)
            worker.wait(cache, 1)
            worker.correct(0, Correction([5], 1, -1))
            worker.forget(0)
            worker.stop()

        try:
            interrupt.run(use)
        except KeyboardInterrupt:
            pass
        finally:
            within(SECONDS, worker.close)

    assert everywhere(once) > 10
