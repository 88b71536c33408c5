"""Runs one setup over all answers of a trace, on the simulated clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from outpace.card.inline import ClockedDrafter, ClockedModel, InlineWorker, SimulatedClock
from outpace.card.worker import DraftWorker
from outpace.core import registry
from outpace.core.drafting import BuildContext
from outpace.core.errors import UserError
from outpace.core.logits import SparseLogits
from outpace.core.sampling import GREEDY, Sampling
from outpace.core.stats import RoundStats, RunStats, summarize
from outpace.core.types import Drafter, Request
from outpace.drafters import build_drafter
from outpace.engine.engine import Engine, EngineOptions
from outpace.models.base import Model, Part
from outpace.rules import greedy
from outpace.simulate.costs import Cost, PassCosts
from outpace.simulate.indexed_trace import IndexedTrace, Script, index_trace
from outpace.simulate.models import Recorded, ReplayDraft, ReplayTarget
from outpace.simulate.setups import PLAIN, Setup
from outpace.simulate.trace import Trace


@dataclass
class Course:
    """What a setup did with the answers of one task: the rows of each pass of the target and of each forward of the
    draft model, and how often each number of them came."""

    tokens: int = 0
    passes: Counter[int] = field(default_factory=Counter)
    forwards: Counter[int] = field(default_factory=Counter)
    steps: list[RoundStats] = field(default_factory=list)

    def seconds(self, costs: PassCosts) -> tuple[float, float]:
        """Of the target and of the draft model, which work in turn."""
        return _priced(self.passes, costs.target), _priced(self.forwards, costs.draft)


class Counted(Model):
    """A draft model whose forwards are counted, by their rows."""

    def __init__(self, model: Model) -> None:
        self._model, self.forwards = model, Counter[int]()
        self.vocab_size, self.max_positions, self.device = model.vocab_size, model.max_positions, model.device
        self.draft_window = model.draft_window

    @property
    def token_bytes(self) -> int:
        return self._model.token_bytes

    def stored_bytes(self, slots: Sequence[int]) -> int:
        return self._model.stored_bytes(slots)

    def open(self, capacity: int, room: int) -> Any:
        return self._model.open(capacity, room)

    def score_held(self, forest: Sequence[Part]) -> SparseLogits:
        """Forwards that only read a text, as those of a prompt, take no time, as everywhere in the simulation."""
        if rows := sum(len(part.wanted) for part in forest):
            self.forwards[rows] += 1
        return self._model.score_held(forest)


class LiveModels:
    """The pair of a trace: its target and its draft."""

    def __init__(self, trace: Trace, target: Model, draft: Model) -> None:
        if trace.temperature:
            raise UserError("the models can repeat a trace at temperature 0 only, for a trace has no seed")
        self.scripts = _spoken(trace)
        self._target, self._draft = target, draft
        self._known: dict[tuple[str, int | None, int], dict[str, Course]] = {}

    def courses(self, setup: Setup, length: int | None, some: Sequence[Script]) -> dict[str, Course]:
        """What a setup did with these answers, by task."""
        key = setup.name, length, len(some)
        if key not in self._known:
            self._known[key] = self._follow(setup, length, some)
        return self._known[key]

    def _follow(self, setup: Setup, length: int | None, some: Sequence[Script]) -> dict[str, Course]:
        draft = Counted(self._draft)
        drafter = build_drafter(setup.drafter, BuildContext(draft), setup.options)
        values = dict(setup.options) | ({} if length is None else {"draft_length": length})
        options = registry.build_options(setup.decoder, values)
        rows = EngineOptions(nodes=setup.nodes, rows=max(setup.nodes, 64), batch=1, reuse=False)
        found: dict[str, Course] = {}
        with Engine(self._target, drafter, options=rows) as engine:
            for script in some:
                course = found.setdefault(script.task, Course())
                draft.forwards = course.forwards
                request = Request(script.prompt, greedy.build(greedy.Options()), len(script.tokens), GREEDY)
                run = engine.submit(request, setup.decoder, options)
                while run.finish_reason is None:
                    engine.step()
                if run.error is not None:
                    raise run.error
                if tuple(run.tokens) != script.tokens:
                    raise UserError(
                        "the models write another text than the trace: they are not those that it was recorded from"
                    )
                course.tokens += len(script.tokens)
                course.steps += run.history.steps
                course.passes.update(step.verified_rows for step in run.history.steps)
        return found


def _spoken(trace: Trace) -> IndexedTrace:
    """The answers in the models' own tokens."""
    return IndexedTrace(
        0,
        trace.vocab_size,
        tuple(
            Script((*a.prompt, *a.tokens), len(a.prompt), a.draft_tokens, a.draft_logprobs, task=a.task)
            for a in trace.answers
        ),
    )


