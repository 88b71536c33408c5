"""One LLM used by many threads: the thread that waits for text steps the engine for all, and no thread hangs."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
from doubles import within

import outpace
from outpace.api.llm import LLM, Result
from outpace.api.shared_engine import SharedEngine
from outpace.api.text import StopStrings, TextAssembler
from outpace.models.load import Loaded
from outpace.models.text.text_stream import TextStream

SECONDS = 120.0  # a longer wait counts as a hang
COUNT = 18  # requests at once: two of each kind
METHODS: dict[str, dict[str, Any]] = {
    "speculative": {"method": "speculative", "drafter": "model+ngram"},
    "card, thread": {"method": "card", "drafter": "model+ngram", "worker": "thread"},
}


@pytest.fixture(params=METHODS)
def llm(tiny_pair: tuple[Loaded, Loaded], request: pytest.FixtureRequest) -> Iterator[LLM]:
    with closing(LLM(*tiny_pair, **METHODS[request.param])) as made:
        yield made


def wishes() -> list[tuple[str, dict[str, Any]]]:
    """Return prompts with options of all kinds, the same ones on every call."""
    chance = random.Random(1)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 1.2, "top_k": 9, "logprobs": 2},
        {"presence_penalty": 1.0, "logprobs": 0},
        {"repetition_penalty": 1.3, "temperature": 0.7, "logprobs": 3, "logprobs_mode": "processed"},
        {"bad_words": ["a", "hello"], "temperature": 1.0},
        {"stop": ["e", "\ufffd\ufffd"], "temperature": 1.5},
        {"echo": True, "logprobs": 1, "temperature": 0.9},
        {"min_tokens": 5, "logit_bias": {2: 20.0}, "temperature": 1.0},
    ]
    made = []
    for number in range(COUNT):
        words = chance.choices(("hello", "world", "12", "ab"), k=chance.randint(1, 12))
        options = {"max_tokens": chance.randint(5, 40), **kinds[number % len(kinds)], "seed": number}
        made.append((" ".join(words), options))
    return made


def parts_of(result: Result) -> tuple[Any, ...]:
    return (result.text, result.tokens, result.finish_reason, result.logprobs, result.prompt_logprobs)


@pytest.fixture(scope="module")
def single(tiny_pair: tuple[Loaded, Loaded]) -> list[tuple[Any, ...]]:
    """Return the result of each request alone, by plain decoding."""
    with closing(LLM(tiny_pair[0], method="autoregressive", reuse=False)) as llm:
        return [parts_of(llm.stream(prompt, **options).finish()) for prompt, options in wishes()]


def check_empty(llm: LLM) -> None:
    """Check that nothing is left in the engine."""
    llm.engine.sweep()
    assert not llm.engine.running
    assert not llm.engine.waiting
    assert not llm.engine.memory._open
    assert llm.engine.worker is None or llm.engine.worker.failure is None


def test_many_requests_at_once_equal_their_single_runs(llm: LLM, single: list[tuple[Any, ...]]) -> None:
    streams = [llm.stream(prompt, **options) for prompt, options in wishes()]
    order = list(range(COUNT))
    random.Random(3).shuffle(order)  # read in any order
    results = {number: parts_of(streams[number].finish()) for number in order}
    assert [results[number] for number in range(COUNT)] == single
    check_empty(llm)


def test_readers_of_all_kinds_leave_each_other_alone(llm: LLM, single: list[tuple[Any, ...]]) -> None:
    """Some readers are slow, some stop early and close or drop their stream; the others still get their texts."""

    def read(number: int) -> tuple[Any, ...] | None:
        prompt, options = wishes()[number]
        stream = llm.stream(prompt, **options)
        if number % 4 == 0:
            return parts_of(stream.finish())
        seen = ""
        for piece in stream:
            seen += piece.text
            if number % 4 > 1:
                break
            time.sleep(0.002)
        assert single[number][0].startswith(seen)
        if number % 4 == 2:
            stream.close()
        return parts_of(stream.finish()) if number % 4 == 1 else None

    def run() -> list[tuple[Any, ...] | None]:
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(read, range(COUNT)))

    for number, result in enumerate(within(SECONDS, run)):
        assert result == (single[number] if number % 4 < 2 else None)
    gc.collect()
    within(SECONDS, llm.engine.step)
    check_empty(llm)


def test_closing_while_another_thread_steps_does_not_raise(tiny_pair: tuple[Loaded, Loaded]) -> None:
    """The reader is blocked inside the target pass while the stream is closed."""
    with closing(LLM(tiny_pair[0], method="autoregressive")) as llm:
        inside, go_on = threading.Event(), threading.Event()
        score = tiny_pair[0].model.score_sparse

        def slow(forest: Any) -> Any:
            inside.set()
            assert go_on.wait(SECONDS)
            return score(forest)

        stream = llm.stream("hello world", max_tokens=30)
        tiny_pair[0].model.score_sparse = slow
        try:
            reader = threading.Thread(target=lambda: list(stream))
            reader.start()
            assert inside.wait(SECONDS)
            stream.close()
            go_on.set()
            reader.join(SECONDS)
        finally:
            del tiny_pair[0].model.score_sparse
        assert not reader.is_alive()
        assert stream.finish().finish_reason == "abort"
        check_empty(llm)


def test_a_forgotten_stream_ends_with_the_garbage(llm: LLM) -> None:
    for begun in (False, True):
        stream = llm.stream("hello", max_tokens=100, ignore_eos=True)
        if begun:
            next(stream)
        run = stream._run
        del stream
        gc.collect()
        assert run.finish_reason == "abort"
        assert llm.stream("hello world", max_tokens=3).finish().tokens
        check_empty(llm)


def test_garbage_collected_under_a_lock_of_the_worker_does_not_step(
    tiny_pair: tuple[Loaded, Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector may finalize a dropped stream in any thread: here in the drafter's, while it holds a lock."""
    with closing(LLM(*tiny_pair, **METHODS["card, thread"])) as llm:
        worker: Any = llm.engine.worker
        lock, collected = threading.Lock(), threading.Event()

        class CollectingLock:
            def __enter__(self) -> bool:
                lock.acquire()
                if threading.current_thread() is worker._thread and not collected.is_set():
                    collected.set()
                    gc.collect()
                return True

            def __exit__(self, *error: object) -> None:
                lock.release()

        def open_collecting(key: int, request: Any, cache: Any) -> None:
            cache._lock = CollectingLock()
            type(worker).open(worker, key, request, cache)

        stream = llm.stream("hello", max_tokens=100, ignore_eos=True)
        next(stream)
        gc.disable()
        try:
            del stream
            monkeypatch.setattr(worker, "open", open_collecting)
            result = within(SECONDS / 4, lambda: llm.stream("hello world", max_tokens=20).finish())
            assert collected.wait(SECONDS)
        finally:
            gc.enable()
        assert result.finish_reason in ("length", "stop")


