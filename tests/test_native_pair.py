"""A target and a draft that the native kernels run, with copies from the text: texts are those of plain decoding."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from doubles import make_request
from test_native import TINIES, tiny

from outpace.core.drafting import BuildContext
from outpace.core.types import Adjustments, Request
from outpace.decoders import Auto, Autoregressive, Speculative
from outpace.drafters import model as draft_model
from outpace.drafters import ngram
from outpace.drafters._composite import SharedTree
from outpace.engine.engine import Engine, EngineOptions
from outpace.engine.sequence import TokenSequence
from outpace.models.llama.native.runtime import NativeLlama

pytest.importorskip("outpace_kernels")
SAMPLED = {"temperature": 0.8, "rule": "gumbel"}
FILTERED = {"top_k": 30, "top_p": 0.9, "min_p": 0.01}
ADJUSTED = {
    "adjustments": Adjustments(1.3, 0.4, 0.2, ((5, 2.0), (7, -30.0)), min_tokens=12),
    "stop_ids": frozenset(range(20, 60)),
}


@pytest.fixture(scope="module")
def target() -> NativeLlama:
    return tiny(TINIES["tiny"])


def without_last_layer(model: NativeLlama) -> NativeLlama:
    """Return a draft that is right in some places and wrong in others."""
    return model.select_layers(range(model.num_layers - 1))


def repetitive_requests(count: int, number: int = 0, **options: Any) -> list[Request]:
    """Return requests whose prompts repeat themselves here and there."""
    chance = random.Random(100 * count + number)
    found = []
    for _ in range(count):
        words = [chance.randrange(97) for _ in range(chance.randint(3, 12))]
        prompt = [*words, *words[: chance.randint(0, len(words))], *words[-2:]]
        found.append(make_request(prompt, max_tokens=chance.randint(20, 60), **options))
    return found


def write(engine: Engine, requests: Sequence[Request], decoder: Any, **options: Any) -> list[TokenSequence]:
    runs = [engine.submit(request, decoder, decoder.Options(), **options) for request in requests]
    while any(run.finish_reason is None for run in runs):
        engine.step()
    assert not [run.error for run in runs if run.error]
    return runs


def plain_tokens(target: NativeLlama, request: Request) -> list[int]:
    with Engine(target) as engine:
        return write(engine, [request], Autoregressive)[0].tokens


def drafted(target: NativeLlama, draft: NativeLlama, draft_options: Any = None, **options: Any) -> Engine:
    """Return an engine that drafts by copies and by a model, as little as pays."""
    model = draft_model.build(draft_options or draft_model.Options(), given=BuildContext(draft=draft, target=target))
    drafter = SharedTree([ngram.build(ngram.Options(branches=2)), model])
    engine = Engine(target, drafter, options=EngineOptions(chunk=16, **options))
    rounds = {"1": 1.0, "2": 1.01, "8": 1.05, "16": 1.1}
    engine.costs.load_state_dict(
        {"rounds": rounds, "draft": {"model": 0.05, "ngram": 0.001}, "trust": {}, "growth": {}}
    )
    return engine


@pytest.mark.parametrize("decoder", [Auto, Speculative])
@pytest.mark.parametrize("count", [1, 3, 6])
@pytest.mark.parametrize(
    "options", [{}, SAMPLED, SAMPLED | FILTERED | {"seed": 2**63 - 1, "choice": 2**70}, ADJUSTED, SAMPLED | ADJUSTED]
)
def test_texts_are_those_of_plain_decoding(
    target: NativeLlama, decoder: Any, count: int, options: dict[str, Any]
) -> None:
    """Greedy requests share their passes with others; a full batch lets some wait."""
    requests = repetitive_requests(count, **({"stop_ids": frozenset(range(60, 75))} | options))
    requests[1::2] = repetitive_requests(count)[1::2]
    with drafted(target, without_last_layer(target), batch=4) as engine:
        runs = write(engine, requests, decoder)
    assert decoder is Auto or any(step.accepted for run in runs for step in run.history.steps)
    for request, run in zip(requests, runs, strict=True):
        assert run.tokens == plain_tokens(target, request)
        assert sum(step.emitted for step in run.history.steps) == len(run.history.sources) == len(run.tokens)


@pytest.mark.parametrize("name", ["windows", "gemma"])
@pytest.mark.parametrize("options", [{}, SAMPLED])
def test_windows_and_other_rotations_do_not_change_the_text(name: str, options: dict[str, Any]) -> None:
    model = tiny(TINIES[name])
    requests = repetitive_requests(4, 9, **options)
    with drafted(model, without_last_layer(model)) as engine:
        runs = write(engine, requests, Auto)
    assert [run.tokens for run in runs] == [plain_tokens(model, request) for request in requests]


def test_a_text_that_was_cut_can_be_continued(target: NativeLlama) -> None:
    """A stop string cuts a round; what was accepted after the cut is dropped from both models' sessions."""
    (request,) = repetitive_requests(1)
    text = plain_tokens(target, request)
    for most in (3, 7, 11, len(text) - 1):
        written: list[int] = []

        def watch(tokens: Sequence[int], drafted: int, written: list[int] = written, most: int = most) -> int | None:
            written += tokens
            return len(tokens) - (len(written) - most) if len(written) >= most else None

        rest = replace(request, prompt=(*request.prompt, *text[:most]))
        with drafted(target, without_last_layer(target)) as engine:
            (run,) = write(engine, [request], Auto, watch=watch)
            assert (run.tokens, run.finish_reason) == (text[:most], "stop")
            (again,) = write(engine, [rest], Auto)
        assert again.tokens == plain_tokens(target, rest)


@pytest.mark.parametrize("window", [0, 8])
@pytest.mark.parametrize("context", [40, 64, 4096])
def test_a_draft_with_a_shorter_context_stops_there(target: NativeLlama, context: int, window: int) -> None:
    """Drafting ends long before the text does, without a warning."""
    draft = without_last_layer(target)
    draft.max_positions = min(context, target.max_positions)
    for length in (5, 30, 50, 90):
        prompt = [7 * n % 97 for n in range(length)]
        request = make_request([*prompt, *prompt[:5]], max_tokens=80)
        with drafted(target, draft, draft_model.Options(draft_window=window)) as engine, warnings.catch_warnings():
            warnings.simplefilter("error")
            assert write(engine, [request], Auto)[0].tokens == plain_tokens(target, request)


def test_requests_that_pause_because_memory_is_full_write_their_texts(target: NativeLlama) -> None:
    requests = [replace(one, max_tokens=90) for one in repetitive_requests(4, 1)]
    draft = without_last_layer(target)
    slots = target.session_bytes(128) + draft.session_bytes(512)
    with drafted(target, draft, batch=4, kv_memory=2.2 * slots / 2**30, reuse=False) as engine:
        runs = write(engine, requests, Auto)
    assert any(run.history.pauses for run in runs)
    for request, run in zip(requests, runs, strict=True):
        assert run.tokens == plain_tokens(target, request)