def _priced(counts: Counter[int], cost: Cost) -> float:
    return sum(cost(rows) * count for rows, count in counts.items())


_SEARCHED = 6  # answers by which a draft length is chosen


@dataclass(frozen=True)
class Outcome:
    """One setup at one ratio of times. `seconds` are on the clock, in the costs' unit; shares are of that time. Prompts
    are read in no time, in all methods."""

    setup: Setup
    costs: str
    ratio: float
    seconds: float
    tokens: int
    figures: RunStats
    target_idle: float
    draft_idle: float
    draft_length: int | None = None
    rows_a_token: float = 1.0  # of the target's passes, for each written token
    speedup: float = 1.0  # over plain decoding at the same costs
    by_task: Mapping[str, float] = field(default_factory=dict)  # seconds a token
    speedups: Mapping[str, float] = field(default_factory=dict)  # by task

    @property
    def seconds_a_token(self) -> float:
        return self.seconds / self.tokens


def simulate(
    trace: Trace,
    chosen: Sequence[Setup],
    costs: Sequence[PassCosts],
    devices: int = 2,
    progress: Callable[[str, int, int], None] = lambda what, done, all: None,
    live: LiveModels | None = None,
) -> Iterator[Outcome]:
    """Every setup at all costs, setup by setup; the first must be plain decoding. RuntimeError where a text differs
    from the recorded one: that would be a bug. `live`: the models, which some setups need."""
    if devices not in (1, 2):
        raise UserError(f"devices is {devices}, it must be 1 or 2")
    plain: dict[str, Outcome] = {}
    for number, (setup, cost) in enumerate((setup, cost) for setup in chosen for cost in costs):
        progress(f"{setup.name} at {cost.name}", number, len(chosen) * len(costs))
        if setup.is_live:
            assert live is not None
            outcome = _best(live.scripts, setup, partial(_run_live, live, setup, cost))
        else:
            scripts = index_trace(trace, setup.ranks)
            outcome = _best(scripts, setup, partial(run_setup, scripts, setup, cost, devices))
        if setup.method == PLAIN:
            plain[cost.name] = outcome
        yield _compared(outcome, plain[cost.name])


def _compared(outcome: Outcome, plain: Outcome) -> Outcome:
    speedups = {task: plain.by_task[task] / seconds for task, seconds in outcome.by_task.items()}
    return replace(outcome, speedup=plain.seconds_a_token / outcome.seconds_a_token, speedups=speedups)


def _best(
    scripts: IndexedTrace, setup: Setup, run: Callable[[int | None, Sequence[Script] | None], Outcome]
) -> Outcome:
    """With the best draft length, which is found on some of the answers."""
    if not setup.lengths:
        return run(None, None)
    some, best = scripts.some(_SEARCHED), None
    for length in setup.lengths:
        found = run(length, some)
        if best is not None and found.seconds_a_token > best.seconds_a_token * 1.05:
            break  # past the best one: what follows is longer still
        if best is None or found.seconds_a_token < best.seconds_a_token:
            best = found
    assert best is not None
    return run(best.draft_length, None)