def test_closing_the_library_ends_all_readers(tiny_pair: tuple[Loaded, Loaded]) -> None:
    llm = LLM(*tiny_pair, **METHODS["card, thread"])
    streams = [llm.stream("hello", max_tokens=100, ignore_eos=True, seed=seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        reads = [pool.submit(list, stream) for stream in streams]
        within(SECONDS, llm.close)
        for read in reads:
            read.result(SECONDS)
    assert {stream.finish().finish_reason for stream in streams} <= {"abort", "length"}
    with pytest.raises(outpace.UserError, match="the engine is closed"):
        llm.stream("hello")


def test_an_error_of_the_target_reaches_every_reader(tiny_pair: tuple[Loaded, Loaded]) -> None:
    with closing(LLM(tiny_pair[0], method="autoregressive")) as llm:
        streams = [llm.stream("hello", max_tokens=20, seed=seed) for seed in range(4)]
        tiny_pair[0].model.score_sparse = lambda forest: (_ for _ in ()).throw(RuntimeError("out of memory"))
        try:
            with ThreadPoolExecutor(4) as pool:
                reads = [pool.submit(list, stream) for stream in streams]
                for read in reads:
                    with pytest.raises(RuntimeError, match="out of memory"):
                        read.result(SECONDS)
        finally:
            del tiny_pair[0].model.score_sparse
        check_empty(llm)
        assert llm.stream("hello", max_tokens=2).finish().tokens


class Letters(TextStream):
    """Decodes token 0 as "a", token 1 as "b", and so on, and records the tokens."""

    def __init__(self) -> None:
        self.pushed: list[int] = []

    def push(self, ids: Any) -> str:
        self.pushed += ids
        return "".join(chr(ord("a") + token) for token in ids)

    def finish(self) -> str:
        return ""


def assembler(stops: tuple[str, ...] = ()) -> tuple[TextAssembler, Letters]:
    letters = Letters()
    return TextAssembler(letters, StopStrings(stops, False), ()), letters


class Steps:
    """An engine that writes one token of one request per step."""

    def __init__(self, text: TextAssembler) -> None:
        self.text, self.count = text, 0

    def step(self) -> None:
        self.count += 1
        self.text.watch([self.count % 26], 0)
        time.sleep(0.0005)


def test_a_thread_that_waits_for_a_whole_answer_releases_the_lock_between_rounds() -> None:
    text, letters = assembler()
    steps, run = Steps(text), SimpleNamespace(finish_reason=None)
    shared: Any = SharedEngine(steps)  # type: ignore[arg-type]
    thread = threading.Thread(target=shared.drive, args=(run, None), daemon=True)
    thread.start()
    for _ in range(20):
        before = steps.count
        with shared.lock.hold():
            here = steps.count
            time.sleep(0.005)
            assert steps.count == here, "the engine was stepped while another thread held the lock"
        deadline = time.monotonic() + SECONDS
        while steps.count <= before and time.monotonic() < deadline:
            time.sleep(0.0005)
        assert steps.count > before
    run.finish_reason = "length"
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert not letters.pushed, "the text was decoded before it was read"
    assert len(text.pieces) == steps.count == len(letters.pushed)


def test_no_round_is_lost_while_text_is_decoded() -> None:
    text, letters = assembler()
    count, found = 20_000, []

    def write() -> None:
        for number in range(count):
            text.watch([number % 26], 0)

    thread = threading.Thread(target=write)
    thread.start()
    while thread.is_alive() or text.has_news:
        while text.has_news:
            found.append(text.pieces.popleft().tokens[0])
    assert found == [number % 26 for number in range(count)] == letters.pushed
