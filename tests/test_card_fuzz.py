"""Parallel methods under random interleavings of drafter and target, in races, and with drafters that fail or rest."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from doubles import (
    DrafterDiedError,
    Empty,
    QuickToy,
    collect_warnings,
    decode,
    failing,
    make_drafter,
    make_request,
    sleepy,
    within,
    write,
)
from engine_runs import finish, submit
from light import Wrapped
from processes import REQUESTS, SECONDS, TEXTS, build_light, nothing_left, until
from turns import in_turn

from outpace.card.cache import CandidateCache
from outpace.card.inline import InlineWorker, SimulatedClock
from outpace.card.loop import Correct
from outpace.card.polled import PolledWorker
from outpace.card.process import ProcessWorker
from outpace.card.thread import ThreadWorker
from outpace.card.worker import ObservedModel
from outpace.core.drafting import DraftDirectives
from outpace.core.types import Request
from outpace.decoders.card import Card
from outpace.engine.engine import Engine, EngineOptions
from outpace.models.base import Part

TARGETS = [QuickToy(8 + number, 2 + number % 2, 100 + number) for number in range(9)]
KINDS = ("perfect", "model", "both", "garbage", "ngram", "failing", "empty")
OPTIONS: dict[str, Callable[[random.Random], dict[str, Any]]] = {  # random options of each method
    "card": lambda chance: {"just_in_time": chance.randrange(3), "as_published": chance.random() < 0.2},
    "pearl": lambda chance: {"draft_length": chance.randint(1, 6)},
    "ssd": lambda chance: {"draft_length": chance.randint(1, 6)},
    "planned": lambda chance: {
        "deepest": chance.randrange(5),
        "trials": chance.choice((0.0, 0.3)),
    },
}
ROUNDS = (24, pytest.param(300, marks=pytest.mark.long))
FORMS = ("thread", "polled", "inline")  # of a worker; a process can be killed too
WAITS = ("after a hit", "after a miss", "a further level", "in vain", "died", "gave up", "rests", "a few levels")


def random_requests(chance: random.Random, target: QuickToy) -> list[Request]:
    """One to three requests, each with its own prompt, rule, sampling and end."""
    requests = []
    for _ in range(chance.randint(1, 3)):
        prompt = [chance.randrange(target.vocab_size) for _ in range(chance.randint(1, 9))]
        rule = chance.choice(("greedy", "gumbel", "gumbel", "match"))
        options: dict[str, Any] = {"seed": chance.getrandbits(40), "choice": chance.randrange(3)}
        if rule != "greedy":
            options |= {"temperature": chance.choice((0.5, 1.0, 1.5)), "top_k": chance.choice((0, 0, 4))}
        stops = frozenset(chance.sample(range(target.vocab_size), 1)) if chance.random() < 0.1 else frozenset()
        requests.append(make_request(prompt, rule, chance.randint(16, 28), stop_ids=stops, **options))
    return requests


def random_clock(chance: random.Random) -> SimulatedClock:
    """Return a clock with random times; the drafter is on average half to eight times as fast as the target."""
    pace = chance.choice((0.5, 1.0, 2.0, 8.0))
    return SimulatedClock(lambda: chance.expovariate(1.0), lambda rows: chance.expovariate(1.0) * pace + 0.01 * rows)


def random_drafter(chance: random.Random, target: QuickToy, met: Counter[str]) -> tuple[Any, Any]:
    """Return a drafter, and the model drafter in it if there is one."""
    kind = chance.choice(KINDS)
    met[kind] += 1
    width, tree_nodes = chance.randint(1, 5), chance.choice((4, 8, 16, 64))
    inner = "model" if kind == "failing" else kind
    drafter = make_drafter(inner, target, width=width, tree_nodes=tree_nodes, floor=chance.choice((0.0, 0.005)))
    watched = drafter.parts[1] if kind == "both" else drafter
    if kind == "failing":
        drafter = failing(drafter, chance.choice(("grow", "observe", "open")), chance.randrange(12))
    return drafter, watched


class WatchedWorker(InlineWorker):
    """Counts what the target's waits meet, and the directives that it sends."""

    def __init__(self, drafter: Any, clock: SimulatedClock, met: Counter[str], chance: random.Random) -> None:
        super().__init__(drafter, clock)
        self.met, self.chance = met, chance

    def wait(self, cache: CandidateCache, levels: int, depth: int = 0) -> None:
        alive = self.failure is None
        self.met["after a miss" if cache.missed else "after a hit"] += 1
        self.met["a further level"] += levels > 1
        super().wait(cache, levels, depth)
        self.met["died"] += alive and self.failure is not None
        self.met["gave up"] += cache.is_given_up
        self.met["in vain"] += not cache.has_grown(levels, depth)

    def set_directives(self, key: int, directives: DraftDirectives) -> None:
        self.met["rests"] += directives.levels == 0
        self.met["a few levels"] += bool(directives.levels)
        super().set_directives(key, directives)


