"""Waits for the drafter: many random interleavings of a target that waits, and drafters that die in one of them."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from doubles import (
    DrafterDiedError,
    QuickToy,
    collect_warnings,
    decode,
    failing,
    make_drafter,
    make_request,
    within,
    write,
)
from processes import REQUESTS, SECONDS, TEXTS, build_light, nothing_left, until
from test_card_fuzz import OPTIONS, TARGETS, random_clock, random_drafter, random_requests
from turns import case

from outpace.card.cache import CandidateCache, Correction
from outpace.card.inline import InlineWorker, SimulatedClock
from outpace.card.process import ProcessWorker
from outpace.card.thread import ThreadWorker
from outpace.core.drafting import DraftDirectives
from outpace.engine.engine import EngineOptions
from outpace.models.base import Part

MET = ("after a hit", "after a miss", "a further layer", "in vain", "died", "gave up", "rests", "a few layers")


class Watched(InlineWorker):
    """Counts what the target's waits meet, and the directives that it sends."""

    def __init__(self, drafter: Any, clock: SimulatedClock, met: Counter[str]) -> None:
        super().__init__(drafter, clock)
        self.met = met

    def wait(self, cache: CandidateCache, layers: int, depth: int = 0) -> None:
        alive = self.failure is None
        self.met["after a miss" if cache.missed else "after a hit"] += 1
        self.met["a further layer"] += layers > 1
        super().wait(cache, layers, depth)
        self.met["died"] += alive and self.failure is not None
        self.met["gave up"] += cache.is_given_up
        self.met["in vain"] += not cache.has_grown(layers, depth)

    def set_directives(self, key: int, directives: DraftDirectives) -> None:
        self.met["rests"] += directives.layers == 0
        self.met["a few layers"] += bool(directives.layers)
        super().set_directives(key, directives)


def run_once(seed: int, met: Counter[str]) -> None:
    """One random interleaving of planned: the text is plain decoding's."""
    chance = random.Random(f"waits {seed}")
    target = chance.choice(TARGETS)
    requests = random_requests(chance, target)
    drafter, _ = random_drafter(chance, target, Counter())
    if chance.random() < 0.2:
        drafter = failing(drafter, "grow", chance.randrange(8))
    nodes, rows, chunk, batch = (chance.randint(*span) for span in ((2, 10), (4, 24), (1, 6), (1, 3)))
    worker = Watched(drafter, random_clock(chance), met)
    worker.clock.shared = chance.random() < 0.3
    options = OPTIONS["planned"](chance) | {"hits": chance.random() < 0.9, "turns": chance.random() < 0.8}
    engine = EngineOptions(nodes=nodes, rows=rows, chunk=chunk, batch=batch)
    run, messages = collect_warnings(
        lambda: decode(
            requests,
            "planned",
            worker=worker,
            target=target,
            engine=engine,
            seconds=lambda: worker.clock.now,
            **options,
        )
    )
    assert run.texts == [write(target, request) for request in requests], f"interleaving {seed}"
    assert run.failure is None or isinstance(run.failure, DrafterDiedError), f"interleaving {seed}: {run.failure!r}"
    assert len(messages) == (run.failure is not None), messages
    met.update(texts=len(requests), tokens=sum(map(len, run.texts)), dead=int(run.failure is not None))
    met.update({kind: run.counts[kind] for kind in ("primary", "secondary", "late", "miss", "orphan")})


@pytest.mark.parametrize("rounds", [60, pytest.param(1000, marks=pytest.mark.long)])
def test_texts_whatever_a_wait_meets(rounds: int) -> None:
    met: Counter[str] = Counter()
    for seed in range(rounds):
        run_once(seed, met)
    print(f"\n{rounds} interleavings of planned:", ", ".join(f"{kind} {count}" for kind, count in sorted(met.items())))
    for kind in MET:
        assert met[kind] > 0, f"never met: {kind}"


