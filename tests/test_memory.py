"""Keys and values within a budget, and texts that start from what others left: less is read, nothing else changes."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from doubles import QuickToy, check_session, make_drafter, make_request, write
from turns import one_of

from outpace.card.inline import InlineWorker
from outpace.core.errors import UserError
from outpace.core.types import LogprobsOptions, Request
from outpace.decoders import Autoregressive, Card, Speculative
from outpace.engine.engine import Engine, EngineOptions
from outpace.engine.kv_memory import free_bytes
from outpace.engine.sequence import StopCheck, TokenSequence
from outpace.models.base import Model, Part
from outpace.models.toy import ToySession

GIB = 1 << 30
SYSTEM = tuple((7 * place * place + place) % 16 for place in range(90))


class Counting(QuickToy):
    """A toy that counts the rows that it scores."""

    def __init__(self) -> None:
        super().__init__(16, 3, 0)
        self.rows = 0

    def score(self, forest: Sequence[Part]) -> torch.Tensor:
        self.rows += sum(len(part.tokens) for part in forest)
        return super().score(forest)


def slots(count: int, target: Model) -> float:
    """GiB of this number of slots."""
    return count * target.token_bytes / GIB


def submit(engine: Engine, *requests: Request) -> list[TokenSequence]:
    return [engine.submit(request, Autoregressive, None) for request in requests]


def finish(engine: Engine, runs: Sequence[TokenSequence], most: int = 2000) -> list[list[int]]:
    """The texts; the budget holds after every step."""
    for _ in range(most):
        if all(run.finish_reason for run in runs):
            return [run.tokens for run in runs]
        engine.step()
        check(engine)
    raise AssertionError("the requests did not end")


def check(engine: Engine) -> None:
    """What is kept is what it is said to be, nothing is held twice, and all together is within the budget."""
    memory = engine.memory
    for kept in memory._kept:
        assert kept.session.length == len(kept.tokens)
        check_session(kept.session, kept.tokens)
        assert not kept.session.pending
    sessions = [run.kv.session for run in engine.running] + [kept.session for kept in memory._kept]
    assert len({id(session) for session in sessions}) == len(sessions), "one session has two owners"
    assert set(memory._open) == set(engine.running)
    assert not any(hasattr(run.kv, "session") for run in engine.waiting)
    runs = [(run, run.kv.session.slots) for run in engine.running]
    set_aside = engine.drafting.stored_bytes(runs)
    drafts = drafts_of(engine)
    assert sum(session.slots for key, session in drafts) * engine.target.token_bytes <= set_aside
    assert {key for key, session in drafts if session.slots} <= {run.key for run in engine.running}
    own = sum(session.slots for session in sessions) * engine.target.token_bytes
    assert own + set_aside == memory.used <= memory.budget


def drafts_of(engine: Engine) -> list[tuple[int, ToySession]]:
    """The drafts' sessions, with the keys of their requests; of a worker's, when it has read its mail."""
    states = [(run.key, run.draft.state) for run in (*engine.running, *engine.waiting)]
    if isinstance(engine.worker, InlineWorker):
        engine.worker._loop._read_inbox()
        states += [(key, track.state) for key, track in engine.worker._loop._requests.items()]
    parts = [(key, part) for key, state in states for part in getattr(state, "parts", [state])]
    found = [(key, part, getattr(part, "session", None)) for key, part in parts]
    return [(key, it) for key, part, it in found if isinstance(it, ToySession) and it is not part.base]


@pytest.mark.parametrize("length", [75, 200, 300, 400])
def test_answers_to_one_prompt_read_it_once(length: int) -> None:
    target = Counting()
    prompt = [(place * place) % 16 for place in range(length)]
    requests = [make_request(prompt, "gumbel", 2, temperature=1.0, choice=choice) for choice in range(5)]
    with Engine(target) as engine:
        assert finish(engine, submit(engine, *requests)) == [write(target, request) for request in requests]
    last = 43 if length == 300 else 0  # a last piece that is too short to wait for is read by each
    assert target.rows == length - 1 + 4 * last + 5 * 2


def test_a_later_turn_reads_only_what_is_new() -> None:
    target = Counting()
    first = make_request(SYSTEM, max_tokens=12)
    with Engine(target) as engine:
        (answer,) = finish(engine, submit(engine, first))
        before = target.rows
        second = make_request((*SYSTEM, *answer, 3, 1, 4, 1), max_tokens=5)
        assert finish(engine, submit(engine, second)) == [write(target, second)]
        # The last written token's keys and values were not stored; the prompt's last token is the first root.
        assert target.rows - before == 1 + 3 + 5
        before = target.rows
        again = make_request(SYSTEM, max_tokens=5)
        assert finish(engine, submit(engine, again)) == [answer[:5]]
        assert target.rows - before == 5


def test_a_common_system_prompt_is_taken_over_or_copied() -> None:
    target = Counting()
    small, large = make_request((*SYSTEM, 3), max_tokens=2), make_request((*SYSTEM, 5, 5), max_tokens=60)
    with Engine(target) as engine:
        finish(engine, submit(engine, small))
        (left,) = engine.memory._kept
        before = target.rows
        # Next to nothing of it is lost: taken over, although it needs more slots than were left.
        assert finish(engine, submit(engine, large)) == [write(target, large)]
        assert [kept.session is left.session for kept in engine.memory._kept] == [True]
        assert target.rows - before == 1 + 60
        before = target.rows
        finish(engine, submit(engine, make_request((*SYSTEM, 9), max_tokens=1)))  # a whole answer would be lost: copied
        assert [kept.session is left.session for kept in engine.memory._kept] == [True, False]
        assert target.rows - before == 1
        assert all(kept.tokens[:90] == list(SYSTEM) for kept in engine.memory._kept)


def test_a_running_request_is_copied_from_while_it_runs() -> None:
    target = Counting()
    first, second = (
        make_request(SYSTEM, max_tokens=40),
        make_request((*SYSTEM, *write(target, make_request(SYSTEM, max_tokens=40))), max_tokens=9),
    )
    with Engine(target) as engine:
        runs = submit(engine, first)
        for _ in range(21):
            engine.step()
        before = target.rows
        assert len(runs[0].tokens) == 20
        runs += submit(engine, second)
        engine.step()
        assert runs[1].prefilled == len(second.prompt) - 1
        assert target.rows - before == 1 + 40 - 20  # the other's root, and what was not there yet
        assert finish(engine, runs) == [write(target, first), write(target, second)]


def test_requests_that_begin_alike_wait_for_the_first_to_read() -> None:
    target = Counting()
    requests = [make_request((*SYSTEM, number), max_tokens=3) for number in range(5)]
    other = make_request((1, 2, 3), max_tokens=3)
    with Engine(target, options=EngineOptions(chunk=30)) as engine:
        runs = submit(engine, *requests, other)
        engine.step()
        assert [run in engine.running for run in runs] == [True, False, False, False, False, True]
        assert finish(engine, runs) == [write(target, request) for request in (*requests, other)]
    assert target.rows < 90 + 4 * 65 + 6 * 3  # they wait until 64 tokens are in


@pytest.mark.parametrize("method", [Speculative, Card])
def test_what_a_path_left_is_kept_and_what_an_end_cut_off_is_not(method) -> None:
    """Ends inside an accepted path, by stop token, watcher and limit: what is kept is the text and nothing else."""
    target = Counting()
    text = write(target, make_request(SYSTEM, max_tokens=12))
    for number in range(1, 10):
        asked = make_request(SYSTEM, max_tokens=number if number % 2 else 12)
        watch = None if number % 2 else ends_after(number)
        drafter = make_drafter("perfect", target, width=2)
        worker = InlineWorker(drafter) if method is Card else None
        with Engine(target, None if worker else drafter, worker) as engine:
            run = engine.submit(asked, method, method.Options(), watch)
            finish(engine, [run])
            assert run.tokens == text[:number]
            (kept,) = engine.memory._kept
            assert kept.tokens == [*SYSTEM, *text][: len(kept.tokens)]
            assert len(kept.tokens) >= len(SYSTEM) + number - 1
            assert len(kept.tokens) <= len(SYSTEM) + number
            before = target.rows
            follow = make_request((*SYSTEM, *text[:number], 3, 3), max_tokens=4)
            assert finish(engine, submit(engine, follow)) == [write(target, follow)]
            assert target.rows - before <= 4 + 2


def ends_after(end: int) -> StopCheck:
    """A watcher that ends the text after a number of tokens."""
    seen: list[int] = []

    def watch(tokens: Sequence[int], drafted: int) -> int | None:
        seen.extend(tokens)
        return len(tokens) - (len(seen) - end) if len(seen) >= end else None

    return watch


def test_the_longest_unused_goes_first_where_the_budget_is_small() -> None:
    target = Counting()
    options = EngineOptions(chunk=8, nodes=1, kv_memory=slots(3 * 40, target))
    texts = [tuple((start + 3 * place) % 16 for place in range(24)) for start in range(4)]
    with Engine(target, options=options) as engine:
        for text in texts:
            request = make_request(text, max_tokens=8)  # 24 + 8 + 8 slots
            assert finish(engine, submit(engine, request)) == [write(target, request)]
        assert [tuple(kept.tokens[:24]) for kept in engine.memory._kept] == texts[1:]
        large = make_request(tuple(range(16)) * 6, max_tokens=16)  # 120 slots: all must go
        assert finish(engine, submit(engine, large)) == [write(target, large)]
        assert len(engine.memory._kept) == 1


def test_what_would_be_copied_goes_last() -> None:
    target = Counting()
    options = EngineOptions(chunk=8, nodes=1, kv_memory=slots(150, target))
    with Engine(target, options=options) as engine:
        wanted, other = make_request(SYSTEM[:24], max_tokens=8), make_request(SYSTEM[50:74], max_tokens=8)
        for request in (wanted, other):
            finish(engine, submit(engine, request))
        before = target.rows
        longer = make_request((*SYSTEM[:24], 1, 1, 1), max_tokens=60)  # 95 slots: one of both has to go
        assert finish(engine, submit(engine, longer)) == [write(target, longer)]
        assert target.rows - before == 2 + 60


def test_more_requests_than_memory_are_admitted_in_turn() -> None:
    target = Counting()
    chance = random.Random(5)
    options = EngineOptions(nodes=4, chunk=8, kv_memory=slots(500, target))
    requests = []
    for number in range(30):
        start = SYSTEM[: chance.choice((0, 20, 40))]
        prompt = (*start, *(chance.randrange(16) for _ in range(chance.randint(1, 20))))
        requests.append(make_request(prompt, "gumbel", chance.randint(1, 30), temperature=1.0, seed=number))
    drafter = make_drafter("both", target, tree_nodes=16)
    with Engine(target, drafter, options=options) as engine:
        runs = [engine.submit(request, Speculative, Speculative.Options()) for request in requests]
        engine.step()
        assert 0 < len(engine.running) < 8
        assert finish(engine, runs) == [write(target, request) for request in requests]


def test_requests_that_are_over_hold_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller may hold a thousand finished requests: their keys and values do not count."""
    target, made = Counting(), []

    class Seen(ToySession):
        def __init__(self, capacity: int, room: int) -> None:
            super().__init__(capacity, room)
            made.append(weakref.ref(self))

    monkeypatch.setattr(target, "open", Seen)
    options = EngineOptions(nodes=1, chunk=8, kv_memory=slots(200, target))
    requests = [make_request([(start * k + k * k) % 16 for k in range(20)], max_tokens=10) for start in range(40)]
    with Engine(target, options=options) as engine:
        runs = submit(engine, *requests)
        while any(run.finish_reason is None for run in runs):
            engine.step()
            alive = [session for ref in made if (session := ref()) is not None]
            assert sum(session.slots for session in alive) <= 200
            del alive
    assert len(made) > 10


