"""KV memory within a budget: prefixes are reused, requests pause when memory is full, and no text changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from types import ModuleType
from typing import Any

import engine_runs
import pytest
import torch
from doubles import QuickToy, check_session, make_drafter, make_request, write
from engine_runs import num_pauses, submit
from test_library import folder
from toy import ToySession
from turns import in_turn

import outpace
from outpace.api.llm import LLM
from outpace.card.inline import InlineWorker
from outpace.core.types import LogprobsOptions, Request
from outpace.decoders.auto import Auto
from outpace.decoders.autoregressive import Autoregressive
from outpace.decoders.card import Card
from outpace.decoders.speculative import Speculative
from outpace.engine.engine import Engine, EngineOptions
from outpace.engine.sequence import StopCheck, TokenSequence
from outpace.models.base import Model, Part, chain
from outpace.models.load import Loaded, load_draft, load_model

GIB = 1 << 30
SYSTEM = tuple((7 * place * place + place) % 16 for place in range(90))


class Counting(QuickToy):
    """A toy that counts the rows that it scores."""

    def __init__(self) -> None:
        super().__init__(16, 3, 0)
        self.rows = self._before = 0

    def score(self, forest: Sequence[Part]) -> torch.Tensor:
        self.rows += sum(len(part.tokens) for part in forest)
        return super().score(forest)

    def new_rows(self) -> int:
        """Rows since the last call."""
        before, self._before = self._before, self.rows
        return self.rows - before


def slots(count: int, target: Model) -> float:
    """GiB of this number of slots."""
    return count * target.token_bytes / GIB


def finish(engine: Engine, runs: Sequence[TokenSequence], most: int = 2000) -> list[list[int]]:
    """The texts; the budget holds after every step, and finished requests hold no memory."""
    texts = engine_runs.finish(engine, *runs, most=most, after_step=lambda: check(engine))
    assert not any(hasattr(run.kv, "session") for run in runs)
    return texts


def answer(engine: Engine, *requests: Request) -> None:
    """Decode these requests together; their texts are those of plain decoding."""
    assert finish(engine, submit(engine, *requests)) == [write(engine.target, request) for request in requests]


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
    return [(key, it) for key, part, it in found if isinstance(it, ToySession) and it is not part.target_session]


@pytest.mark.parametrize("length", [75, 200, 300, 400])
def test_answers_to_one_prompt_read_it_once(length: int) -> None:
    target = Counting()
    prompt = [(place * place) % 16 for place in range(length)]
    with Engine(target) as engine:
        answer(engine, *(make_request(prompt, "gumbel", 2, temperature=1.0, choice=choice) for choice in range(5)))
    last = 43 if length == 300 else 0  # a last piece that is too short to wait for is read by each
    assert target.rows == length - 1 + 4 * last + 5 * 2


def test_a_later_turn_reads_only_what_is_new() -> None:
    target = Counting()
    with Engine(target) as engine:
        (text,) = finish(engine, submit(engine, make_request(SYSTEM, max_tokens=12)))
        target.new_rows()
        answer(engine, make_request((*SYSTEM, *text, 3, 1, 4, 1), max_tokens=5))
        # The last written token's keys and values were not stored; the prompt's last token is the first root.
        assert target.new_rows() == 1 + 3 + 5
        answer(engine, make_request(SYSTEM, max_tokens=5))
        assert target.new_rows() == 5


def test_a_shared_system_prompt_is_taken_over_or_copied() -> None:
    target = Counting()
    with Engine(target) as engine:
        answer(engine, make_request((*SYSTEM, 3), max_tokens=2))
        (left,) = engine.memory._kept
        target.new_rows()
        # Next to nothing of it is lost: taken over, although it needs more slots than were left.
        answer(engine, make_request((*SYSTEM, 5, 5), max_tokens=60))
        assert [kept.session is left.session for kept in engine.memory._kept] == [True]
        assert target.new_rows() == 1 + 60
        answer(engine, make_request((*SYSTEM, 9), max_tokens=1))  # a whole answer would be lost: copied
        assert [kept.session is left.session for kept in engine.memory._kept] == [True, False]
        assert target.new_rows() == 1
        assert all(kept.tokens[:90] == list(SYSTEM) for kept in engine.memory._kept)


def test_requests_with_one_prefix_wait_for_the_first_to_read_it() -> None:
    target = Counting()
    requests = [make_request((*SYSTEM, number), max_tokens=3) for number in range(5)]
    requests.append(make_request((1, 2, 3), max_tokens=3))
    with Engine(target, options=EngineOptions(chunk=30)) as engine:
        runs = submit(engine, *requests)
        engine.step()
        assert [run in engine.running for run in runs] == [True, False, False, False, False, True]
        assert finish(engine, runs) == [write(target, request) for request in requests]
    assert target.rows < 90 + 4 * 65 + 6 * 3  # they wait until 64 tokens are in


@pytest.mark.parametrize("method", [Speculative, Card])
def test_accepted_tokens_are_kept_and_those_after_an_end_are_not(method: ModuleType) -> None:
    """Ends inside an accepted path, by stop token, watcher and limit: what is kept is the text and nothing else."""
    target = Counting()
    text = write(target, make_request(SYSTEM, max_tokens=12))
    for number in range(1, 10):
        request = make_request(SYSTEM, max_tokens=number if number % 2 else 12)
        watch = None if number % 2 else ends_after(number)
        drafter = make_drafter("perfect", target, width=2)
        worker = InlineWorker(drafter) if method is Card else None
        with Engine(target, None if worker else drafter, worker) as engine:
            run = engine.submit(request, method, method.Options(), watch)
            assert finish(engine, [run]) == [text[:number]]
            (kept,) = engine.memory._kept
            assert kept.tokens == [*SYSTEM, *text][: len(kept.tokens)]
            assert 0 <= len(kept.tokens) - len(SYSTEM) - number + 1 <= 1
            target.new_rows()
            answer(engine, make_request((*SYSTEM, *text[:number], 3, 3), max_tokens=4))
            assert target.new_rows() <= 4 + 2


def ends_after(end: int) -> StopCheck:
    """A watcher that ends the text after a number of tokens."""
    seen: list[int] = []

    def watch(tokens: Sequence[int], drafted: int) -> int | None:
        seen.extend(tokens)
        return len(tokens) - (len(seen) - end) if len(seen) >= end else None

    return watch


def test_the_least_recently_used_is_evicted_first() -> None:
    target = Counting()
    options = EngineOptions(chunk=8, nodes=1, kv_memory=slots(3 * 40, target))
    texts = [tuple((start + 3 * place) % 16 for place in range(24)) for start in range(4)]
    with Engine(target, options=options) as engine:
        for text in texts:
            answer(engine, make_request(text, max_tokens=8))  # 24 + 8 + 8 slots
        assert [tuple(kept.tokens[:24]) for kept in engine.memory._kept] == texts[1:]
        answer(engine, make_request(tuple(range(16)) * 6, max_tokens=16))  # 120 slots: all must go
        assert len(engine.memory._kept) == 1


def test_a_request_that_reports_on_its_prompt_reads_it() -> None:
    target = Counting()
    with Engine(target) as engine:
        answer(engine, make_request(SYSTEM, max_tokens=3))
        target.new_rows()
        for reports_prompt, rows in ((True, 89 + 3), (False, 3)):
            logprobs = LogprobsOptions(2, prompt=reports_prompt)
            (run,) = submit(engine, make_request(SYSTEM, max_tokens=3, logprobs=logprobs))
            finish(engine, [run])
            assert target.new_rows() == rows
            assert [record.token for record in run.history.prompt_logprobs] == list(SYSTEM[1:]) * reports_prompt
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
            target.new_rows()
            there = len(engine.memory._kept[0].tokens)
            assert there >= min(32 * steps, 89)
            answer(engine, request)
            assert target.new_rows() == max(89 - there, 0) + 20


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
def test_keys_and_values_of_a_broken_round_are_not_reused(error: BaseException) -> None:
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
        answer(engine, request)


@pytest.mark.parametrize("budget", [None, 2300])
def test_slots_of_a_long_prompt_grow_as_it_is_read_and_count_from_the_start(budget: int | None) -> None:
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
                assert run.kv.session.slots <= max(512, 2 * run.prefilled + 256), "slots long before they are read"
            needed = sum(len(run.committed) for run in engine.running) * target.token_bytes
            assert needed <= engine.memory.used <= engine.memory.budget
        assert [run.tokens for run in runs] == [write(target, request) for request in requests]
    assert most_running == (1 if budget else 2), "the second prompt fits only when the first one's text is over"
    assert [num_pauses(run) for run in runs] == [0, 0], "what a prompt needs was promised to it"


def test_reuse_stays_within_a_key() -> None:
    """The time of a hit shows what others asked."""
    target = Counting()
    with Engine(target) as engine:
        for key, rows in ((None, 89 + 3), ("a", 89 + 3), ("b", 89 + 3), ("a", 3), (None, 3), ("b", 3)):
            target.new_rows()
            answer(engine, make_request(SYSTEM, max_tokens=3, cache_salt=key))
            assert target.new_rows() == rows
        runs = submit(engine, *(make_request(SYSTEM, max_tokens=3, cache_salt=key) for key in ("c", "d", "c")))
        engine.step()
        assert [run in engine.running for run in runs] == [True, True, False], "only the same key waits"
        finish(engine, runs)
        assert target.new_rows() == 2 * 89 + 3 * 3


def prompts(count: int, length: int = 12) -> list[tuple[int, ...]]:
    return [tuple((number * place + place * place) % 16 for place in range(length)) for number in range(count)]


def few_slots(target: Counting, count: int, **more: Any) -> EngineOptions:
    return EngineOptions(**{"nodes": 6, "rows": 60, "chunk": 16, "kv_memory": slots(count, target), **more})


METHODS = [(Autoregressive, "empty"), (Speculative, "model"), (Speculative, "both"), (Auto, "model"), (Card, "model")]


def paused() -> Iterator[Any]:
    """Each method with one of the rules, with the other in the long tests."""
    for number, (method, drafter) in enumerate(METHODS):
        for place, rule in enumerate(("greedy", "gumbel")):
            yield pytest.param(method, drafter, rule, marks=[pytest.mark.long] if (number + place) % 2 else [])


@pytest.mark.parametrize(("method", "drafter", "rule"), list(paused()))
def test_the_youngest_pauses_and_writes_the_same(method: ModuleType, drafter: str, rule: str) -> None:
    target = Counting()
    temperature = 0.0 if rule == "greedy" else 1.0
    asked = [make_request(one, rule, 200, temperature=temperature, seed=seed) for seed, one in enumerate(prompts(8))]
    offers = make_drafter(drafter, target)
    parts = (None, InlineWorker(offers)) if method is Card else (offers, None)
    with Engine(target, *parts, options=few_slots(target, 700)) as engine:
        runs = submit(engine, *asked, method=method)
        assert finish(engine, runs, 50_000) == [write(target, request) for request in asked]
    assert sum(num_pauses(run) for run in runs) > 3
    assert num_pauses(runs[0]) == 0, "the oldest never pauses"


def test_a_pause_does_not_change_log_probabilities() -> None:
    """Those of prompt and answer are those of a request that is alone."""
    target = Counting()
    report = LogprobsOptions(3, prompt=True)
    requests = [make_request(prompt, max_tokens=150, logprobs=report) for prompt in prompts(6, 40)]
    alone = []
    with Engine(target) as engine:
        for request in requests:
            alone += submit(engine, request)
            finish(engine, alone)
    for chunk in (7, 64):
        with Engine(target, options=few_slots(target, 600, chunk=chunk)) as engine:
            runs = submit(engine, *requests)
            finish(engine, runs)
        assert sum(num_pauses(run) for run in runs) > 1
        for run, other in zip(runs, alone, strict=True):
            assert run.history.logprobs == other.history.logprobs
            assert run.history.prompt_logprobs == other.history.prompt_logprobs
            assert run.tokens == other.tokens


def test_a_paused_text_is_read_once_more() -> None:
    target = Counting()
    asked = [make_request(prompt, max_tokens=300) for prompt in prompts(2)]
    with Engine(target, options=few_slots(target, 400, nodes=1, reuse=False)) as engine:
        runs = submit(engine, *asked)
        finish(engine, runs)
    assert [num_pauses(run) for run in runs] == [0, 1]
    again = target.rows - sum(len(request.prompt) - 1 + 300 for request in asked)
    assert 400 // 2 - 16 < again < 400 // 2 + 16, "what it had when the memory ended"


def test_a_request_that_cannot_get_its_memory_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may have less than the budget says."""
    target = Counting()
    asked = [make_request(prompt, max_tokens=60) for prompt in prompts(3)]
    with Engine(target, options=few_slots(target, 4000)) as engine:
        runs = submit(engine, *asked)
        engine.step()
        engine.step()

        def none_left(slots: int) -> None:
            raise MemoryError("no slots")

        monkeypatch.setattr(runs[1].kv.session, "_resize", none_left)
        finish(engine, runs)
    assert [run.finish_reason for run in runs] == ["length", "error", "length"]
    assert [run.tokens for run in runs[::2]] == [write(target, request) for request in asked[::2]]
    assert isinstance(runs[1].error, MemoryError)


