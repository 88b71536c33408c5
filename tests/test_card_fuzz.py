"""CARD, PEARL and SSD under many random interleavings of drafter and target, in races, and with drafters that fail."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
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
from light import Wrapped
from turns import in_turn

from outpace.card.inline import InlineWorker, SimulatedClock
from outpace.card.thread import ThreadWorker
from outpace.core.registry import find
from outpace.core.types import Request
from outpace.engine.engine import Engine, EngineOptions

TARGETS = [QuickToy(8 + number, 2 + number % 2, 100 + number) for number in range(9)]
KINDS = ("perfect", "model", "both", "garbage", "ngram", "failing", "empty")
OPTIONS: dict[str, Callable[[random.Random], dict[str, Any]]] = {  # random options of each method
    "card": lambda chance: {"just_in_time": chance.randrange(3)},
    "pearl": lambda chance: {"draft_length": chance.randint(1, 6)},
    "ssd": lambda chance: {"draft_length": chance.randint(1, 6)},
    "planned": lambda chance: {"deepest": chance.randrange(5), "trials": chance.choice((0.0, 0.3))},
}
ROUNDS = (24, pytest.param(600, marks=pytest.mark.long))


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


def run_once(seed: int, met: Counter[str], method: str = "card") -> None:
    """Run one random interleaving, check its text against plain decoding and count the events in `met`."""
    chance = random.Random(seed)
    target = chance.choice(TARGETS)
    requests = random_requests(chance, target)
    drafter, watched = random_drafter(chance, target, met)
    engine = EngineOptions(
        nodes=chance.randint(1, 10), rows=chance.randint(4, 24), chunk=chance.randint(1, 6), batch=chance.randint(1, 3)
    )
    worker = InlineWorker(drafter, random_clock(chance))
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
    assert len(messages) <= 1, messages
    assert died or not messages, messages
    met.update({kind: run.counts[kind] for kind in ("orphan", "primary", "secondary", "late", "miss")})
    met.update({"dead worker": int(died), "texts": len(requests), "tokens": sum(map(len, run.texts))})
    met["full tree"] += watched.met["full tree"] if hasattr(watched, "met") else 0
    met["batched"] += len(requests) > 1


@pytest.mark.parametrize("method", OPTIONS)
@pytest.mark.parametrize("rounds", ROUNDS)
def test_random_interleavings(rounds: int, method: str) -> None:
    met: Counter[str] = Counter()
    if method == "planned":  # it rarely hits a secondary candidate
        rounds = max(80, 2 * rounds)
    for seed in range(rounds):
        run_once(seed, met, method)
    print(f"\n{rounds} interleavings of {method}:", ", ".join(f"{kind} {count}" for kind, count in sorted(met.items())))
    kinds = ("orphan", "primary", "late", "miss", "full tree", "dead worker", "batched", *KINDS)
    for kind in (*kinds, "secondary")[: None if method in ("card", "planned") else -1]:  # chains have few siblings
        assert met[kind] > 0, f"never met: {kind}"


def test_simulated_clock_is_deterministic() -> None:
    first, again = Counter[str](), Counter[str]()
    for seed in range(10):
        run_once(seed, first)
        run_once(seed, again)
    assert first == again


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
    if seed % 3 or method in (
        "pearl",
        "ssd",
    ):  # the target waits for a first layer: something is drafted whatever the race does
        assert run.figures.drafted > 0


@pytest.mark.parametrize(("method", "verb"), in_turn(OPTIONS, ["grow", "observe", "open"]))
def test_a_drafter_that_raises_within_a_text(verb: str, method: str) -> None:
    target = TARGETS[0]
    requests = [make_request((1, 2, 3), "gumbel", 30, temperature=1.0, seed=seed) for seed in range(3)]
    before = set(threading.enumerate())
    calls: Counter[str] = Counter()
    failed = failing(make_drafter("model", target), verb, 2)
    drafter = sleepy(Wrapped(failed, lambda called: calls.update([called])), 0)
    run, messages = collect_warnings(lambda: decode(requests, method, drafter, worker="thread", target=target))
    assert run.texts == [write(target, request) for request in requests]
    assert [thread for thread in threading.enumerate() if thread not in before] == []
    if method == "planned" and calls[verb] <= 2:  # on a busy machine it may find that drafting does not pay
        return
    assert isinstance(run.failure, DrafterDiedError)
    assert len(messages) == 1
    assert "DrafterDiedError" in messages[0]


def test_requests_after_the_worker_died_are_decoded_plainly() -> None:
    target, card = TARGETS[1], find("decoders", "card")
    worker = ThreadWorker(failing(make_drafter("model", target), "grow", 1))

    def run() -> list[list[int]]:
        texts = []
        with Engine(target, worker=worker) as engine:
            for seed in range(3):
                request = make_request((1, 2, 3), max_tokens=20, seed=seed)
                running = engine.submit(request, card, card.Options())
                for _ in range(40):
                    if running.finish_reason is None:
                        engine.step()
                texts.append(running.tokens)
        return texts

    texts, messages = collect_warnings(lambda: within(30.0, run))
    assert texts == [write(target, make_request((1, 2, 3), max_tokens=20))] * 3
    assert len(messages) == 1


def test_close_is_never_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, began = ThreadWorker(Empty()), threading.Event()
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


@pytest.mark.parametrize("seed", range(3))
def test_closing_many_times_in_a_race(seed: int) -> None:
    def run() -> None:
        chance = random.Random(seed)
        for _ in range(100):
            worker = ThreadWorker(Empty())
            threading.Event().wait(chance.random() * 0.0005)
            worker.close()

    within(30.0, run)
