"""Long prompts with short ones and with requests that write, on a clock that passes advance by what they read: how
long each waits, and that the texts are those of single requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import pytest
from doubles import QuickToy, make_request, make_rule

from outpace.core.types import Drafter, Request
from outpace.decoders.auto import Auto
from outpace.decoders.autoregressive import Autoregressive
from outpace.decoders.speculative import Speculative
from outpace.drafters import model as draft_model
from outpace.drafters._composite import SharedTree
from outpace.drafters.ngram import NgramDrafter
from outpace.drafters.ngram import Options as NgramOptions
from outpace.engine.engine import Engine, EngineOptions
from outpace.engine.sequence import TokenSequence
from outpace.models.base import Part

CHUNK, LONG, SHORT = 64, 1500, 15


class TimedToy(QuickToy):
    """An exact toy with its own clock: each token before a row adds `slope` of the row's time. `rows`: of each pass."""

    exact, weight_bytes = True, 900

    def __init__(self, slope: float, first: float = 0.004, row: float = 0.001) -> None:
        super().__init__(16, 3, 0)
        self.now, self.slope, self.first, self.row = 0.0, slope, first, row
        self.rows: list[int] = []

    def score(self, forest: Sequence[Part]) -> Any:
        before = [(part, part.session.length + len(part.keep or ())) for part in forest]
        rows = sum(len(part.tokens) * (1 + self.slope * there) for part, there in before)
        self.now += self.first + self.row * rows
        self.rows.append(sum(len(part.tokens) for part in forest))
        return super().score(forest)

    def clock(self) -> float:
        return self.now


def answer(
    requests: Sequence[Request], slope: float, target: TimedToy | None = None, chunk: int | None = CHUNK
) -> list[TokenSequence]:
    """Run requests together until all have ended."""
    target = target or TimedToy(slope)
    options = EngineOptions(chunk=chunk, reuse=False, batch=len(requests))
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

    num_read, weight_bytes = 0, 300

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


class Beside(NamedTuple):
    """What a request that writes and prompts that are read meanwhile met. `gaps`: between its tokens, in seconds;
    `rows`: of the passes meanwhile; `first`: seconds to each prompt's first token."""

    gaps: list[float]
    rows: list[int]
    first: list[float]


def read_meanwhile(
    target: TimedToy, prompts: Sequence[Request], num_writing: int = 1, drafter: Drafter | None = None, **options: Any
) -> Beside:
    """Read prompts while other requests write."""
    method: Any = Speculative if drafter else Autoregressive
    with Engine(target, drafter, options=EngineOptions(**options), clock=target.clock) as engine:
        writing = [
            engine.submit(make_request((number,), max_tokens=4000), method, method.Options())
            for number in range(num_writing)
        ]
        while any(len(run.tokens) < 12 for run in writing):
            engine.step()
        runs = [engine.submit(request, method, method.Options()) for request in prompts]
        gaps, count = [], len(target.rows)
        while not all(run.history.first_token for run in runs):
            before, written = target.now, sum(len(run.tokens) for run in writing)
            engine.step()
            gaps.append(target.now - before)
            assert sum(len(run.tokens) for run in writing) >= written + num_writing, "all of them write in each step"
    return Beside(gaps, target.rows[count:], [run.history.first_token - run.history.submitted for run in runs])


def slow() -> TimedToy:
    """A model of 1.5B parameters on two cores."""
    return TimedToy(0.0002, first=0.05, row=0.01)


PROMPT_LENGTHS = [(2456,), (700, 2456), (3000, 40, 1200), (20,)]


@pytest.mark.parametrize("lengths", PROMPT_LENGTHS, ids=str)
@pytest.mark.parametrize("is_drafted", [False, True])
def test_a_stream_goes_on_while_prompts_are_read(lengths: tuple[int, ...], is_drafted: bool) -> None:
    """A pass takes a quarter of a second instead of 2.6, and the prompts little longer than alone."""
    drafter = draft_model.ModelDrafter(QuickToy(16, 3, 0), draft_model.Options(width=1)) if is_drafted else None
    found = read_meanwhile(slow(), [make_long(length) for length in lengths], drafter=drafter)
    assert max(found.gaps) < 0.5
    assert median(found.gaps) < 0.35
    alone = first_tokens(answer([make_long(sum(lengths), 1)], 0.0002, slow()))[0]
    assert max(found.first) < 1.6 * alone + 0.5


@pytest.mark.parametrize("num_writing", [4, 15])
def test_a_prompt_is_read_while_many_write(num_writing: int) -> None:
    """It gets as much time as they do."""
    drafter = draft_model.ModelDrafter(QuickToy(16, 3, 0), draft_model.Options(width=1))
    found = read_meanwhile(slow(), [make_long(2456)], num_writing, drafter)
    own = 0.01 * 2456 * (1 + 0.0002 * 2456 / 2)
    assert found.first[0] < 3.5 * own
    assert max(found.gaps) < 3 * (0.05 + 0.01 * 8 * num_writing)