def test_a_request_that_can_never_fit_is_refused() -> None:
    target = Counting()
    with Engine(target, options=EngineOptions(chunk=8, nodes=1, kv_memory=slots(50, target))) as engine:
        fits = make_request(SYSTEM[:20], max_tokens=29)
        with pytest.raises(UserError, match=r"prompt and answer of 50 tokens need .* the budget is .* allow fewer"):
            submit(engine, make_request(SYSTEM[:20], max_tokens=30))
        assert not engine.waiting
        assert finish(engine, submit(engine, fits)) == [write(target, fits)]


def test_a_request_that_reports_on_its_prompt_reads_it() -> None:
    target = Counting()
    with Engine(target) as engine:
        finish(engine, submit(engine, make_request(SYSTEM, max_tokens=3)))
        before = target.rows
        asked = make_request(SYSTEM, max_tokens=3, logprobs=LogprobsOptions(2, prompt=True))
        (run,) = submit(engine, asked)
        finish(engine, [run])
        assert target.rows - before == 89 + 3
        assert [record.token for record in run.history.prompt_logprobs] == list(SYSTEM[1:])
        before = target.rows
        (run,) = submit(engine, make_request(SYSTEM, max_tokens=3, logprobs=LogprobsOptions(2)))
        finish(engine, [run])
        assert target.rows - before == 3
        assert len(run.history.logprobs) == 3


