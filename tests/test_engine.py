"""The engine: requests come and go between steps, faults stay with their own request, limits hold."""

from __future__ import annotations

import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import reference
from doubles import decoder_of

from outpace.card.inline import InlineWorker
from outpace.core.errors import UserError
from outpace.core.tree import TokenTree
from outpace.core.types import Commit, Request, Verify
from outpace.decoders import Autoregressive, Card, Speculative
from outpace.drafters.model import ModelDrafter
from outpace.drafters.model import Options as ModelOptions
from outpace.drafters.ngram import NgramDrafter
from outpace.drafters.ngram import Options as NgramOptions
from outpace.engine import target_runner
from outpace.engine.engine import Engine, EngineOptions
from outpace.engine.sequence import TokenSequence
from outpace.models.llama.torch.runtime import Llama
from outpace.models.toy import Toy
from outpace.rules.greedy import Greedy

TARGET = Toy(16, 3, 0)


def request(length: int = 6, max_tokens: int = 20, start: int = 0) -> Request:
    return Request(tuple((start + place) % 16 for place in range(length)), Greedy(), max_tokens)


def finish(engine: Engine, *runs: TokenSequence, most: int = 500) -> list[list[int]]:
    for _ in range(most):
        if all(run.finish_reason for run in runs):
            return [run.tokens for run in runs]
        engine.step()
    raise AssertionError("the requests did not end")


def plain(req: Request, target=TARGET) -> list[int]:
    with Engine(target) as engine:
        return finish(engine, engine.submit(req, Autoregressive, Autoregressive.Options()))[0]


def test_requests_join_and_leave_between_steps() -> None:
    with Engine(TARGET, NgramDrafter(NgramOptions()), options=EngineOptions(chunk=3, batch=2)) as engine:
        requests = [request(4 + number, 10 + 7 * number, number) for number in range(5)]
        runs = [engine.submit(req, Speculative, Speculative.Options()) for req in requests[:3]]
        for _ in range(6):
            engine.step()
            assert len(engine.running) <= 2
        runs += [engine.submit(req, Speculative, Speculative.Options()) for req in requests[3:]]
        assert finish(engine, *runs) == [plain(req) for req in requests]
        assert not engine.running
        assert not engine.waiting


def test_a_long_prompt_stalls_nobody() -> None:
    with Engine(TARGET, options=EngineOptions(chunk=4)) as engine:
        short = engine.submit(request(2, 30), Autoregressive, Autoregressive.Options())
        engine.step()
        long = engine.submit(request(41, 5), Autoregressive, Autoregressive.Options())
        before = len(short.tokens)
        for _ in range(8):
            engine.step()
        assert len(short.tokens) == before + 8
        assert long.unread > 0
        assert finish(engine, short, long) == [plain(request(2, 30)), plain(request(41, 5))]