def test_a_prompt_that_was_read_before_delays_nobody() -> None:
    target = slow()
    with Engine(target, options=EngineOptions(), clock=target.clock) as engine:
        runs = [engine.submit(make_long(2456, 2), Autoregressive, Autoregressive.Options())]
        while runs[0].finish_reason is None:
            engine.step()
        runs = [engine.submit(make_request((1,)), Autoregressive, Autoregressive.Options())]
        engine.step()
        runs.append(engine.submit(make_long(2456, 2), Autoregressive, Autoregressive.Options()))
        before = len(target.rows)
        while runs[1].finish_reason is None:
            engine.step()
    assert max(target.rows[before:]) <= 2, "no pass had more than a row for each"


def test_without_others_that_write_prompts_are_read_in_whole_chunks() -> None:
    target = slow()
    answer([make_long(2456)], 0.0, target, chunk=None)
    assert target.rows.count(256) == 9


def test_the_first_pass_beside_a_request_that_writes_is_short_too() -> None:
    """What a few rows took says little of many: here the first 20 are nearly free."""

    class Flat(TimedToy):
        def score(self, forest: Sequence[Part]) -> Any:
            free = min(20, sum(len(part.tokens) for part in forest))
            self.now -= free * self.row * 0.95
            return super().score(forest)

    found = read_meanwhile(Flat(0.0, 0.05, 0.01), [make_long(1500)])
    assert max(found.gaps) < 0.6


class Inexact(TimedToy):
    """The bits of its rows depend on the pass."""

    exact = False


def test_the_cuts_of_a_prompt_do_not_depend_on_the_clock_where_they_may_show() -> None:
    fast, slowly = (read_meanwhile(Inexact(0.0, seconds, seconds), [make_long(500)]) for seconds in (1e-6, 1.0))
    assert fast.rows == slowly.rows
    assert max(fast.rows) <= 16 + 1
    named = read_meanwhile(Inexact(0.0), [make_long(500)], chunk=200)
    assert max(named.rows) > 180, "a size that is named is kept, less what earlier tokens cost"


@pytest.mark.parametrize("rule", ["greedy", "rejection"])
def test_a_draft_reads_a_prompt_for_no_longer_than_the_others_can_wait(rule: str) -> None:
    """Its seconds for each token are the target's, by the sizes of their weights. A text that depends on when it is
    drafted must not depend on times."""
    counts = []
    for row in (0.01, 1e-5):
        target, model = TimedToy(0.0, 0.05, row), CountingToy(16, 3, 0)
        drafter, sampling = draft_model.ModelDrafter(model, draft_model.Options(width=1)), {}
        if rule == "rejection":
            sampling = {"temperature": 1.0}
        with Engine(target, drafter, options=EngineOptions(reuse=False), clock=target.clock) as engine:
            first = engine.submit(
                make_long(256, 1), Autoregressive, Autoregressive.Options()
            )  # shows what a token costs
            while first.finish_reason is None:
                engine.step()
            asked = [make_request((1,), rule, 3000, **sampling), replace(make_long(900, 40), rule=make_rule(rule))]
            asked[1] = replace(asked[1], sampling=asked[0].sampling)
            runs = [engine.submit(one, Speculative, Speculative.Options()) for one in asked]
            most = 0
            while runs[1].finish_reason is None:
                before = model.num_read
                engine.step()
                most = max(most, model.num_read - before)
            assert sum(step.drafted for step in runs[1].history.steps), "in the end it drafts"
        counts.append(most)
    most = 0.2 / (0.01 / 3)  # tokens
    assert counts[0] < (most if rule == "greedy" else 256) + 16
    assert 256 <= counts[1] < 256 + 16


@pytest.mark.parametrize("lookups", [0, 1])
def test_what_a_draft_reads_is_no_draft_step(lookups: int) -> None:
    """Its prompt, and what the target wrote while it rested, whether or not it shares the tree with lookups."""
    target = TimedToy(0.0, row=0.0)
    model = TimedToy(0.0, first=0.001, row=0.001)
    model.clock = target.clock  # type: ignore[method-assign]
    score = model.score

    def score_in_time(forest: Sequence[Part]) -> Any:
        began = model.now
        found = score(forest)
        target.now += model.now - began
        return found

    model.score = score_in_time  # type: ignore[method-assign]
    drafter = draft_model.ModelDrafter(model, draft_model.Options())
    parts = [*[NgramDrafter(NgramOptions())] * lookups, drafter]
    source = drafter.capabilities.sources[0]
    with Engine(target, SharedTree(parts), options=EngineOptions(reuse=False), clock=target.clock) as engine:
        run = engine.submit(make_long(200, max_tokens=120), Auto, Auto.Options())
        while run.finish_reason is None:
            engine.step()
        step, reading = (engine.costs.step_seconds(source, 1), engine.costs.draft_prefill_seconds(source, 200))
    assert sum(round.accepted for round in run.history.steps) > 20
    assert step == pytest.approx(0.002, rel=0.6), "a pass over one row or two"
    assert reading == pytest.approx(0.2, rel=0.1)