class UnreliableLink(WatchedWorker):
    """Delays everything by random times, loses levels and repeats corrections, some of them much later."""

    corrections: tuple[Correct, ...] = ()

    def _send(self, queue: Any, message: Any) -> None:
        self.clock.delay = self.chance.choice((0.0, 0.3, self.chance.expovariate(0.2)))
        if queue is self._arriving and self.chance.random() < 0.1:
            self.met["lost"] += 1
            return
        super()._send(queue, message)
        if isinstance(message, Correct):
            self.corrections = *self.corrections, message
            if self.chance.random() < 0.3:
                again = self.chance.choice([each for each in self.corrections if each.key == message.key][-4:])
                self.met["repeated"] += 1
                super()._send(queue, again)

    def _publish(self, levels: Any) -> None:
        super()._publish(levels)
        self.met["alias"] += sum(bool(cache._aliases) for cache in self._caches.values())


def run_once(
    seed: int, met: Counter[str], method: str = "card", link: Callable[..., WatchedWorker] = WatchedWorker
) -> None:
    """Run one random interleaving, check its text against plain decoding and count the events in `met`."""
    chance = random.Random(seed)
    target = chance.choice(TARGETS)
    requests = random_requests(chance, target)
    drafter, watched = random_drafter(chance, target, met)
    engine = EngineOptions(
        nodes=chance.randint(1, 10), rows=chance.randint(4, 24), chunk=chance.randint(1, 6), batch=chance.randint(1, 3)
    )
    worker = link(drafter, random_clock(chance), met, chance)
    worker.clock.shared = method == "planned" and chance.random() < 0.3
    options = OPTIONS[method](chance)
    run, messages = collect_warnings(
        lambda: decode(
            requests,
            method,
            worker=worker,
            target=target,
            engine=engine,
            seconds=lambda: worker.clock.now,
            **options,
        )
    )
    assert run.texts == [write(target, request) for request in requests], f"interleaving {seed}"
    died = isinstance(run.failure, DrafterDiedError)
    assert run.failure is None or died, f"interleaving {seed}: the drafter failed unexpectedly: {run.failure!r}"
    assert len(messages) == died, messages
    met.update({kind: run.counts[kind] for kind in ("orphan", "primary", "secondary", "late", "miss")})
    met.update({"dead worker": int(died), "texts": len(requests), "tokens": sum(map(len, run.texts))})
    met["full tree"] += watched.met["full tree"] if hasattr(watched, "met") else 0
    met["batched"] += len(requests) > 1


@pytest.mark.parametrize("method", OPTIONS)
@pytest.mark.parametrize("rounds", ROUNDS)
def test_random_delays_lost_levels_and_repeated_corrections(rounds: int, method: str) -> None:
    met: Counter[str] = Counter()
    for seed in range(rounds):
        run_once(seed, met, method, UnreliableLink)
    kinds = ["orphan", "alias", "primary", "late", "miss", "full tree", "dead worker", "lost", "repeated", *KINDS]
    assert not [kind for kind in kinds if not met[kind]], "never met"


