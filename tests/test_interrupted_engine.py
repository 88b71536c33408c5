"""Ctrl-C at lines all over the engine and the library.

Only KeyboardInterrupt is raised, later answers have the right text, and everything that a request holds is released.

A run visits 10,000 to 55,000 lines, so each test chooses some visits, evenly spaced; the long variants choose more.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakSet

import pytest
from doubles import QuickToy, make_request, write
from line_interrupts import Place, interrupted_at, places, visited_lines
from processes import TARGET as LIGHT_TARGET
from processes import build_light, children, until

import outpace
from outpace.api.llm import LLM
from outpace.api.stream import Stream
from outpace.card.inline import InlineWorker
from outpace.card.process import ProcessWorker
from outpace.card.thread import ThreadWorker
from outpace.core import registry
from outpace.core.drafting import BuildContext
from outpace.core.errors import UserError
from outpace.core.types import Request
from outpace.drafters._composite import SharedTree
from outpace.engine.build import build_drafter
from outpace.engine.engine import Engine, EngineOptions
from outpace.engine.sequence import TokenSequence
from outpace.models.base import Session
from outpace.models.load import Loaded


class SessionToy(QuickToy):
    """A toy that knows which of its sessions are still referenced."""

    def __init__(self, agreement: float = 1.0) -> None:
        super().__init__(16, 3, 0, agreement)
        self.sessions: WeakSet[Session] = WeakSet()

    def open(self, capacity: int, max_pending: int) -> Any:
        self.sessions.add(session := super().open(capacity, max_pending))
        return session


TARGET, DRAFT = SessionToy(), SessionToy(0.7)
DRAFT._tables = 0.75 * TARGET._tables + 0.25 * DRAFT._tables
assert (LIGHT_TARGET._tables == TARGET._tables).all(), "the table of `build_light` is that of another target"
LOOKUPS = ("suffix", "cacheback", "lookahead", "prediction")
OPTIONS = EngineOptions(nodes=6, rows=12, chunk=4, batch=2)


class Kind(NamedTuple):
    """A method, its drafters joined by +, and the worker in which they run."""

    method: str
    drafter: str = ""
    worker: str = ""

    def build(self) -> Any:
        """Return the engine's drafter or worker; None without drafts."""
        if self.worker == "process":
            return ProcessWorker(build_light)
        if not self.drafter:
            return None
        context = BuildContext(draft=DRAFT, target=TARGET)
        parts = [build_drafter(name, context, {}) for name in self.drafter.split("+")]
        drafter = SharedTree(parts) if len(parts) > 1 else parts[0]
        return {"inline": InlineWorker, "thread": ThreadWorker, "": lambda same: same}[self.worker](drafter)


KINDS = [
    Kind("autoregressive"),
    Kind("speculative", "ngram+model"),
    Kind("speculative", "+".join([*LOOKUPS, "model"])),
    Kind("auto", "suffix+model"),
    Kind("card", "ngram+model", "inline"),
    Kind("planned", "ngram+model", "inline"),
    Kind("card", "ngram+model", "thread"),
    Kind("pearl", "model", "thread"),
    Kind("card", worker="process"),
]
SHORT = [kind for kind in KINDS if kind.method in ("autoregressive", "speculative", "card")]


def requests(count: int, first: int = 0) -> list[Request]:
    return [make_request([1, 2, 3, 4, 5, *range(first, first + number)], "greedy", 5) for number in range(count)]


TEXTS: dict[tuple[int, ...], list[int]] = {}


def text_of(request: Request) -> list[int]:
    if request.prompt not in TEXTS:
        TEXTS[request.prompt] = write(TARGET, request)
    return TEXTS[request.prompt]


