"""Simulates setups over the answers of a trace, by replaying it on the simulated clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from outpace.card.inline import ClockedDrafter, InlineWorker, SimulatedClock
from outpace.card.worker import DraftWorker, ObservedModel
from outpace.core import registry
from outpace.core.drafting import BuildContext
from outpace.core.errors import UserError
from outpace.core.sampling import Sampling
from outpace.core.stats import RoundStats, RunStats, summarize
from outpace.core.types import Drafter, Request
from outpace.drafters import build_drafter
from outpace.engine.engine import Engine, EngineOptions
from outpace.engine.sequence import TokenSequence
from outpace.simulate.models import IndexedAnswer, IndexedTrace, RecordedGreedy, ReplayDraft, ReplayTarget, index_trace
from outpace.simulate.setups import PLAIN, PassCosts, Setup
from outpace.simulate.trace import Trace, spread

_SEARCH_ANSWERS = 6  # answers on which a draft length is chosen


@dataclass(frozen=True)
class Outcome:
    """The result of a setup at one cost. `seconds` are simulated, in the costs' unit; prefill takes no time.

    The idle values are shares of `seconds`.
    """

    setup: Setup
    costs: str
    ratio: float
    seconds: float
    tokens: int
    figures: RunStats
    target_idle: float
    draft_idle: float
    draft_length: int | None = None
    rows_per_token: float = 1.0  # rows of the target's passes per emitted token
    speedup: float = 1.0  # over plain decoding at the same costs
    by_task: Mapping[str, float] = field(default_factory=dict)  # seconds per token
    speedups: Mapping[str, float] = field(default_factory=dict)  # by task
    delay: float | None = None  # of the link to the drafter, in target passes; None: the method has no link

    @property
    def seconds_per_token(self) -> float:
        """Simulated seconds per emitted token."""
        return self.seconds / self.tokens


def simulate(
    trace: Trace,
    chosen: Sequence[Setup],
    costs: Sequence[PassCosts],
    devices: int = 2,
    progress: Callable[[str, int, int], None] = lambda what, done, all: None,
    delays: Sequence[float] = (0.0,),
) -> Iterator[Outcome]:
    """Yield the outcome of every setup at all costs, and at all `delays` (in target passes) if its drafter runs in
    parallel; the first setup must be plain decoding.

    RuntimeError if a text differs from the recorded one, which would be a bug.
    """
    if devices not in (1, 2):
        raise UserError(f"devices is {devices}, it must be 1 or 2")
    if devices == 1 and any(delays):
        raise UserError("a delay needs two devices, leave out --delay or --devices 1")
    plain: dict[str, Outcome] = {}
    runs = [
        (setup, cost, delay)
        for setup in chosen
        for delay in (delays if setup.decoder.drafting == "parallel" else (None,))
        for cost in costs
    ]
    for number, (setup, cost, delay) in enumerate(runs):
        progress(f"{setup.name} at {cost.name}", number, len(runs))
        indexed = index_trace(trace, setup.ranks)
        outcome = _best(indexed, setup, partial(run_setup, indexed, setup, cost, devices, delay=delay or 0.0))
        if setup.method == PLAIN:
            plain[cost.name] = outcome
        base = plain[cost.name]
        speedups = {task: base.by_task[task] / seconds for task, seconds in outcome.by_task.items()}
        speedup = base.seconds_per_token / outcome.seconds_per_token
        yield replace(outcome, speedup=speedup, speedups=speedups, delay=delay)


def _best(
    indexed: IndexedTrace, setup: Setup, run: Callable[[int | None, Sequence[IndexedAnswer] | None], Outcome]
) -> Outcome:
    """Run a setup with its best draft length, which is chosen on some of the answers."""
    if not setup.lengths:
        return run(None, None)
    places = spread([answer.task for answer in indexed.answers], _SEARCH_ANSWERS)
    some, best = [indexed.answers[place] for place in places], None
    for length in setup.lengths:
        found = run(length, some)
        if best is not None and found.seconds_per_token > best.seconds_per_token * 1.05:
            break  # longer drafts only get worse
        if best is None or found.seconds_per_token < best.seconds_per_token:
            best = found
    assert best is not None
    return run(best.draft_length, None)


def run_setup(
    indexed: IndexedTrace,
    setup: Setup,
    costs: PassCosts,
    devices: int = 2,
    draft_length: int | None = None,
    some: Sequence[IndexedAnswer] | None = None,
    delay: float = 0.0,
) -> Outcome:
    """Replay a setup over all answers, or `some` of them, sequentially in one engine. `delay`: time that levels and
    corrections travel between the devices, in target passes."""
    draft = ReplayDraft(indexed, costs.draft)
    clock = _Clock(draft.seconds, costs.target, shared=devices == 1, delay=delay * costs.target(1))
    drafter, worker = _parts(setup, draft, clock)
    target: Any = ReplayTarget(indexed)
    if worker is None:  # else the worker advances the clock
        target = ObservedModel(target, clock.run_target)
    options = EngineOptions(nodes=setup.nodes, rows=max(setup.nodes, 64), chunk=1 << 16, batch=1, reuse=False)
    steps: list[RoundStats] = []
    seconds: dict[str, float] = defaultdict(float)  # by task, as are tokens
    tokens: dict[str, int] = defaultdict(int)
    with Engine(target, drafter, worker, options, lambda: clock.now) as engine:
        for answer in indexed.answers if some is None else some:
            started = clock.now
            run = _write(engine, answer, setup, draft_length, clock)
            if worker is not None and worker.failure is not None:
                raise worker.failure
            if tuple(run.tokens) != answer.tokens:
                raise RuntimeError(f"{setup.name} wrote another text than the recorded one")
            steps += run.history.steps
            seconds[answer.task] += clock.now - started
            tokens[answer.task] += len(answer.tokens)
    total, total_tokens = sum(seconds.values()), sum(tokens.values())
    return Outcome(
        setup,
        costs.name,
        costs.ratio,
        total,
        total_tokens,
        replace(summarize(steps), draft_seconds=clock.draft_busy, target_seconds=clock.target_busy),
        target_idle=1 - clock.target_busy / total,
        draft_idle=1 - clock.draft_busy / total,
        draft_length=draft_length,
        rows_per_token=sum(step.verified_rows for step in steps) / total_tokens,
        by_task={task: seconds[task] / tokens[task] for task in tokens},
    )


@dataclass
class _Clock(SimulatedClock):
    """A clock that stops during prefill."""

    is_reading: bool = False

    def __post_init__(self) -> None:
        cost = self.target_seconds
        self.target_seconds = lambda rows: 0.0 if self.is_reading else cost(rows)


def _parts(setup: Setup, draft: ReplayDraft, clock: SimulatedClock) -> tuple[Drafter | None, DraftWorker | None]:
    """Return the drafter for sequential drafting or the worker for parallel drafting, as the setup needs."""
    if setup.decoder.drafting is None:
        return None, None
    drafter = build_drafter(setup.drafter, BuildContext(draft), setup.options)
    if setup.decoder.drafting == "parallel":
        return None, InlineWorker(drafter, clock)
    return ClockedDrafter(drafter, clock), None


def _write(
    engine: Engine, answer: IndexedAnswer, setup: Setup, draft_length: int | None, clock: _Clock
) -> TokenSequence:
    """Write one answer. Its prefill takes no time."""
    options = dict(setup.options) | ({} if draft_length is None else {"draft_length": draft_length})
    request = Request(answer.prompt, RecordedGreedy(), len(answer.tokens), Sampling(answer.temperature))
    run = engine.submit(request, setup.decoder, registry.build_options(setup.decoder, options))
    clock.is_reading = True
    engine.step()  # only reads the prompt
    clock.is_reading = False
    while run.finish_reason is None:
        engine.step()
    if run.error is not None:
        raise run.error
    return run
