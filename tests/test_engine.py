"""The engine: requests come and go between steps and share its passes, faults end one request only, limits hold."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import reference
from doubles import decoder_of
from engine_runs import finish, submit
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import Toy

from outpace.card.inline import InlineWorker
from outpace.core.errors import UserError
from outpace.core.logits import SparseLogits
from outpace.core.tree import TokenTree
from outpace.core.types import Request, Row, Verify
from outpace.decoders.autoregressive import Autoregressive
from outpace.decoders.card import Card
from outpace.decoders.speculative import Speculative
from outpace.drafters.model import ModelDrafter
from outpace.drafters.model import Options as ModelOptions
from outpace.drafters.ngram import NgramDrafter
from outpace.drafters.ngram import Options as NgramOptions
from outpace.engine import target_runner
from outpace.engine.engine import Engine, EngineOptions
from outpace.engine.scheduler import PrefillCostModel, Span, Unread, prefill_time, split_prefill_budget
from outpace.models.base import Model, Part
from outpace.models.llama.torch.runtime import Llama
from outpace.rules.greedy import Greedy

TARGET = Toy(16, 3, 0)


def request(length: int = 6, max_tokens: int = 20, start: int = 0, **more: Any) -> Request:
    prompt = tuple((start + place) % 16 for place in range(length))
    return Request(**{"prompt": prompt, "rule": Greedy(), "max_tokens": max_tokens} | more)


def answer(engine: Engine, *requests: Request, method: ModuleType = Autoregressive) -> list[list[int]]:
    return finish(engine, *submit(engine, *requests, method=method))


def plain(asked: Request, target: Model = TARGET) -> list[int]:
    with Engine(target) as engine:
        return answer(engine, asked)[0]


def test_a_long_prompt_stalls_no_other_request() -> None:
    with Engine(TARGET, options=EngineOptions(chunk=4)) as engine:
        (short,) = submit(engine, request(2, 30))
        engine.step()
        (long,) = submit(engine, request(41, 5))
        before = len(short.tokens)
        for _ in range(8):
            engine.step()
        assert len(short.tokens) == before + 8
        assert long.unread > 0
        assert finish(engine, short, long) == [plain(request(2, 30)), plain(request(41, 5))]


def test_a_short_prompt_waits_for_one_pass_of_a_long_one() -> None:
    with Engine(TARGET, options=EngineOptions(chunk=16)) as engine:
        (long,) = submit(engine, request(400, 4))
        engine.step()
        (short,) = submit(engine, request(3, 4, 5))
        engine.step()
        engine.step()
        assert short.tokens
        assert long.unread > 0


def test_a_pass_without_wanted_rows_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU would else work on it while the clock has stopped."""
    waits: list[object] = []
    monkeypatch.setattr(target_runner, "_synchronize", waits.append)
    with Engine(TARGET, options=EngineOptions(chunk=4)) as engine:
        (run,) = submit(engine, request(11, 3))
        counts: list[int] = []
        finish(engine, run, after_step=lambda: counts.append(len(waits)))
    assert counts[:3] == [1, 2, 3], "ten tokens in pieces of 4, 4 and 2, behind which the last one is a tree"
    assert set(counts[3:]) == {3}