class Scenario:
    """Runs three requests (one waits, one is aborted) and two more that reuse a kept text, then closes the engine."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.decoder = registry.find("decoders", kind.method)
        self.given: Any = None
        self.engine: Engine | None = None
        self.runs: list[TokenSequence] = []

    def submit(self, *asked: Request) -> list[TokenSequence]:
        assert self.engine is not None
        return [self._submit(self.engine, request) for request in asked]

    def _submit(self, engine: Engine, request: Request) -> TokenSequence:
        run = engine.create(request, self.decoder, self.decoder.Options())
        self.runs.append(run)
        try:
            engine.enqueue(run)
        except BaseException:
            engine.abort(run)
            raise
        return run

    def work(self) -> None:
        self.engine, self.runs, self.given = None, [], None
        self.given = self.kind.build()
        drafter = None if self.kind.worker else self.given
        engine = self.engine = Engine(TARGET, drafter, self.given if self.kind.worker else None, OPTIONS)
        if engine.worker:
            engine.worker.start()
        first, second, third = self.submit(*requests(3))
        engine.step()
        engine.step()
        engine.abort(second)
        while not (first.finish_reason and third.finish_reason):
            engine.step()
        (again,) = self.submit(*requests(1))
        engine.submit(requests(1)[0], self.decoder, self.decoder.Options())
        while not again.finish_reason:
            engine.step()
        engine.sweep()
        engine.close()

    def check(self) -> None:
        """Write more texts, close the engine, and check that nothing is still held."""
        engine = self.engine
        if engine is None:
            if self.kind.worker and self.given is not None:
                self.given.close()
            return
        if not engine._is_closed:
            later = self.submit(*requests(2, 5), *requests(1))
            for _ in range(100):
                if all(run.finish_reason for run in self.runs):
                    break
                engine.step()
            assert [run.finish_reason for run in later] == ["length"] * 3
        engine.sweep()
        for run in self.runs:
            assert run.finish_reason in ("length", "abort")
            assert run.tokens == text_of(run.request)[: len(run.tokens)]
            assert run.finish_reason == "abort" or len(run.tokens) == run.request.max_tokens
            assert run.error is None or "was interrupted (Ctrl-C)" in str(run.error)
            assert not run.kv.is_open
            assert run.coroutine is None
            assert run.draft.state is None
        if not engine._is_closed:
            assert engine.worker is None or engine.worker.failure is None
        engine.close()
        check_closed(engine, (TARGET, DRAFT))


def check_closed(engine: Engine, models: tuple[Any, ...]) -> None:
    """Check that the engine holds nothing but kept texts, and its worker nothing."""
    memory, worker = engine.memory, engine.worker
    assert not engine.running
    assert not engine.waiting
    assert not memory._open
    assert not memory._reading._blocks
    assert not memory._reading._by_block
    held = [*memory._stored._blocks, *(holder for holders in memory._stored._by_block.values() for holder in holders)]
    assert all(holder in memory._kept for holder in held)
    if worker is not None:
        assert not worker._caches
        assert not worker._resting_keys
        assert not getattr(worker, "_requests", None)
    if loop := getattr(worker, "_loop", None):
        loop._read_inbox()
        assert not loop._requests
    kept = [text.session for text in memory._kept]
    assert all(any(session is other for other in kept) for model in models for session in model.sessions)


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    before, running = children(), threading.active_count()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as the one about a drafter that was given up
        warnings.simplefilter("ignore", ResourceWarning)  # Python closes the pipes of a process that was not started
        yield
    until(lambda: threading.active_count() <= running, "the threads end")
    until(lambda: children() <= before, "the processes end")


def interrupt_evenly(work: Any, count: int, twice: bool = False) -> Iterator[Place]:
    """Run `work` about `count` times, each with an interrupt at another place; with `twice` a second one comes while
    the first is handled. Yield the place after each run."""
    work()
    found = places(visited_lines(work))
    chosen = found[:: max(len(found) // count, 1)]
    came = 0
    for number, place in enumerate(chosen):
        came += interrupted_at(place, work, 1 + number % 40 if twice else 0)
        yield place
    assert 2 * came > len(chosen), "too few places were reached again"  # threads do not always do the same


@pytest.mark.parametrize(
    ("kind", "count", "twice"),
    [(kind, 20, False) for kind in SHORT]
    + [(KINDS[0], 20, True)]
    + [pytest.param(kind, 60, twice, marks=pytest.mark.long) for kind in KINDS for twice in (False, True)],
    ids=lambda value: "-".join(value) if isinstance(value, Kind) else str(value),
)
def test_an_interrupted_engine_releases_everything(kind: Kind, count: int, twice: bool) -> None:
    scenario = Scenario(kind)
    for place in interrupt_evenly(scenario.work, count, twice):
        try:
            scenario.check()
        except BaseException as error:
            raise AssertionError(f"interrupted at {place}") from error
        finally:
            TARGET.sessions.clear()
            DRAFT.sessions.clear()


def test_an_interrupt_while_a_parallel_drafter_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker does not know the request yet."""
    engine = Engine(TARGET, None, InlineWorker(build_drafter("model", BuildContext(DRAFT, TARGET), {})), OPTIONS)
    (request,) = requests(1)
    decoder = registry.find("decoders", "card")
    with engine:
        for name in ("has_room", "open"):
            run = engine.submit(request, decoder, decoder.Options())
            with monkeypatch.context() as patch:
                patch.setattr(engine.memory, name, interrupt)
                with pytest.raises(KeyboardInterrupt):
                    engine.step()
            engine.abort(run)
            engine.sweep()
            assert engine.memory.used == 0
            assert not engine.running
            assert not engine.waiting


def interrupt(*arguments: object) -> None:
    raise KeyboardInterrupt


CHAT = [{"role": "user", "content": "hello world"}]
SAMPLED: dict[str, Any] = {"max_tokens": 4, "n": 2, "temperature": 1.0, "seed": 5}
LLM_KINDS: dict[str, dict[str, Any]] = {
    "plain": {"method": "autoregressive"},
    "speculative": {"method": "speculative", "drafter": "model+ngram"},
    "auto": {"method": "auto"},
    "card in a thread": {"method": "card", "drafter": "model+ngram", "worker": "thread"},
    "card in a process": {"method": "card", "drafter": "model+ngram", "worker": "process"},
}