def test_an_aborted_request_leaves_what_it_had_read() -> None:
    target = Counting()
    request = make_request(SYSTEM, max_tokens=20)
    for steps in (1, 3, 6, 12):
        with Engine(target, options=EngineOptions(chunk=32)) as engine:
            (run,) = submit(engine, request)
            for _ in range(steps):
                engine.step()
            engine.abort(run)
            engine.sweep()
            check(engine)
            assert not engine.running
            before, there = target.rows, len(engine.memory._kept[0].tokens)
            assert there >= min(32 * steps, 89)
            assert finish(engine, submit(engine, request)) == [write(target, request)]
            assert target.rows - before == max(89 - there, 0) + 20


@contextmanager
def breaking(target: Counting, error: BaseException) -> Iterator[None]:
    """The target's pass breaks off after it has moved the sessions."""
    score, calls = target.score, []

    def half(forest: Sequence[Part]) -> torch.Tensor:
        score(forest)
        calls.append(len(forest))
        raise error

    target.score = half  # type: ignore[method-assign]
    try:
        yield
    finally:
        del target.score
    assert calls == [1]


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_what_a_broken_round_left_is_not_reused(error: BaseException) -> None:
    target = Counting()
    request = make_request(SYSTEM, max_tokens=20)
    with Engine(target, options=EngineOptions(chunk=32)) as engine:
        for steps in (1, 6):
            (run,) = submit(engine, request)
            for _ in range(steps):
                engine.step()
            with breaking(target, error), suppress(KeyboardInterrupt):
                engine.step()
            assert run.kv.is_broken
            engine.sweep()
            assert not engine.memory._kept
            assert not engine.memory._open
        assert finish(engine, submit(engine, request)) == [write(target, request)]


