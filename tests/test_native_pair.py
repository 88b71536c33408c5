"""The native runtime's fast path into a pass; pairs of native models with copies write plain decoding's texts."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import outpace_kernels as kernels
import pytest
import torch
from doubles import make_request
from engine_runs import finish, num_pauses, submit
from passes import NATIVE_TINIES, native_tiny, of_layers, random_parents, text

from outpace.core.drafting import BuildContext
from outpace.core.types import Adjustments, Request
from outpace.decoders.auto import Auto
from outpace.decoders.speculative import Speculative
from outpace.drafters import model as draft_model
from outpace.drafters import ngram
from outpace.drafters._composite import SharedTree
from outpace.engine.engine import Engine, EngineOptions
from outpace.engine.sequence import TokenSequence
from outpace.models.base import Part, chain
from outpace.models.llama.native.runtime import NativeLlama


def parts_of(model: NativeLlama, best: int, seed: int = 1) -> list[Part]:
    """A tree after a text, another tree below one of its nodes, and a chunk of another text with no logit rows."""
    session = model.open(200, 100)
    model.score([chain(session, text(model, 37))])
    session.keep(range(37))
    model.score([Part(session, text(model, 9, seed), random_parents(9, seed), range(9))])
    parents = [4, *(9 + parent if parent >= 0 else 4 for parent in random_parents(7, seed)[1:])]
    tree = Part(session, text(model, 7, seed + 1), parents, range(0, 7, 2), best=best)
    return [chain(model.open(100, 0), text(model, 5)), tree]


@pytest.mark.parametrize("name", NATIVE_TINIES)
def test_lists_give_the_bits_of_arrays(name: str) -> None:
    model = native_tiny(NATIVE_TINIES[name])
    got = model.score(parts_of(model, 0))
    model._skipped = np.zeros((model.num_layers, 2), bool)  # an extra argument: the pass then takes arrays
    assert torch.equal(got, model.score(parts_of(model, 0)))


@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("known", [None, 60])
def test_best_tokens_are_those_of_the_scores(count: int, known: int | None) -> None:
    """Also where another model knows fewer tokens than the output layer has rows for."""
    model = native_tiny()
    if known is not None:
        model.vocab_size = known
    held = model.score_sparse(parts_of(model, count))
    values = np.asarray(held.values)
    assert values.shape == (4, known or 97)
    assert list(held.best) == kernels.rank(values, count, [1.0] * 4, [], None, count > 1)
    assert [tokens[0] for tokens, _ in held.best] == values.argmax(-1).tolist()


def test_a_row_without_order_has_no_best_token() -> None:
    """Nor a pick that differs from the definition: the caller then reads the logits."""
    rows = np.full((4, 70), -3.0, np.float32)
    rows[0, 5], rows[1], rows[2, 6], rows[3, [64, 69]] = np.nan, -np.inf, np.inf, 2.0
    assert kernels.rank(rows, 1, [1.0] * 4, [], None, False) == [([], []), ([], []), ([], []), ([64], [2.0])]


SAMPLED = {"temperature": 0.8, "rule": "gumbel"}
FILTERED = {"top_k": 30, "top_p": 0.9, "min_p": 0.01}
ADJUSTED = {
    "adjustments": Adjustments(1.3, 0.4, 0.2, ((5, 2.0), (7, -30.0)), min_tokens=12),
    "stop_ids": frozenset(range(20, 60)),
}


@pytest.fixture(scope="module")
def target() -> NativeLlama:
    return native_tiny()


def without_last_layer(model: NativeLlama) -> NativeLlama:
    """Return a draft that is right in some places and wrong in others."""
    return of_layers(model, range(model.num_layers - 1))


def repetitive_requests(count: int, number: int = 0, **options: Any) -> list[Request]:
    """Return requests whose prompts repeat themselves here and there."""
    chance = random.Random(100 * count + number)
    found = []
    for _ in range(count):
        words = [chance.randrange(97) for _ in range(chance.randint(3, 12))]
        prompt = [*words, *words[: chance.randint(0, len(words))], *words[-2:]]
        found.append(make_request(prompt, max_tokens=chance.randint(20, 60), **options))
    return found


def write(engine: Engine, requests: Sequence[Request], decoder: Any = Auto, **options: Any) -> list[TokenSequence]:
    """Decode these requests together; their texts are those of plain decoding."""
    runs = submit(engine, *requests, method=decoder, **options)
    for request, written in zip(requests, finish(engine, *runs), strict=True):
        assert written == plain_tokens(engine.target, request)
    return runs


def plain_tokens(target: NativeLlama, request: Request) -> list[int]:
    with Engine(target) as engine:
        return finish(engine, *submit(engine, request))[0]


def drafted(target: NativeLlama, draft: NativeLlama, draft_options: Any = None, **options: Any) -> Engine:
    """Return an engine that drafts by copies and by a model, as little as pays."""
    model = draft_model.build(draft_options or draft_model.Options(), given=BuildContext(draft=draft, target=target))
    drafter = SharedTree([ngram.NgramDrafter(ngram.Options(branches=2)), model])
    engine = Engine(target, drafter, options=EngineOptions(chunk=16, **options))
    rounds = {"1": 1.0, "2": 1.01, "8": 1.05, "16": 1.1}
    times = {"plain": rounds, "rounds": rounds, "draft": {"model": {"1": 0.05}, "ngram": {"1": 0.001}}}
    engine.costs.load_state_dict(times | {"trust": {}, "acceptance": {}})
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
    for run in runs:
        assert sum(step.emitted for step in run.history.steps) == len(run.history.sources) == len(run.tokens)


@pytest.mark.parametrize("name", ["windows", "gemma"])
@pytest.mark.parametrize("options", [{}, SAMPLED])
def test_windows_and_other_rotations_do_not_change_the_text(name: str, options: dict[str, Any]) -> None:
    model = native_tiny(NATIVE_TINIES[name])
    with drafted(model, without_last_layer(model)) as engine:
        write(engine, repetitive_requests(4, 9, **options))


def test_a_text_that_was_cut_can_be_continued(target: NativeLlama) -> None:
    """A stop string cuts a round; what was accepted after the cut is dropped from both models' sessions."""
    (request,) = repetitive_requests(1)
    whole = plain_tokens(target, request)
    for most in (3, 7, 11, len(whole) - 1):
        written: list[int] = []

        def watch(tokens: Sequence[int], drafted: int, written: list[int] = written, most: int = most) -> int | None:
            written += tokens
            return len(tokens) - (len(written) - most) if len(written) >= most else None

        with drafted(target, without_last_layer(target)) as engine:
            (run,) = submit(engine, request, method=Auto, watch=watch)
            assert finish(engine, run) == [whole[:most]]
            assert run.finish_reason == "stop"
            write(engine, [replace(request, prompt=(*request.prompt, *whole[:most]))])


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
            write(engine, [request])


def test_requests_that_pause_because_memory_is_full_write_their_texts(target: NativeLlama) -> None:
    requests = [replace(one, max_tokens=90) for one in repetitive_requests(4, 1)]
    draft = without_last_layer(target)
    slots = target.session_bytes(128) + draft.session_bytes(512)
    with drafted(target, draft, batch=4, kv_memory=2.2 * slots / 2**30, reuse=False) as engine:
        runs = write(engine, requests)
    assert any(num_pauses(run) for run in runs)