@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_drafter_that_raises_in_the_midst_of_a_wait(number: int) -> None:
    """At the first wait, and at later ones."""

    class Dies(Watched):
        """Its drafter raises when it is waited for."""

        waits = 0

        def wait(self, cache: CandidateCache, layers: int, depth: int = 0) -> None:
            self.waits += 1
            if self.waits == number:
                self._running = None  # a forward under way would end first
                self._loop.drafter.grow = raising  # type: ignore[method-assign]
            super().wait(cache, layers, depth)

    def raising(states: Any, trees: Any) -> list[int]:
        raise DrafterDiedError

    met: Counter[str] = Counter()
    target, request = TARGETS[0], make_request((1, 2, 3), max_tokens=60)
    worker = Dies(make_drafter("model", target, width=2), SimulatedClock(lambda: 1.0, lambda rows: 20.0), met)
    run, messages = collect_warnings(
        lambda: decode([request], "planned", worker=worker, target=target, seconds=lambda: worker.clock.now)
    )
    assert run.texts == [write(target, request)]
    assert met["died"] == 1
    assert len(messages) == 1


class Unhurried(QuickToy):
    """A target whose passes take so long that to wait for a layer pays."""

    def score(self, forest: Sequence[Part]) -> Any:
        time.sleep(0.004)
        return super().score(forest)


class Fated(ProcessWorker):
    """Its process is stopped when the target begins every fifth of its waits, and killed in the midst of it."""

    waits = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.killed: set[int] = set()
        super().__init__(*arguments, **options)

    def wait(self, cache: CandidateCache, layers: int, depth: int = 0) -> None:
        self.waits += 1
        pid, timer = self.pid, None
        if pid is not None and pid not in self.killed and self.is_ready and self.waits % 5 == 0:
            os.kill(pid, signal.SIGSTOP)
            timer = threading.Timer(0.001, os.kill, (pid, signal.SIGKILL))
            timer.start()
            self.killed.add(pid)
        super().wait(cache, layers, depth)
        if timer:
            timer.join()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("method", [case("planned", True), case("card", False), case("ssd", False)])
def test_a_process_that_is_killed_in_the_midst_of_a_wait(method: str) -> None:
    with nothing_left():
        worker = Fated(build_light, pauses=(0.01, 0.01))
        until(lambda: worker.is_ready, "a drafter")
        run, said = collect_warnings(
            partial(within, SECONDS, partial(decode, REQUESTS, method, worker=worker, target=Unhurried(16, 3, 0)))
        )
        assert run.texts == TEXTS
        assert worker.killed
        assert len(said) == 1
        assert "SIGKILL" in said[0]


class Leaves(QuickToy):
    """Notes how many cores each pass leaves to others."""

    left = 0

    def __init__(self, *sizes: Any) -> None:
        super().__init__(*sizes)
        self.passes: Counter[int] = Counter()

    def limit_threads(self, most: int | None = None, leave: int = 0) -> None:
        self.left = leave

    def score(self, forest: Sequence[Part]) -> Any:
        self.passes[self.left] += 1
        return super().score(forest)


@pytest.mark.parametrize("shared", [True, False])
def test_while_the_drafter_rests_the_target_has_all_cores(shared: bool) -> None:
    """On one device `planned` alternates with the target, so that its drafter has a core of its own in few passes."""
    target = Leaves(16, 3, 5)
    worker = InlineWorker(make_drafter("model", target, width=2), SimulatedClock(lambda: 1.0, lambda rows: 5.0))
    worker.cores, worker.clock.shared = 1, shared
    request = make_request((1, 2, 3), max_tokens=120)
    run = decode([request], "planned", worker=worker, target=target, seconds=lambda: worker.clock.now)
    assert run.texts == [write(target, request)]
    assert (target.passes[0] > 3 * target.passes[1]) == shared


def test_a_drafter_that_was_told_to_rest_counts_as_resting_at_once() -> None:
    worker = ThreadWorker(make_drafter("model", TARGETS[0]))
    try:
        worker.open(0, make_request((1, 2, 3)), CandidateCache(3))
        worker.set_directives(0, DraftDirectives(layers=0))
        assert not worker.is_working
        worker.correct(0, Correction([0], [5], -1, False))
        assert not worker.is_working, "it reads where the text went, and does not draft"
        worker.open(1, make_request((4, 5)), CandidateCache(5))
        worker.set_directives(1, DraftDirectives(layers=0))
        worker.forget(0)
        assert not worker.is_working
    finally:
        worker.close()