@pytest.fixture(scope="module")
def answers(tiny_pair: tuple[Loaded, Loaded]) -> list[tuple[int, ...]]:
    with LLM(tiny_pair[0], method="autoregressive", reuse=False) as llm:
        return later_answers(llm)


def later_answers(llm: LLM) -> list[tuple[int, ...]]:
    results = [*llm.generate(["hello", "world"], **SAMPLED), llm.chat(CHAT, max_tokens=4)]
    return [result.tokens for result in results]


class LLMScenario:
    """Opens two streams (one is read later, one closed early), with a batch, a chat and a structured answer between."""

    def __init__(self, pair: tuple[Loaded, Loaded], options: dict[str, Any]) -> None:
        self._pair, self._options = pair, options
        self.llm: LLM | None = None
        self.streams: list[Any] = []

    def work(self) -> None:
        self.llm, self.streams = None, []
        llm = self.llm = LLM(*self._pair, **self._options)
        self.streams.append(llm.stream("hello", max_tokens=8, ignore_eos=True))
        next(self.streams[0])
        self.streams.append(llm.stream("world world", max_tokens=6, temperature=1.0, seed=1, ignore_eos=True))
        later_answers(llm)
        llm.generate("1", structured_outputs={"regex": "[0-9]{3}"}, max_tokens=5)
        for _ in self.streams[0]:
            pass
        self.streams[1].close()
        llm.close()

    def check(self, answers: list[tuple[int, ...]]) -> None:
        llm, streams, self.llm, self.streams = self.llm, self.streams, None, []
        if llm is None:
            return
        with llm:
            if not llm.engine._is_closed:
                for stream in streams:
                    with suppress(UserError):
                        assert stream.finish().finish_reason in ("length", "abort")
                assert later_answers(llm) == answers
                assert llm.engine.worker is None or llm.engine.worker.failure is None
        check_closed(llm.engine, ())


@pytest.mark.parametrize(
    ("kind", "count"),
    [("plain", 8), ("card in a thread", 8)] + [pytest.param(kind, 100, marks=pytest.mark.long) for kind in LLM_KINDS],
)
def test_an_interrupted_library_stays_usable(
    tiny_pair: tuple[Loaded, Loaded], answers: list[tuple[int, ...]], kind: str, count: int
) -> None:
    scenario = LLMScenario(tiny_pair, LLM_KINDS[kind])
    for place in interrupt_evenly(scenario.work, count):
        try:
            scenario.check(answers)
        except BaseException as error:
            raise AssertionError(f"interrupted at {place}") from error


def test_a_stream_whose_creation_was_interrupted_is_collected() -> None:
    Stream.__new__(Stream).__del__()


def test_an_interrupt_ends_other_answers_of_its_round_with_a_clear_error(
    tiny_pair: tuple[Loaded, Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(tiny_pair[0], method="autoregressive", batch=2) as llm:
        first, second, waiting = [llm.stream("hello", max_tokens=20, ignore_eos=True) for _ in range(3)]
        next(first)
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.target, "score_sparse", interrupt)
            with pytest.raises(KeyboardInterrupt):
                list(first)
        assert first.finish().finish_reason == "abort"
        with pytest.raises(outpace.UserError, match="was interrupted"):
            list(second)
        assert len(waiting.finish().tokens) == 20


def test_an_interrupted_answer_is_not_reported_as_complete(
    tiny_pair: tuple[Loaded, Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(tiny_pair[0], method="autoregressive") as llm:
        stream = llm.stream("hello", max_tokens=1, ignore_eos=True)
        with monkeypatch.context() as patch:
            patch.setattr(stream, "_piece", interrupt)
            with pytest.raises(KeyboardInterrupt):
                next(stream)
        assert stream.finish().tokens == ()
        assert stream.finish().finish_reason == "abort"


def test_an_interrupted_close_still_ends_the_worker(
    tiny_pair: tuple[Loaded, Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(*tiny_pair, **LLM_KINDS["card in a thread"])
    worker: Any = llm.engine.worker
    stream = llm.stream("hello", max_tokens=100, ignore_eos=True)
    next(stream)
    monkeypatch.setattr(llm.engine.memory, "close", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.close()
    assert not worker._thread.is_alive()
    monkeypatch.undo()
    llm.close()
    check_closed(llm.engine, ())


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_an_interrupt_while_an_llm_is_created_leaves_no_worker(tiny_pair: tuple[Loaded, Loaded], worker: str) -> None:
    """At every line of the modules that build and start it."""

    created: list[LLM] = []

    def create() -> None:
        created.append(LLM(*tiny_pair, method="card", drafter="model+ngram", worker=worker))

    def close_all() -> None:
        while created:
            created.pop().close()
        until(lambda: "outpace-drafter" not in str(threading.enumerate()), "the end of the worker")

    create()  # modules are imported once
    close_all()
    found = places(visited_lines(create))
    close_all()
    modules = ("/api/llm.py", "/engine/build.py", "/card/")
    for place in [place for place in found if place.visit <= 2 and any(name in str(place) for name in modules)]:
        assert interrupted_at(place, create), place
        close_all()