def test_without_reuse_nothing_is_kept() -> None:
    target = Counting()
    request = make_request(SYSTEM, max_tokens=4)
    with Engine(target, options=EngineOptions(reuse=False)) as engine:
        assert finish(engine, submit(engine, request, request)) == [write(target, request)] * 2
        assert not engine.memory._kept
    assert target.rows == 2 * (89 + 4)


@pytest.mark.parametrize("seed", one_of(2, range(4)))
def test_any_traffic_keeps_texts_storage_and_budget(seed: int) -> None:
    """Requests that begin like one another, ended at random, in little memory, with every method."""
    chance, target = random.Random(seed), Counting()
    drafter = make_drafter("both", target, tree_nodes=16)
    worker = InlineWorker(make_drafter("model", target, tree_nodes=16))
    options = EngineOptions(
        nodes=5, chunk=chance.choice((6, 16)), batch=4, kv_memory=slots(chance.choice((450, 1000)), target)
    )
    stems = [SYSTEM[: chance.choice((12, 30, 80))], SYSTEM[5:60], SYSTEM[:70]]
    runs: list[TokenSequence] = []
    with Engine(target, drafter, worker, options) as engine:
        for number in range(60):
            stem = chance.choice([*stems, *(run.committed for run in runs[-3:] if len(run.committed) < 120)])
            prompt = (*stem, *(chance.randrange(16) for _ in range(chance.randint(0, 6))))
            request = make_request(prompt, "gumbel", chance.randint(1, 24), temperature=1.0, seed=number % 3)
            method = chance.choice((Autoregressive, Speculative, Card))
            runs.append(engine.submit(request, method, method.Options()))
            if chance.random() < 0.2:
                engine.abort(chance.choice(runs))
            for _ in range(chance.randint(0, 8)):
                engine.step()
                check(engine)
        finish(engine, runs)
    for run in runs:
        text = write(target, run.request)
        assert run.tokens == (text if run.finish_reason != "abort" else text[: len(run.tokens)])
        assert run.error is None
    assert sum(run.finish_reason == "length" for run in runs) > 30
    assert target.rows < sum(len(run.request.prompt) + 3 * len(run.tokens) for run in runs), (
        "next to nothing was reused"
    )


def test_free_memory_is_a_number_of_bytes() -> None:
    free = free_bytes("cpu")
    assert 1 << 20 < free < 1 << 50
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        total = int(next(line for line in meminfo.read_text().splitlines() if line.startswith("MemTotal")).split()[1])
        assert free <= 1024 * total


@pytest.mark.parametrize("budget", [None, 2300])
def test_a_long_prompts_slots_are_made_as_it_is_read_and_counted_from_the_start(budget: int | None) -> None:
    target = Counting()
    prompts = [[(place * place + number * place) % 16 for place in range(1900)] for number in (0, 1)]
    requests = [make_request(prompt, "greedy", 3) for prompt in prompts]
    options = EngineOptions(kv_memory=slots(budget, target) if budget else None)
    with Engine(target, options=options) as engine:
        runs = submit(engine, *requests)
        most_running = 0
        while any(run.finish_reason is None for run in runs):
            engine.step()
            most_running = max(most_running, len(engine.running))
            for run in engine.running:
                there, read = run.kv.session.slots, run.prefilled
                assert there <= max(512, 2 * read + 256), "slots long before they are read"
            needed = sum(len(run.committed) for run in engine.running) * target.token_bytes
            assert needed <= engine.memory.used <= engine.memory.budget
        assert [run.tokens for run in runs] == [write(target, request) for request in requests]
    assert most_running == (1 if budget else 2), "the second prompt fits only when the first one's text is over"
    assert [run.history.pauses for run in runs] == [0, 0], "what a prompt needs was promised to it"
