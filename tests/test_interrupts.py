"""Interrupts in a program that uses the library: wherever they come, no thread waits forever."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress

import pytest
from doubles import Empty, QuickToy, make_drafter, make_request, within
from interrupting import TAKEN_EVENTS, Interrupt

from outpace.card.cache import Candidate, CandidateCache, CandidateLayer, Correction
from outpace.card.thread import ThreadWorker
from outpace.core.tree import Role
from outpace.core.types import Verdict

SECONDS = 60.0
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


def test_no_garbage_is_collected_where_interrupts_come() -> None:
    seen: list[bool] = []
    Interrupt(1 << 30).run(lambda: seen.append(gc.isenabled()))
    with suppress(KeyboardInterrupt):
        Interrupt(0).run(lambda: seen.append(gc.isenabled()))
    assert seen == [False]
    assert gc.isenabled()


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
        cache.insert(
            CandidateLayer(0, [Candidate(1, 0, 5, -0.1, Role.PRIMARY), Candidate(2, 1, 6, -0.1, Role.PRIMARY)])
        )
        try:
            interrupt.run(lambda: call(cache))
        except KeyboardInterrupt:
            within(SECONDS, lambda: cache.insert(CandidateLayer(cache.query(1).ids[0], [])))

    assert everywhere(once) > 3


@pytest.mark.parametrize("drafter", ["empty", "model"])
def test_an_interrupted_target_leaves_a_worker_that_can_be_closed(drafter: str) -> None:
    def once(interrupt: Interrupt) -> None:
        worker = ThreadWorker(Empty() if drafter == "empty" else make_drafter("model", QuickToy(16, 3, 0)))

        def use() -> None:
            cache = CandidateCache(3)
            worker.open(0, REQUEST, cache)
            worker.wait(cache, 1)
            worker.correct(0, Correction([0], [5], -1, False))
            worker.forget(0)
            worker.stop()

        try:
            interrupt.run(use)
        except KeyboardInterrupt:
            pass
        finally:
            within(SECONDS, worker.close)

    assert everywhere(once) > 10