@pytest.mark.parametrize("length", [1, 6])
@pytest.mark.parametrize(("verifies", "says"), [(0, "a bug in one method"), (1, "a bug in one method"), (2, "")])
def test_a_decoder_that_fails_ends_its_own_request_only(verifies: int, says: str, length: int) -> None:
    """It raises at once or after a round, or verifies twice without a commit."""

    def decode(context: Any, options: Any) -> Any:
        for _ in range(verifies):
            yield Verify(TokenTree(context.last_token))
        if says:
            raise RuntimeError(says)

    with Engine(TARGET) as engine:
        (good,) = submit(engine, request())
        bad = engine.submit(request(length), decoder_of(decode), None)
        assert finish(engine, good, bad)[0] == plain(request())
        assert bad.finish_reason == "error"
        assert says in str(bad.error)
        engine.step()
        assert not engine.running


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_a_pass_that_breaks_off_ends_its_requests(error: BaseException) -> None:
    target = Toy(16, 3, 0)
    with Engine(target) as engine:
        (run,) = submit(engine, request())
        for _ in range(4):
            engine.step()
        score, target.score = target.score, lambda forest: (_ for _ in ()).throw(error)
        if isinstance(error, KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        else:
            engine.step()
        assert run.finish_reason == ("abort" if isinstance(error, KeyboardInterrupt) else "error")
        assert run.tokens == plain(request())[: len(run.tokens)]
        target.score = score
        assert answer(engine, request()) == [plain(request())]


def test_a_sequential_drafter_that_fails_gives_one_warning_and_the_whole_text() -> None:
    class Failing(NgramDrafter):
        def grow(self, states: Any, trees: Any) -> None:
            raise OSError("gone")

    asked = [request(5, 20, start) for start in range(2)]
    with Engine(TARGET, Failing(NgramOptions())) as engine, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert answer(engine, *asked, method=Speculative) == [plain(one) for one in asked]
    assert [str(w.message) for w in caught] == ["the drafter failed (OSError: gone); continuing without it"]


class OutsideVocabulary(NgramDrafter):
    """Proposes a good token, and one that the target does not have."""

    def __init__(self, token: int) -> None:
        super().__init__(NgramOptions())
        self.token = token

    def grow(self, states: Any, trees: Any) -> None:
        for tree in trees:
            tree.add(0, 3, -1.0)
            tree.add(0, self.token, -2.0)


@pytest.mark.parametrize("token", [16, -1])
@pytest.mark.parametrize("is_parallel", [False, True])
def test_a_drafter_that_proposes_an_unknown_token_is_given_up(token: int, is_parallel: bool) -> None:
    asked, drafter = [request(5, 20, start) for start in range(2)], OutsideVocabulary(token)
    worker = InlineWorker(drafter) if is_parallel else None
    failed = rf"token {token} is not in a vocabulary of \d+\); continuing without it"
    with Engine(TARGET, None if worker else drafter, worker) as engine, pytest.warns(UserWarning, match=failed):
        assert answer(engine, *asked, method=Card if worker else Speculative) == [plain(one) for one in asked]


class LaterLogits:
    """Logits that a device has not computed yet: reading them waits until `is_done`."""

    dtype = device = None

    def __init__(self, logits: Any, is_done: threading.Event) -> None:
        self._logits, self._is_done = logits, is_done

    def __len__(self) -> int:
        return len(self._logits)

    def __getitem__(self, rows: Any) -> LaterLogits:
        return LaterLogits(self._logits[rows], self._is_done)

    def argmax(self, axis: int) -> Any:
        assert self._is_done.wait(60), "the host waits for the device before it does its own work"
        return self._logits.argmax(axis)


class AsynchronousToy(Toy):
    """A target on a device that finishes a pass once the host has done other work."""

    is_asynchronous = True  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(16, 3, 0)
        self.is_done = threading.Event()

    def score_sparse(self, forest: Sequence[Part]) -> SparseLogits:
        self.is_done.clear()
        held = super().score_sparse(forest)
        return held._replace(values=LaterLogits(held.values, self.is_done))


def test_host_work_runs_while_the_device_computes() -> None:
    target, asked, calls = AsynchronousToy(), [request(5, 12, start) for start in range(3)], 0

    def meanwhile() -> None:
        nonlocal calls
        calls += 1
        if calls == 4:  # a request may be submitted, and another one aborted
            runs.extend(submit(engine, asked[2]))
            engine.abort(runs[0])
        target.is_done.set()

    with Engine(target) as engine:
        runs = submit(engine, *asked[:2])
        while engine.running or engine.waiting:
            engine.step(meanwhile)
    assert calls > 12
    assert [run.finish_reason for run in runs] == ["abort", "length", "length"]
    assert [run.tokens for run in runs[1:]] == [plain(one) for one in asked[1:]]
    assert runs[0].tokens == plain(asked[0])[: len(runs[0].tokens)]


@pytest.mark.parametrize(
    ("changes", "method", "says"),
    [
        ({"prompt": ()}, Autoregressive, "no tokens"),
        ({"prompt": (1, 99)}, Autoregressive, "token 99, allowed are 0 to 15"),
        ({"max_tokens": 0}, Autoregressive, "max_tokens is 0, it must be at least 1"),
        ({}, Card, "method card needs a drafter"),
    ],
)
def test_a_request_that_cannot_run_is_refused_at_once(changes: dict[str, Any], method: ModuleType, says: str) -> None:
    with Engine(TARGET) as engine, pytest.raises(UserError, match=says):
        submit(engine, request(**changes), method=method)
    with pytest.raises(UserError, match="the engine is closed"):
        submit(engine, request())


def test_the_end_of_the_context_ends_every_text_at_the_same_place() -> None:
    config = replace(reference.TINY, max_positions=32)
    target = Llama.from_tensors(config, reference.random_tensors(config).__getitem__)
    asked = request(prompt=tuple(range(20)), max_tokens=100)
    expected = plain(asked, target)
    assert len(expected) == 12
    for drafter in (NgramDrafter(NgramOptions()), ModelDrafter(target, ModelOptions())):
        with Engine(target, drafter) as engine:
            run = engine.submit(asked, Speculative, Speculative.Options(draft_length=8))
            assert finish(engine, run) == [expected]
            assert run.finish_reason == "length"
        with Engine(target, None, InlineWorker(drafter)) as engine:
            assert answer(engine, asked, method=Card) == [expected]
    with Engine(target) as engine, pytest.raises(UserError, match="32 tokens, the target's context holds 32"):
        submit(engine, request(prompt=tuple(range(32)), max_tokens=1))


def test_an_interrupt_between_two_requests_ends_both() -> None:
    class Interrupted(Greedy):
        def walk(self, tree: Any, picks: Any) -> Any:
            raise KeyboardInterrupt

    with Engine(TARGET) as engine:
        first, second = submit(engine, request(2, rule=Interrupted()), request(2))
        with pytest.raises(KeyboardInterrupt):
            finish(engine, first, second)
        assert first.finish_reason == second.finish_reason == "abort"  # the second one's storage is not known either
        assert not engine.running
        assert answer(engine, request()) == [plain(request())]


class Faulty(Greedy):
    """Raises for one request's rows once that has written two tokens."""

    def reduce(self, logits: Any, rows: Sequence[Row]) -> list[int]:
        if any(row.request.seed == 13 and len(row.committed) > 6 for row in rows):
            raise ZeroDivisionError("a rule's own mistake")
        return super().reduce(logits, rows)


def test_a_rule_that_raises_ends_its_own_request_only() -> None:
    asked = [request(prompt=(1, 2, 3, 4, start), rule=Faulty(), max_tokens=12) for start in range(4)]
    alone = [plain(one) for one in asked]
    with Engine(TARGET, options=EngineOptions(reuse=True)) as engine:
        runs = submit(engine, *asked[:2], replace(asked[2], seed=13), asked[3])
        texts = finish(engine, *runs)
        assert [run.finish_reason for run in runs] == ["length", "length", "error", "length"]
        assert isinstance(runs[2].error, ZeroDivisionError)
        assert texts == [*alone[:2], alone[2][:2], alone[3]]
        assert answer(engine, asked[2]) == [alone[2]], "nothing of it is left behind"


def test_a_watcher_that_raises_ends_its_own_request_only() -> None:
    def watch(tokens: Sequence[int], drafted: int) -> int:
        raise KeyError("a caller's own mistake")

    with Engine(TARGET) as engine:
        runs = [*submit(engine, request(2), watch=watch), *submit(engine, request(3))]
        assert finish(engine, *runs)[1] == plain(request(3))
        assert [run.finish_reason for run in runs] == ["error", "length"]
        assert isinstance(runs[0].error, KeyError)


def test_a_program_that_never_closes_its_engine_still_ends() -> None:
    program = """
from outpace.card.thread import ThreadWorker
from outpace.core.types import Request
from outpace.decoders.card import Card
from outpace.drafters.model import ModelDrafter, Options
from outpace.engine.engine import Engine
from toy import Toy
from outpace.rules.greedy import Greedy
target = Toy(16, 3, 0)
engine = Engine(target, None, ThreadWorker(ModelDrafter(target, Options())).start())
engine.submit(Request((1, 2, 3), Greedy(), 100), Card, Card.Options())
engine.step()
engine.step()
print("left")
"""
    command, here = [sys.executable, "-c", program], Path(__file__).parent
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "left"), done.stderr


