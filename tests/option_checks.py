"""The fast checks that mistakes in options, rejection, stop strings and reuse must fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from doubles import QuickToy, chi_square, decode, make_drafter, make_request, write
from engine_runs import num_pauses
from enumerating import (
    PROMPT,
    TARGETS,
    Enumerating,
    Shape,
    draft_of,
    exact_chances,
    go_every_way,
    rule_of,
)
from test_memory import drafts_of
from test_options import OPTIONS, TARGET, wishes_of
from torch import Tensor
from twins import WIDE, answer_all, nearly, write_slowly

from outpace.core import noise
from outpace.core.types import LogprobsOptions
from outpace.decoders.autoregressive import Autoregressive
from outpace.decoders.speculative import Speculative
from outpace.drafters.model import ModelDrafter, Options
from outpace.engine.engine import Engine, EngineOptions
from outpace.engine.sequence import TokenSequence
from outpace.models.base import Part

WISHES = [wishes_of(option)[place][0] for place in (1, 3) for option in OPTIONS]  # greedy ones, then sampled ones
# Written before any mistake is put in, by the slow twins.
EXPECTED = [write_slowly(TARGET, wish) for wish in WISHES]
STEM = tuple((7 * place * place + place) % 16 for place in range(90))
ENDS = {number: write(TARGET, make_request((*STEM, number, 3), max_tokens=6))[3] for number in (1, 2)}
TURNS = [make_request((*STEM, number, 3), stop_ids=frozenset({ENDS[number]})) for number in (1, 2, 2)]
TEXTS = [write(TARGET, request) for request in TURNS]
DRAWN = [("garbage", "top-k"), ("partial", "bare"), ("siblings", "bare")]


def option_differences() -> Iterator[str]:
    """Answers to wishes of every kind, in one batch, against the slow twins'."""
    for method, width in (("autoregressive", 1), ("speculative", 3)):
        drafter = make_drafter("both", TARGET, width=width)
        for written, slow in zip(answer_all(WISHES, method, drafter, target=TARGET), EXPECTED, strict=True):
            if (written.tokens, written.text, written.reason) != (slow.tokens, slow.text, slow.reason):
                yield f"{method}: another text than the slow twin's"
            if not nearly(written.logprobs, slow.logprobs, 1e-9):
                yield f"{method}: other log-probabilities than the slow twin's"
            if not nearly(written.prompt_logprobs, slow.prompt_logprobs, 1e-9):
                yield f"{method}: other log-probabilities of the prompt than the slow twin's"


def rejection_differences() -> Iterator[str]:
    """Enumerate every way to write a text; then count texts with the library's own keys. No key may decide twice."""
    for draft, asked in DRAWN:
        found = go_every_way(rule_of("rejection", Enumerating()), draft, Shape(levels=2), asked).texts
        exact = exact_chances(asked, 2)
        if found.keys() != exact.keys() or any(abs(found[text] - exact[text]) > 1e-12 for text in exact):
            yield f"draft {draft}, {asked}: another distribution"
    drafter = ModelDrafter(draft_of("garbage", TARGETS[3]), Options(width=1, floor=0.0))
    requests = [make_request(PROMPT, "rejection", 2, temperature=1.0, seed=seed) for seed in range(200)]
    texts = decode(requests, "speculative", drafter, target=TARGETS[3], engine=WIDE, draft_length=2).texts
    if abs(chi_square(Counter(map(tuple, texts)), exact_chances("bare", 2))) > 4.0:
        yield "counted texts have another distribution"
    yield from key_differences(TARGETS[3], drafter)


def key_differences(target: QuickToy, drafter: Any) -> Iterator[str]:
    keys: Counter[tuple[int, ...]] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        original = noise.row_key

        def noted(*parts: int) -> int:
            keys[parts] += 1
            return original(*parts)

        patch.setattr(noise, "row_key", noted)
        for choice in range(2):
            for seed in range(2):
                request = make_request((1, 2), "rejection", 24, temperature=1.0, seed=seed, choice=choice)
                with Engine(target, drafter) as engine:
                    finish(engine, [engine.submit(request, Speculative, Speculative.Options(draft_length=3))])
    returned = [key for key, count in keys.items() if count > 1]
    if returned:
        yield f"{len(returned)} of {len(keys)} keys of random numbers come again"