@pytest.fixture(scope="module", params=["auto", "float32"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    path = folder(tmp_path_factory.mktemp("memory"), "target", max_position_embeddings=512)
    return load_model(path, dtype=request.param)


CHAT = [{"role": "user", "content": "hello world 12 " * 6}]


@pytest.mark.parametrize(
    ("tiny", "method"), in_turn(["auto", "float32"], ["card", "speculative", "autoregressive"]), indirect=["tiny"]
)
def test_reuse_changes_no_bit_of_turns_and_answers(tiny: Loaded, method: str) -> None:
    """Texts and log-probabilities over the turns of a chat and its several answers."""
    draft = None if method == "autoregressive" else load_draft("layers:0", tiny)
    worker = {"worker": "inline"} if method == "card" else {}
    answers: list[list[tuple]] = []
    for reuse in (True, False):
        rows = []
        with closing(LLM(tiny, draft, method=method, reuse=reuse, **worker)) as llm:
            talk = list(CHAT)
            for turn in range(3):
                results = llm.generate([talk], n=3, max_tokens=12, temperature=1.0, seed=turn, logprobs=3)
                rows += [(result.text, result.tokens, result.logprobs) for result in results]
                talk += [{"role": "assistant", "content": results[0].text}, {"role": "user", "content": "and 12?"}]
            kept = len(llm.engine.memory._kept)
        assert (kept > 0) == reuse
        answers.append(rows)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("path", ["taken over", "copied", "from a running one"])
def test_keys_and_values_equal_a_fresh_prefill(tiny: Loaded, path: str) -> None:
    model, ids = tiny.model, tuple(range(3, 123))
    first = Request(ids[:100], make_request((1,)).rule, 30)
    second = Request(ids, first.rule, 5 if path == "taken over" else 60)
    with Engine(model) as engine:
        (other,) = submit(engine, first)
        if path == "from a running one":
            for _ in range(8):
                engine.step()
        else:
            engine_runs.finish(engine, other)
        (run,) = submit(engine, second)
        engine.step()
        assert run.prefilled == 119
        session = run.kv.session
        engine_runs.finish(engine, run)
        text = [*ids, *run.tokens]
        length = session.length
        assert length >= len(text) - 2
        fresh = model.open(len(text), len(text))
        model.score([chain(fresh, text[:length])])
        fresh.keep(range(length))
        assert torch.equal(torch.as_tensor(session.read(length)), torch.as_tensor(fresh.read(length)))
        with Engine(model, options=EngineOptions(reuse=False)) as plain:
            assert engine_runs.finish(plain, *submit(plain, second)) == [run.tokens]


@pytest.mark.parametrize(("shared", "rest", "kept"), [(32, 40, 2), (96, 40, 2), (200, 12, 1)])
def test_a_prompt_that_shares_little_is_copied_and_leaves_the_other_text(
    tiny: Loaded, shared: int, rest: int, kept: int
) -> None:
    """As those of a chat that share only a system prompt: each is found again. What is short relative to
    the beginning that both share, as a question behind a document, is not worth a second copy of that."""
    system, rule = tuple(3 + number % 190 for number in range(shared)), make_request((1,)).rule
    prompts = [(*system, *(first + number % 30 for number in range(rest))) for first in (200, 240)]
    with Engine(tiny.model) as engine:
        for turn in range(2):
            for prompt in prompts:
                (run,) = submit(engine, Request(prompt, rule, 4))
                engine_runs.finish(engine, run)
                if turn:
                    assert run.history.reused == (len(prompt) - 1 if kept == 2 else shared)
            assert len(engine.memory._kept) == kept


def test_the_library_refuses_what_does_not_fit_and_continues(tiny: Loaded) -> None:
    with closing(LLM(tiny, method="autoregressive", kv_memory=slots(300, tiny.model))) as llm:
        with pytest.raises(
            outpace.UserError,
            match=r"prompt and answer of \d+ tokens need .* the budget is .* allow fewer tokens or a larger budget",
        ):
            llm.stream("hello", max_tokens=400)
        results = llm.generate(["hello " * count for count in range(1, 12)], max_tokens=10)
        assert all(len(result.tokens) == 10 or result.finish_reason == "stop" for result in results)
    with pytest.raises(outpace.UserError, match="kv_memory is -1"):
        LLM(tiny, method="autoregressive", kv_memory=-1)
