"""The fair lock serves threads in the order of their requests and is never lost by an interrupt."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
from interrupting import Interrupt, uncollected

from outpace.api.shared_engine import FairLock

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


def test_only_one_thread_holds_the_lock() -> None:
    lock, inside, seen = FairLock(), [], []

    def work() -> None:
        for _ in range(300):
            with lock.hold():
                inside.append(1)
                seen.append(len(inside))
                time.sleep(0)
                inside.pop()

    in_threads(*[work] * 4)
    assert seen == [1] * 1200


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