def _run_live(
    live: LiveModels,
    setup: Setup,
    costs: PassCosts,
    draft_length: int | None = None,
    some: Sequence[Script] | None = None,
) -> Outcome:
    """One setup that the models run themselves, at these costs."""
    courses = live.courses(setup, draft_length, live.scripts.scripts if some is None else some)
    spent = {task: course.seconds(costs) for task, course in courses.items()}
    target, draft = (sum(seconds) for seconds in zip(*spent.values(), strict=True))
    steps = [step for course in courses.values() for step in course.steps]
    tokens = sum(course.tokens for course in courses.values())
    figures = replace(summarize(steps), draft_seconds=draft, target_seconds=target)
    now = target + draft
    judged = sum(step.verified_rows for step in steps) / tokens
    by_task = {task: sum(seconds) / courses[task].tokens for task, seconds in spent.items()}
    idle = (draft / now, target / now)
    return Outcome(setup, costs.name, costs.ratio, now, tokens, figures, *idle, draft_length, judged, by_task=by_task)


def run_setup(
    scripts: IndexedTrace,
    setup: Setup,
    costs: PassCosts,
    devices: int = 2,
    draft_length: int | None = None,
    some: Sequence[Script] | None = None,
) -> Outcome:
    """One setup over all answers, or over `some` of them, one after the other in one engine."""
    draft = ReplayDraft(scripts, costs.draft)
    clock = _Clock(draft.seconds, costs.target, shared=devices == 1)
    drafter, worker = _parts(setup, draft, clock)
    target: Any = ReplayTarget(scripts)
    if worker is None:
        target = ClockedModel(target, clock.run_target)
    values = dict(setup.options) | ({} if draft_length is None else {"draft_length": draft_length})
    asked = scripts.scripts if some is None else some
    rows = EngineOptions(nodes=setup.nodes, rows=max(setup.nodes, 64), chunk=1 << 16, batch=1, reuse=False)
    steps: list[RoundStats] = []
    spent: dict[str, list[float]] = {}  # by task: seconds and tokens of each answer
    with Engine(target, drafter, worker, rows, lambda: clock.now) as engine:
        for script in asked:
            began = clock.now
            steps += _answer(engine, script, setup, registry.build_options(setup.decoder, values), clock)
            of_task = spent.setdefault(script.task, [0.0, 0])
            of_task[0] += clock.now - began
            of_task[1] += len(script.tokens)
    tokens = sum(len(script.tokens) for script in asked)
    target_idle, draft_idle = (1 - busy / clock.now for busy in (clock.target_busy, clock.draft_busy))
    judged = sum(step.verified_rows for step in steps) / tokens
    figures = replace(summarize(steps), draft_seconds=clock.draft_busy, target_seconds=clock.target_busy)
    idle = (target_idle, draft_idle)
    by_task = {task: seconds / written for task, (seconds, written) in spent.items()}
    return Outcome(
        setup, costs.name, costs.ratio, clock.now, tokens, figures, *idle, draft_length, judged, by_task=by_task
    )


@dataclass
class _Clock(SimulatedClock):
    """Stands still while a prompt is read."""

    is_reading: bool = False

    def __post_init__(self) -> None:
        cost = self.target_seconds
        self.target_seconds = lambda rows: 0.0 if self.is_reading else cost(rows)


def _parts(setup: Setup, draft: ReplayDraft, clock: SimulatedClock) -> tuple[Drafter | None, DraftWorker | None]:
    """The drafter in turn, if one is needed, and what moves the clock."""
    if setup.decoder.needs is None:
        return None, None
    drafter = build_drafter(setup.drafter, BuildContext(draft), setup.options)
    if setup.decoder.needs == "worker":
        return None, InlineWorker(drafter, clock)
    return ClockedDrafter(drafter, clock), None


def _answer(engine: Engine, script: Script, setup: Setup, options: Any, clock: _Clock) -> list[RoundStats]:
    """Writes one answer and compares it with the recorded one."""
    request = Request(script.prompt, Recorded(), len(script.tokens), Sampling(script.temperature))
    run = engine.submit(request, setup.decoder, options)
    clock.is_reading = True  # the first step reads the prompt, and nothing else
    while run.finish_reason is None:
        engine.step()
        clock.is_reading = False
    if run.error is not None:
        raise run.error
    worker = engine.worker
    if worker is not None and worker.failure is not None:
        raise worker.failure
    if tuple(run.tokens) != script.tokens:
        raise RuntimeError(f"{setup.name} wrote another text than the recorded one")
    return run.history.steps