UNREAD = st.lists(st.builds(Unread, st.integers(1, 400), st.integers(0, 20_000)), max_size=12)
SLOPES = st.floats(0.0, 0.02)


@settings(deadline=None)  # no test asserts a time
@given(UNREAD, st.integers(1, 300), SLOPES, st.booleans())
def test_the_prefill_budget_is_time_and_no_text_reads_more_than_is_left(
    unread: list[Unread], room: int, slope: float, is_awaited: bool
) -> None:
    given_ = split_prefill_budget(unread, room, slope, is_awaited)
    assert all(0 <= mine <= text.tokens for mine, text in zip(given_, unread, strict=True))
    if not unread:
        return
    least, longest = -(-room // 16), max(prefill_time(text, 1, slope) for text in unread)
    assert given_[0] >= min(unread[0].tokens, least), "the oldest goes on whatever its tokens take"
    taken = [prefill_time(text, mine, slope) for text, mine in zip(unread, given_, strict=True)]
    assert sum(taken) <= room + prefill_time(unread[0], least, slope) + longest
    if slope == 0.0 and len(unread) == 1 and not is_awaited:
        assert given_ == [min(unread[0].tokens, room)], "alone it has all of it"
    assert max(taken[1:], default=0.0) <= room - room // 2 + longest, "half at most while others are read"
    is_whole = given_[0] == unread[0].tokens
    assert is_whole or prefill_time(unread[0], given_[0] + 1, slope) > room / 3, "a third is the oldest's"


@pytest.mark.parametrize(
    ("remaining", "is_awaited", "expected"),
    [
        ([1000], False, [256]),
        ([1000], True, [86]),
        ([1000, 500, 60], False, [86, 110, 60]),
        ([10, 500, 60], False, [10, 128, 60]),
        ([1000, 50, 60, 70], False, [86, 50, 60, 60]),
    ],
)
def test_a_third_goes_to_the_oldest_prompt_and_the_rest_to_the_shortest(
    remaining: list[int], is_awaited: bool, expected: list[int]
) -> None:
    assert split_prefill_budget([Unread(tokens, 0) for tokens in remaining], 256, 0.0, is_awaited) == expected
    # A third of the time is a twelfth of the tokens if each comes after 3,000 others.
    long_text = [Unread(5000, 3000), Unread(60, 0), Unread(60, 0), Unread(60, 0)]
    assert split_prefill_budget(long_text, 256, 0.001) == [21, 60, 60, 45]


@pytest.mark.parametrize("slope", [0.0, 0.0005, 0.004])
def test_the_cost_of_earlier_tokens_is_learnt_from_passes(slope: float) -> None:
    chance, costs = random.Random(0), PrefillCostModel()
    for _ in range(40):
        spans = [Span(chance.randint(1, 250), chance.randint(0, 4000)) for _ in range(chance.randint(1, 4))]
        rows, before = sum(span.rows for span in spans), sum(s.rows * s.before + s.rows * s.rows / 2 for s in spans)
        held_up = 40.0 if chance.random() < 0.1 else 1.0  # others took the machine
        costs.learn(spans, held_up * 1e-4 * chance.uniform(0.95, 1.05) * (30 + rows + slope * before))
    assert costs.slope == pytest.approx(slope, rel=0.2, abs=1e-4)


def test_no_slope_is_learnt_where_chunks_may_show_or_the_clock_does_not_move() -> None:
    exact, still, other = PrefillCostModel(learns=False), PrefillCostModel(), PrefillCostModel()
    for _ in range(50):
        for costs, seconds in ((exact, 1.0), (still, 0.0), (other, 1.0)):
            costs.learn([Span(256, 4000)], seconds)
            costs.learn([Span(256, 0)], seconds)
    assert exact.slope == still.slope == PrefillCostModel().slope
    assert other.slope < exact.slope / 4
