"""Turns: given in the order of asking, passed on by whoever stops waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from outpace.api.fair_lock import Turns

SECONDS = 120.0  # after which something hangs


def wait_for_ticket(turns: Turns, count: int) -> None:
    deadline = time.monotonic() + SECONDS
    while turns._asked < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_turns_are_given_in_the_order_of_asking() -> None:
    turns, order, threads = Turns(), [], []

    def take(number: int) -> None:
        with turns.turn():
            order.append(number)

    with turns.turn():
        for number in range(8):
            threads.append(threading.Thread(target=take, args=(number,)))
            threads[-1].start()
            wait_for_ticket(turns, number + 2)
        assert order == []
        with turns.try_turn() as is_mine:
            assert not is_mine
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    assert order == list(range(8))
    with turns.try_turn() as is_mine:
        assert is_mine


def test_nobody_waits_while_another_takes_turn_after_turn() -> None:
    turns, stop, taken, seen = Turns(), threading.Event(), [], []

    def greedy() -> None:
        while not stop.is_set():
            with turns.turn():
                taken.append(len(taken))

    def once() -> None:
        with turns.turn():
            seen.append(len(taken))

    thread = threading.Thread(target=greedy)
    thread.start()
    try:
        for _ in range(20):
            with turns.turn():
                before, waiter = len(taken), threading.Thread(target=once)
                waiter.start()
                while turns._asked - turns._serving < 3:  # until both wait for this turn's end
                    time.sleep(0.0005)
            waiter.join(SECONDS)
            assert seen.pop() - before <= 1
    finally:
        stop.set()
        thread.join(SECONDS)


@pytest.mark.parametrize("interrupted", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)])
def test_an_interrupted_waiter_passes_its_turn_on(interrupted: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    turns, order, threads = Turns(), [], []
    waiting, wait = {}, turns._changed.wait

    def interruptible(timeout: float | None = None) -> bool:
        result = wait(timeout)
        if waiting.get(threading.current_thread()):
            waiting.pop(threading.current_thread())
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(turns._changed, "wait", interruptible)

    def take(number: int) -> None:
        try:
            with turns.turn():
                order.append(number)
        except KeyboardInterrupt:
            order.append(-number - 1)

    with turns.turn():
        for number in range(4):
            threads.append(threading.Thread(target=take, args=(number,)))
            threads[-1].start()
            wait_for_ticket(turns, number + 2)
        for number in interrupted:
            waiting[threads[number]] = True
        with turns._changed:
            turns._changed.notify_all()  # they wake, and are interrupted
        for number in interrupted:
            threads[number].join(SECONDS)
            assert not threads[number].is_alive()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), "a turn was lost: somebody waits for ever"
    assert [number for number in order if number >= 0] == [n for n in range(4) if n not in interrupted]
    with turns.try_turn() as is_mine:
        assert is_mine


def test_a_turn_that_ends_in_an_error_is_passed_on() -> None:
    turns = Turns()
    for _ in range(3):
        with pytest.raises(ArithmeticError), turns.turn():
            raise ArithmeticError
        with pytest.raises(ArithmeticError), turns.try_turn():
            raise ArithmeticError
    with turns.try_turn() as is_mine:
        assert is_mine