def memory_differences() -> Iterator[str]:
    """Texts that begin like those before them; what an end cut off; prompts that are reported on; broken rounds."""
    target = QuickToy(16, 3, 0)
    drafter = make_drafter("perfect", target, width=1)
    with Engine(target, drafter, options=EngineOptions(chunk=40)) as parts:
        for request, text in zip(TURNS, TEXTS, strict=True):
            if finish(parts, [parts.submit(request, Speculative, Speculative.Options())]) != [text]:
                yield "a later turn has another text"
            for kept in parts.memory._kept:
                if kept.session.tokens[: kept.session.length].tolist() != [*request.prompt[:90], *kept.tokens[90:]]:
                    yield "what is kept is not what was read"
                if kept.session.length != len(kept.tokens):
                    yield "more or less is kept than is known"
        run = parts.submit(replace(TURNS[0], logprobs=LogprobsOptions(0, prompt=True)), Autoregressive, None)
        finish(parts, [run])
        if len(run.history.prompt_logprobs) != len(STEM) + 1:
            yield "the prompt's log-probabilities are not all there"
    with Engine(target, options=EngineOptions(chunk=40)) as parts:
        broken = parts.submit(TURNS[0], Autoregressive, None)
        parts.step()
        with _failing(target):
            parts.step()
        parts.sweep()
        if broken.error is None or parts.memory._kept:
            yield "what a broken round left is kept"
        if finish(parts, [parts.submit(request, Autoregressive, None) for request in TURNS]) != TEXTS:
            yield "requests that begin alike have other texts together"


def pause_differences() -> Iterator[str]:
    """More texts than there is memory for."""
    target = QuickToy(16, 3, 0)
    requests = [make_request(STEM[number:], "gumbel", 150, temperature=1.0, seed=number) for number in range(0, 80, 20)]
    options = EngineOptions(chunk=40, nodes=6, kv_memory=900 * target.token_bytes / (1 << 30))
    with Engine(target, make_drafter("perfect", target, width=1), options=options) as parts:
        runs = [parts.submit(request, Speculative, Speculative.Options()) for request in requests]
        for _ in range(2000):
            if all(run.finish_reason for run in runs):
                break
            parts.step()
            drafts = drafts_of(parts)
            own = [run.kv.session for run in parts.running] + [kept.session for kept in parts.memory._kept]
            held = sum(session.slots for session in own) + sum(session.slots for _, session in drafts)
            if max(parts.memory.used, held * target.token_bytes) > parts.memory.budget:
                yield "more memory is used than the budget allows"
            running = {run.key for run in parts.running}
            if any(session.slots for key, session in drafts if key not in running):
                yield "a waiting request still holds KV cache of its draft"
            for run in parts.running:
                if run.kv.session.tokens[: run.kv.session.length].tolist() != run.committed[: run.kv.session.length]:
                    yield "a session holds a different text than its request"
        if not any(num_pauses(run) for run in runs):
            yield "no request was paused"
        if [run.tokens for run in runs] != [write(target, request) for request in requests]:
            yield "a paused request has a different text"


def finish(engine: Engine, runs: Sequence[TokenSequence]) -> list[list[int]]:
    """Step until these requests have ended; return their texts."""
    while any(run.finish_reason is None for run in runs):
        engine.step()
    return [run.tokens for run in runs]


@contextmanager
def _failing(target: QuickToy) -> Iterator[None]:
    score = target.score

    def fail(forest: Sequence[Part]) -> Tensor:
        score(forest)
        raise RuntimeError("on purpose")

    target.score = fail  # type: ignore[method-assign]
    try:
        yield
    finally:
        del target.score


def finder(*checks: Callable[[], Iterator[str]]) -> Callable[[], str | None]:
    """The first difference that these checks find."""
    return lambda: next((difference for check in checks for difference in check()), None)


find_in_options = finder(option_differences)
find_in_rejection = finder(rejection_differences)
find_in_memory = finder(memory_differences, pause_differences)