@pytest.mark.parametrize("method", OPTIONS)
@pytest.mark.parametrize("rounds", ROUNDS)
def test_random_interleavings(rounds: int, method: str) -> None:
    met: Counter[str] = Counter()
    if method == "planned":  # it rarely hits a secondary candidate
        rounds = max(80, 2 * rounds)
    for seed in range(rounds):
        run_once(seed, met, method)
    print(f"\n{rounds} interleavings of {method}:", ", ".join(f"{kind} {count}" for kind, count in sorted(met.items())))
    kinds = ["orphan", "primary", "late", "miss", "full tree", "dead worker", "batched", *KINDS]
    if method in ("card", "planned"):  # the others' chains have few siblings
        kinds.append("secondary")
    if method == "planned":
        kinds += WAITS
    assert not [kind for kind in kinds if not met[kind]], "never met"


class RandomEvent:
    """Is done after a random number of questions, as a pass is after a random number of draft steps."""

    def __init__(self, chance: random.Random) -> None:
        self.left = chance.choice((0, 1, 2, 5, 20))

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize("method", OPTIONS)
@pytest.mark.parametrize("rounds", ROUNDS)
def test_a_drafter_that_steps_while_passes_run(rounds: int, method: str) -> None:
    met: Counter[str] = Counter()
    for seed in range(rounds):
        chance = random.Random(seed)
        target = chance.choice(TARGETS)
        requests = random_requests(chance, target)
        drafter, _ = random_drafter(chance, target, met)
        worker = PolledWorker(drafter, partial(RandomEvent, chance))
        engine = EngineOptions(nodes=chance.randint(1, 10), chunk=chance.randint(1, 6), batch=chance.randint(1, 3))
        options = OPTIONS[method](chance)
        run, messages = collect_warnings(
            partial(decode, requests, method, worker=worker, target=target, engine=engine, **options)
        )
        assert run.texts == [write(target, request) for request in requests], f"interleaving {seed}"
        died = isinstance(run.failure, DrafterDiedError)
        assert run.failure is None or died, f"interleaving {seed}: {run.failure!r}"
        assert len(messages) == died, messages
        met.update({kind: run.counts[kind] for kind in ("primary", "late", "miss")} | {"dead worker": int(died)})
    assert not [kind for kind in ("primary", "late", "miss", "dead worker") if not met[kind]], "never met"


@pytest.mark.parametrize("method", OPTIONS)
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (0, 2, 3, 4, 5))])
def test_race_between_threads(seed: int, method: str) -> None:
    chance = random.Random(seed)
    target = TARGETS[seed]
    requests = [request for _ in range(3) for request in random_requests(chance, target)]
    kind = ("model", "both", "perfect")[seed % 3]
    drafter = sleepy(make_drafter(kind, target, width=1 + seed % 4, tree_nodes=16), seed)
    engine = EngineOptions(nodes=8, chunk=5, batch=4)
    options = {"just_in_time": seed % 3} if method == "card" else OPTIONS[method](chance)
    run = decode(requests, method, drafter, worker="thread", target=target, engine=engine, **options)
    assert run.texts == [write(target, request) for request in requests]
    assert run.failure is None
    assert run.figures.misses > 0
    if seed % 3 or method in ("pearl", "ssd"):  # the target waits for a first level, whatever the race does
        assert run.figures.drafted > 0


