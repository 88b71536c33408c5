"""A long prompt among short ones, on a clock that passes advance by the tokens they read: how long each waits, and that
the texts are those of single requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from doubles import QuickToy, make_request

from outpace.core.types import Request
from outpace.decoders import Autoregressive, Speculative
from outpace.drafters import model as draft_model
from outpace.engine.engine import Engine, EngineOptions
from outpace.engine.sequence import TokenSequence
from outpace.models.base import Part

CHUNK, LONG, SHORT = 64, 1500, 15


class TimedToy(QuickToy):
    """An exact toy with its own clock: each token before a row adds `slope` of the row's time."""

    exact = True

    def __init__(self, slope: float) -> None:
        super().__init__(16, 3, 0)
        self.now, self.slope = 0.0, slope

    def score(self, forest: Sequence[Part]) -> Any:
        before = [(part, part.session.length + len(part.keep or ())) for part in forest]
        self.now += 1e-3 * (4 + sum(len(part.tokens) * (1 + self.slope * there) for part, there in before))
        return super().score(forest)

    def clock(self) -> float:
        return self.now


def answer(requests: Sequence[Request], slope: float) -> list[TokenSequence]:
    """Run requests together until all have ended."""
    target = TimedToy(slope)
    options = EngineOptions(chunk=CHUNK, reuse=False, batch=len(requests))
    with Engine(target, options=options, clock=target.clock) as engine:
        runs = [engine.submit(request, Autoregressive, Autoregressive.Options()) for request in requests]
        while any(run.finish_reason is None for run in runs):
            engine.step()
    return runs


def first_tokens(runs: Sequence[TokenSequence]) -> list[float]:
    """Return the times to the first token, sorted."""
    return sorted(run.history.first_token - run.history.submitted for run in runs)


def make_long(length: int = LONG, max_tokens: int = 4) -> Request:
    return make_request([place * place % 13 for place in range(length)], max_tokens=max_tokens)


def make_short(count: int = 16, length: int = SHORT) -> list[Request]:
    return [make_request([(3 * each + place) % 11 for place in range(length)], max_tokens=4) for each in range(count)]


@pytest.mark.parametrize("slope", [0.0, 0.001, 0.01])
def test_short_prompts_wait_twice_as_long_at_most(slope: float) -> None:
    alone = first_tokens(answer(make_short(), slope))
    mixed = first_tokens(answer([make_long(), *make_short()], slope)[1:])
    assert mixed[-1] <= 2 * alone[-1], "the latest"
    assert mixed[len(mixed) // 2] <= 2 * alone[len(alone) // 2], "the median"


def test_a_long_prompt_is_not_starved_by_many_short_ones() -> None:
    target = TimedToy(0.002)
    with Engine(target, options=EngineOptions(chunk=CHUNK, reuse=False, batch=8), clock=target.clock) as engine:
        long = engine.submit(make_long(), Autoregressive, Autoregressive.Options())
        waiting = iter(make_short(count=600, length=40))
        while long.finish_reason is None:
            while len(engine.running) + len(engine.waiting) < 8:
                engine.submit(next(waiting), Autoregressive, Autoregressive.Options())
            engine.step()
    own = 1e-3 * LONG * (1 + 0.002 * LONG / 2)  # seconds of its own tokens
    assert long.history.first_token <= 5 * own, "about a third of the time is its own"


@pytest.mark.parametrize("slope", [0.0, 0.003])
def test_chunks_of_prompts_do_not_change_texts(slope: float) -> None:
    requests = [make_short(2)[0], make_long(400), *make_short(5, 60), make_long(300)]
    together = answer(requests, slope)
    assert [run.tokens for run in together] == [answer([request], slope)[0].tokens for request in requests]


class CountingToy(QuickToy):
    """A draft model that counts the tokens that it reads."""

    num_read = 0

    def score(self, forest: Sequence[Part]) -> Any:
        self.num_read += sum(len(part.tokens) for part in forest)
        return super().score(forest)


def draft(requests: Sequence[Request]) -> tuple[list[list[int]], list[int]]:
    """Run requests together by `speculative`; return their texts, and the tokens that the draft read in each step."""
    model, counts = CountingToy(16, 3, 0), []
    drafter = draft_model.ModelDrafter(model, draft_model.Options())
    with Engine(QuickToy(16, 3, 0), drafter, options=EngineOptions(reuse=False, chunk=4000)) as engine:
        runs = [engine.submit(request, Speculative, Speculative.Options()) for request in requests]
        while any(run.finish_reason is None for run in runs):
            before = model.num_read
            engine.step()
            counts.append(model.num_read - before)
        drafted = sum(step.accepted for step in runs[0].history.steps)
    assert drafted, "the long text was drafted for in the end"
    return [run.tokens for run in runs], counts


def test_a_draft_reads_a_long_text_in_pieces_while_others_wait() -> None:
    long, short = make_long(max_tokens=40), make_long(9, max_tokens=40)
    alone, whole = draft([long])
    mixed, pieces = draft([long, short])
    assert max(whole) > 1500, "at once where no request waits"
    assert max(pieces) < 256 + 100, "a chunk a step, and what is drafted for the other"
    assert sum(count > 256 for count in pieces) >= 5
    assert mixed == [*alone, *draft([short])[0]]