def test_a_pass_of_which_nobody_reads_a_score_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU would else work on it while the clock has stopped."""
    waits: list[object] = []
    monkeypatch.setattr(target_runner, "_synchronize", waits.append)
    with Engine(TARGET, options=EngineOptions(chunk=4)) as engine:
        run = engine.submit(request(11, 3), Autoregressive, Autoregressive.Options())
        counts = []
        while run.finish_reason is None:
            engine.step()
            counts.append(len(waits))
    assert counts[:3] == [1, 2, 3], "ten tokens in pieces of 4, 4 and 2, behind which the last one is a tree"
    assert set(counts[3:]) == {3}


def test_an_aborted_request_leaves_the_others_alone() -> None:
    with Engine(TARGET, None, InlineWorker(ModelDrafter(TARGET, ModelOptions()))) as engine:
        runs = [engine.submit(request(5, 40, start), Card, Card.Options()) for start in range(3)]
        engine.step()
        engine.step()
        engine.abort(runs[1])
        assert runs[1].finish_reason == "abort"
        assert runs[1].tokens == plain(request(5, 40, 1))[: len(runs[1].tokens)]
        assert finish(engine, runs[0], runs[2]) == [plain(request(5, 40, 0)), plain(request(5, 40, 2))]


def test_a_coroutine_that_raises_ends_its_own_request_only() -> None:
    def decode(place, options):
        yield Verify(TokenTree(place.last_token))
        raise RuntimeError("a bug in one method")

    broken = decoder_of(decode)
    with Engine(TARGET) as engine:
        good = engine.submit(request(), Autoregressive, Autoregressive.Options())
        bad = engine.submit(request(), broken, None)
        assert finish(engine, good, bad)[0] == plain(request())
        assert bad.finish_reason == "error"
        assert "one method" in str(bad.error)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_a_pass_that_breaks_off_ends_its_requests(error: BaseException) -> None:
    target = Toy(16, 3, 0)
    with Engine(target) as engine:
        run = engine.submit(request(), Autoregressive, Autoregressive.Options())
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
        assert finish(engine, engine.submit(request(), Autoregressive, Autoregressive.Options()))[0] == plain(request())


def test_a_drafter_that_fails_in_turn_gives_one_warning_and_the_whole_text() -> None:
    class Failing(NgramDrafter):
        def grow(self, states, trees):
            raise OSError("gone")

    with Engine(TARGET, Failing(NgramOptions())) as engine, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runs = [engine.submit(request(5, 20, start), Speculative, Speculative.Options()) for start in range(2)]
        assert finish(engine, *runs) == [plain(request(5, 20, start)) for start in range(2)]
    assert [str(w.message) for w in caught] == ["the drafter failed (OSError: gone); continuing without it"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompt": ()}, "no tokens"),
        ({"prompt": (1, 99)}, "token 99, allowed are 0 to 15"),
        ({"max_tokens": 0}, "max_tokens is 0, it must be at least 1"),
    ],
)
def test_a_request_that_cannot_run_is_refused_at_once(changes, says: str) -> None:
    fields = {"prompt": (1, 2), "rule": Greedy(), "max_tokens": 4} | changes
    with Engine(TARGET) as engine, pytest.raises(UserError, match=says):
        engine.submit(Request(**fields), Autoregressive, Autoregressive.Options())


def test_a_method_without_its_drafter_is_refused() -> None:
    with Engine(TARGET) as engine, pytest.raises(UserError, match="method card needs a drafter"):
        engine.submit(request(), Card, Card.Options())


def test_the_end_of_the_context_ends_the_text_alike() -> None:
    config = replace(reference.TINY, max_positions=32)
    target = Llama.from_tensors(config, reference.random_tensors(config).__getitem__)
    req = Request(tuple(range(20)), Greedy(), 100)
    expected = plain(req, target)
    assert len(expected) == 12
    for drafter in (NgramDrafter(NgramOptions()), ModelDrafter(target, ModelOptions())):
        with Engine(target, drafter) as engine:
            run = engine.submit(req, Speculative, Speculative.Options(draft_length=8))
            assert finish(engine, run)[0] == expected
            assert run.finish_reason == "length"
        with Engine(target, None, InlineWorker(drafter)) as engine:
            assert finish(engine, engine.submit(req, Card, Card.Options()))[0] == expected
    with Engine(target) as engine, pytest.raises(UserError, match="32 tokens, the target's context holds 32"):
        engine.submit(Request(tuple(range(32)), Greedy(), 1), Autoregressive, Autoregressive.Options())


def test_the_budget_follows_the_load() -> None:
    with Engine(TARGET, options=EngineOptions(nodes=8, rows=12)) as engine:
        runs = [engine.submit(request(), Autoregressive, Autoregressive.Options()) for _ in range(3)]
        engine.step()
        engine.step()
        assert [run.context.budget for run in runs] == [4, 4, 4]


def test_a_request_that_cannot_be_opened_ends_alone() -> None:
    target = Toy(16, 3, 0)
    opened = target.open
    with Engine(target) as engine:
        target.open = lambda capacity, room: opened(capacity, room) if capacity < 100 else [][1]
        good = engine.submit(request(), Autoregressive, Autoregressive.Options())
        bad = engine.submit(request(max_tokens=200), Autoregressive, Autoregressive.Options())
        assert finish(engine, good, bad)[0] == plain(request())
        assert bad.finish_reason == "error"
        assert isinstance(bad.error, IndexError)
        assert not engine.running


def test_an_interrupt_between_two_requests_ends_both() -> None:
    class Interrupted(Greedy):
        def walk(self, tree, picks):
            raise KeyboardInterrupt

    with Engine(TARGET) as engine:
        first = engine.submit(Request((1, 2), Interrupted()), Autoregressive, Autoregressive.Options())
        second = engine.submit(request(2), Autoregressive, Autoregressive.Options())
        with pytest.raises(KeyboardInterrupt):
            finish(engine, first, second)
        assert first.finish_reason == second.finish_reason == "abort"  # the second one's storage is not known either
        assert not engine.running
        assert finish(engine, engine.submit(request(), Autoregressive, Autoregressive.Options()))[0] == plain(request())


@pytest.mark.parametrize("prompt", [1, 5])
@pytest.mark.parametrize("asks", ["nothing", "verify twice"])
def test_a_decoder_out_of_turn_ends_its_own_request(asks: str, prompt: int) -> None:
    def decode(place, options):
        if asks == "nothing":
            raise RuntimeError("at once")
        yield Verify(TokenTree(place.last_token))
        yield Verify(TokenTree(place.last_token))

    broken = decoder_of(decode)
    with Engine(TARGET) as engine:
        run = engine.submit(request(prompt), broken, None)
        finish(engine, run)
        assert run.finish_reason == "error"
        engine.step()
        assert not engine.running


def test_a_closed_engine_takes_nothing_in() -> None:
    engine = Engine(TARGET)
    engine.close()
    with pytest.raises(UserError, match="the engine is closed"):
        engine.submit(request(), Autoregressive, Autoregressive.Options())


def test_a_program_that_never_closes_its_engine_still_ends() -> None:
    program = """
from outpace.card.thread import ThreadWorker
from outpace.core.types import Request
from outpace.decoders import Card
from outpace.drafters.model import ModelDrafter, Options
from outpace.engine.engine import Engine
from outpace.models.toy import Toy
from outpace.rules.greedy import Greedy
target = Toy(16, 3, 0)
engine = Engine(target, None, ThreadWorker(ModelDrafter(target, Options())))
engine.submit(Request((1, 2, 3), Greedy(), 100), Card, Card.Options())
engine.step()
engine.step()
print("left")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "left"), done.stderr


def test_a_round_begins_when_the_one_before_was_timed_and_the_load_is_known() -> None:
    seen: list[tuple[int, int, int]] = []

    def decode(place, options):
        while True:
            seen.append((place.costs.num_rounds, place.requests, place.tokens_left))
            tree = TokenTree(place.last_token)
            picks = yield Verify(tree)
            yield Commit(tree, place.request.rule.walk(tree, picks))

    noting = decoder_of(decode)
    with Engine(TARGET, options=EngineOptions(chunk=64)) as engine:
        engine.submit(request(5, 3), noting, None)
        engine.step()
        engine.step()
        other = engine.submit(request(5, 3), Autoregressive, Autoregressive.Options())
        engine.step()
        assert other.context.requests == 2
    assert seen[:2] == [(0, 1, 3), (1, 2, 2)]