@pytest.mark.parametrize(("method", "verb", "form"), in_turn(OPTIONS, ["grow", "observe", "open"], FORMS))
def test_a_drafter_that_raises_within_a_text(form: str, verb: str, method: str) -> None:
    target = TARGETS[0]
    requests = [make_request((1, 2, 3), "gumbel", 30, temperature=1.0, seed=seed) for seed in range(3)]
    before = set(threading.enumerate())
    calls: Counter[str] = Counter()
    failed = failing(make_drafter("model", target), verb, 2)
    drafter = sleepy(Wrapped(failed, lambda called: calls.update([called])), 0)
    worker = PolledWorker(drafter, partial(RandomEvent, random.Random(0))) if form == "polled" else form
    run, messages = collect_warnings(lambda: decode(requests, method, drafter, worker=worker, target=target))
    assert run.texts == [write(target, request) for request in requests]
    assert [thread for thread in threading.enumerate() if thread not in before] == []
    if method == "planned" and calls[verb] <= 2:  # on a busy machine it may find that drafting does not pay
        return
    assert isinstance(run.failure, DrafterDiedError)
    assert len(messages) == 1
    assert "DrafterDiedError" in messages[0]


@pytest.mark.parametrize("form", FORMS)
def test_requests_after_the_worker_died_are_decoded_plainly(form: str) -> None:
    target, request = TARGETS[1], make_request((1, 2, 3), max_tokens=20)
    event = partial(RandomEvent, random.Random(0))
    workers = {"thread": ThreadWorker, "polled": partial(PolledWorker, record=event), "inline": InlineWorker}
    worker = workers[form](failing(make_drafter("model", target), "grow", 1)).start()

    def run() -> list[list[int]]:
        with Engine(target, worker=worker) as engine:
            return [finish(engine, *submit(engine, request, method=Card))[0] for _ in range(3)]

    texts, messages = collect_warnings(lambda: within(30.0, run))
    assert texts == [write(target, request)] * 3
    assert len(messages) == 1


def test_close_is_never_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, began = ThreadWorker(Empty()).start(), threading.Event()
    sleep = worker._loop.wait

    def close_before_sleep(seconds: float | None = None) -> None:
        """Close the worker after it has checked `_stopping` and before its long sleep."""
        began.set()
        worker.stop()  # what close() does, before it joins
        sleep(60.0)

    monkeypatch.setattr(worker._loop, "wait", close_before_sleep)
    assert began.wait(30.0)
    worker._thread.join(10.0)
    assert not worker._thread.is_alive(), "a close between the check of _stopping and the sleep is lost"
    within(5.0, worker.close)


class Unhurried(QuickToy):
    """A target whose passes take so long that to wait for a level pays."""

    def score(self, forest: Sequence[Part]) -> Any:
        time.sleep(0.012)
        return super().score(forest)


class Killed(ProcessWorker):
    """Each of its processes is killed when the target begins a second wait, or a second pass."""

    begun = 0

    def __init__(self, moment: str) -> None:
        self.moment = moment
        self.killed: set[int] = set()
        super().__init__(build_light, pauses=(0.01, 0.01))

    def kill(self, moment: str) -> None:
        self.begun += moment == self.moment
        if self.pid is not None and self.pid not in self.killed and self.is_ready and self.begun % 2 == 0:
            self.killed.add(self.pid)
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, cache: CandidateCache, levels: int, depth: int = 0) -> None:
        self.kill("wait")
        super().wait(cache, levels, depth)

    def wrap_target(self, target: Any) -> ObservedModel:
        return ObservedModel(target, lambda rows: self.kill("pass"))


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize(("method", "moment"), in_turn(["planned", "card", "ssd"], ["wait", "pass"]))
def test_a_process_that_is_killed_during_a_wait_or_a_pass(method: str, moment: str) -> None:
    with nothing_left():
        worker = Killed(moment).start()
        until(lambda: worker.is_ready, "a drafter")
        run, said = collect_warnings(
            partial(within, SECONDS, partial(decode, REQUESTS, method, worker=worker, target=Unhurried(16, 3, 0)))
        )
        assert run.texts == TEXTS
        assert worker.killed
        assert len(said) in (1, 2)  # while it restarts, and if it was killed so often that it is given up
        assert all("SIGKILL" in one for one in said)


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
    request = make_request((1, 2, 3), max_tokens=400)
    run = decode([request], "planned", worker=worker, target=target, seconds=lambda: worker.clock.now)
    assert run.texts == [write(target, request)]
    assert (target.passes[0] > 3 * target.passes[1]) == shared
