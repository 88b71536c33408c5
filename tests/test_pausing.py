"""More requests than there is memory for: the youngest pause, are read again, and write what they would have alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from doubles import make_drafter, make_request, write
from test_memory import SYSTEM, Counting, check, ends_after, finish, slots, submit

from outpace.card.inline import InlineWorker
from outpace.core.types import LogprobsOptions, Request
from outpace.decoders import Auto, Autoregressive, Card, Speculative
from outpace.engine.engine import Engine, EngineOptions
from outpace.engine.sequence import TokenSequence


def prompts(count: int, length: int = 12) -> list[tuple[int, ...]]:
    return [tuple((number * place + place * place) % 16 for place in range(length)) for number in range(count)]


def few_slots(target: Counting, count: int, **more: Any) -> EngineOptions:
    return EngineOptions(**{"nodes": 6, "rows": 60, "chunk": 16, "kv_memory": slots(count, target), **more})


def run_all(engine: Engine, requests: Sequence[Request], decoder: ModuleType = Autoregressive) -> list[TokenSequence]:
    runs = [engine.submit(request, decoder, decoder.Options()) for request in requests]
    finish(engine, runs, 50_000)
    return runs


@pytest.mark.parametrize("count", [60, pytest.param(200, marks=pytest.mark.long)])
def test_many_requests_of_4096_tokens_in_the_memory_of_one(count: int) -> None:
    """200 of them could take 820,000 slots together; they have 5,000, and what they write needs 38,000."""
    target = Counting()
    lengths = [60 + 37 * number % 240 for number in range(count)]
    asked = [
        make_request(prompt, "gumbel", 4096, temperature=1.0, seed=seed) for seed, prompt in enumerate(prompts(count))
    ]
    with Engine(target, options=few_slots(target, 5000, batch=64)) as engine:
        runs = [
            engine.submit(request, Autoregressive, None, ends_after(length))
            for request, length in zip(asked, lengths, strict=True)
        ]
        finish(engine, runs, 50_000)
        assert sum(run.history.pauses for run in runs) > 5
    for run, length in zip(runs, lengths, strict=True):
        assert run.tokens == write(target, replace(run.request, max_tokens=length))
        assert run.finish_reason == "stop"


METHODS = [(Autoregressive, "empty"), (Speculative, "model"), (Speculative, "both"), (Auto, "model"), (Card, "model")]


def paused() -> Iterator[Any]:
    """Each method with one of the rules, with the other in the long tests."""
    for number, (method, drafter) in enumerate(METHODS):
        for place, rule in enumerate(("greedy", "gumbel")):
            yield pytest.param(method, drafter, rule, marks=[pytest.mark.long] if (number + place) % 2 else [])


@pytest.mark.parametrize(("method", "drafter", "rule"), list(paused()))
def test_the_youngest_pauses_and_writes_the_same(method: ModuleType, drafter: str, rule: str) -> None:
    target = Counting()
    requests = [
        make_request(prompt, rule, 200, temperature=0.0 if rule == "greedy" else 1.0, seed=number)
        for number, prompt in enumerate(prompts(8))
    ]
    offers = make_drafter(drafter, target)
    parts = (None, InlineWorker(offers)) if method is Card else (offers, None)
    with Engine(target, *parts, options=few_slots(target, 700)) as engine:
        runs = run_all(engine, requests, method)
    assert [run.tokens for run in runs] == [write(target, request) for request in requests]
    assert sum(run.history.pauses for run in runs) > 3
    assert runs[0].history.pauses == 0, "the oldest never pauses"


def test_a_pause_is_not_seen_in_what_is_reported() -> None:
    """Log-probabilities of prompt and answer are those of a request that is alone."""
    target = Counting()
    report = LogprobsOptions(3, prompt=True)
    requests = [make_request(prompt, max_tokens=150, logprobs=report) for prompt in prompts(6, 40)]
    with Engine(target) as engine:
        alone = [run_all(engine, [request])[0] for request in requests]
    for chunk in (7, 64):
        with Engine(target, options=few_slots(target, 600, chunk=chunk)) as engine:
            runs = run_all(engine, requests)
        assert sum(run.history.pauses for run in runs) > 1
        for run, other in zip(runs, alone, strict=True):
            assert run.history.logprobs == other.history.logprobs
            assert run.history.prompt_logprobs == other.history.prompt_logprobs
            assert run.tokens == other.tokens


def test_a_text_is_read_again_after_a_pause_and_no_more_than_that() -> None:
    target = Counting()
    first, second = (make_request(prompt, max_tokens=300) for prompt in prompts(2))
    with Engine(target, options=few_slots(target, 400, nodes=1, reuse=False)) as engine:
        runs = run_all(engine, [first, second])
        assert [run.history.pauses for run in runs] == [0, 1]
    there = sum(len(request.prompt) - 1 + 300 for request in (first, second))
    again = target.rows - there
    assert 400 // 2 - 16 < again < 400 // 2 + 16, "what it had when the memory ended"


def test_who_is_called_off_in_a_pause_is_over() -> None:
    target = Counting()
    requests = [make_request(prompt, max_tokens=300) for prompt in prompts(3)]
    drafter = make_drafter("model", target)
    with Engine(target, drafter, options=few_slots(target, 1200)) as engine:
        runs = [engine.submit(request, Speculative, Speculative.Options()) for request in requests]
        while not runs[2].history.pauses:
            engine.step()
        assert runs[2] in engine.waiting
        written = list(runs[2].tokens)
        engine.abort(runs[2])
        assert runs[2] in engine.sweep()
        assert runs[2].coroutine is None
        finish(engine, runs)
        check(engine)
    assert runs[2].tokens == written
    assert [run.tokens for run in runs[:2]] == [write(target, request) for request in requests[:2]]


def test_a_request_that_cannot_get_its_memory_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may have less than the budget says."""
    target = Counting()
    requests = [make_request(prompt, max_tokens=60) for prompt in prompts(3)]
    with Engine(target, options=few_slots(target, 4000)) as engine:
        runs = submit(engine, *requests)
        engine.step()
        engine.step()

        def none_left(slots: int) -> None:
            raise MemoryError("no slots")

        monkeypatch.setattr(runs[1].kv.session, "_resize", none_left)
        finish(engine, runs)
    assert [run.finish_reason for run in runs] == ["length", "error", "length"]
    assert [run.tokens for run in runs[::2]] == [write(target, request) for request in requests[::2]]
    assert isinstance(runs[1].error, MemoryError)


def test_reuse_stays_within_a_key() -> None:
    """The time of a hit shows what others asked."""
    target = Counting()
    with Engine(target) as engine:
        for key, rows in ((None, 89 + 3), ("a", 89 + 3), ("b", 89 + 3), ("a", 3), (None, 3), ("b", 3)):
            before, request = target.rows, make_request(SYSTEM, max_tokens=3, cache_salt=key)
            assert finish(engine, submit(engine, request)) == [write(target, request)]
            assert target.rows - before == rows
        keys = ("c", "d", "c")
        before, requests = target.rows, [make_request(SYSTEM, max_tokens=3, cache_salt=key) for key in keys]
        runs = submit(engine, *requests)
        engine.step()
        assert [run in engine.running for run in runs] == [True, True, False], "who would wait for another of its key"
        finish(engine, runs)
        assert target.rows - before == 2 * 89 + 3 * 3
