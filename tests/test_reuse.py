"""Reuse of other texts' keys and values on a tiny Llama: every bit is the same as without."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from doubles import make_request
from engine_runs import finish, submit
from test_library import folder
from test_memory import slots
from turns import in_turn

import outpace
from outpace.api.llm import LLM
from outpace.core.types import Request
from outpace.engine.engine import Engine, EngineOptions
from outpace.models.base import chain
from outpace.models.load import Loaded, load_draft, load_model


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
            finish(engine, other)
        (run,) = submit(engine, second)
        engine.step()
        assert run.prefilled == 119
        session = run.kv.session
        finish(engine, run)
        text = [*ids, *run.tokens]
        length = session.length
        assert length >= len(text) - 2
        fresh = model.open(len(text), len(text))
        model.score([chain(fresh, text[:length])])
        fresh.keep(range(length))
        assert torch.equal(torch.as_tensor(session.read(length)), torch.as_tensor(fresh.read(length)))
        with Engine(model, options=EngineOptions(reuse=False)) as plain:
            assert finish(plain, *submit(plain, second)) == [run.tokens]


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
                finish(engine, run)
                if turn:
                    assert run.history.reused == (len(prompt) - 1 if kept == 2 else shared)
            assert len(engine.memory._kept) == kept


def test_the_library_refuses_what_does_not_fit_and_continues(tiny: Loaded) -> None:
    with closing(LLM(tiny, method="autoregressive", kv_memory=slots(300, tiny.model))) as llm:
        with pytest.raises(outpace.UserError, match="allow fewer tokens or a larger budget"):
            llm.stream("hello", max_tokens=400)
        results = llm.generate(["hello " * count for count in range(1, 12)], max_tokens=10)
        assert all(len(result.tokens) == 10 or result.finish_reason == "stop" for result in results)
    with pytest.raises(outpace.UserError, match="kv_memory is -1"):
        LLM(tiny, method="autoregressive", kv_memory=-1)
