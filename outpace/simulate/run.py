"""Simulates setups over the answers of a trace, by replaying it on the simulated clock or by running the models."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from outpace.card.inline import ClockedDrafter, InlineWorker, SimulatedClock
from outpace.card.worker import DraftWorker, ObservedModel
from outpace.core import registry
from outpace.core.drafting import BuildContext
from outpace.core.errors import UserError
from outpace.core.logits import SparseLogits
from outpace.core.sampling import Sampling
from outpace.core.stats import RoundStats, RunStats, summarize
from outpace.core.types import Drafter, Request, Rule
from outpace.drafters import build_drafter
from outpace.engine.engine import Engine, EngineOptions
from outpace.engine.sequence import TokenSequence
from outpace.models.base import Model, Part
from outpace.rules.greedy import Greedy
from outpace.simulate.costs import PassCosts
from outpace.simulate.indexed_trace import IndexedAnswer, IndexedTrace, index_trace, spread
from outpace.simulate.models import RecordedGreedy, ReplayDraft, ReplayTarget
from outpace.simulate.setups import PLAIN, Setup
from outpace.simulate.trace import Trace

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
    live: LiveModels | None = None,
    delays: Sequence[float] = (0.0,),
) -> Iterator[Outcome]:
    """Yield the outcome of every setup at all costs, and at all `delays` (in target passes) if its drafter runs in
    parallel; the first setup must be plain decoding.

    RuntimeError if a text differs from the recorded one, which would be a bug. `live` has the models that some setups
    need.
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
        if setup.is_live:
            assert live is not None
            outcome = _best(live.indexed, setup, partial(_run_live, live, setup, cost))
        else:
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
    """Replay a setup over all answers, or `some` of them, sequentially in one engine. `delay`: time that layers and
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
            started, clock.is_reading = clock.now, True
            run = _write(engine, answer, setup, RecordedGreedy(), draft_length, clock.end_prefill)
            if worker is not None and worker.failure is not None:
                raise worker.failure
            if tuple(run.tokens) != answer.tokens:
                raise RuntimeError(f"{setup.name} wrote another text than the recorded one")
            steps += run.history.steps
            seconds[answer.task] += clock.now - started
            tokens[answer.task] += len(answer.tokens)
    return _outcome(setup, costs, draft_length, steps, tokens, seconds, (clock.target_busy, clock.draft_busy))


def _outcome(
    setup: Setup,
    costs: PassCosts,
    draft_length: int | None,
    steps: Sequence[RoundStats],
    tokens: Mapping[str, int],
    seconds: Mapping[str, float],
    busy: tuple[float, float],
) -> Outcome:
    """Summarise a run. `tokens` and `seconds` are by task, `busy` the target's and the drafter's seconds of work."""
    total, total_tokens = sum(seconds.values()), sum(tokens.values())
    target_busy, draft_busy = busy
    return Outcome(
        setup,
        costs.name,
        costs.ratio,
        total,
        total_tokens,
        replace(summarize(steps), draft_seconds=draft_busy, target_seconds=target_busy),
        target_idle=1 - target_busy / total,
        draft_idle=1 - draft_busy / total,
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

    def end_prefill(self) -> None:
        """Let target passes take time again."""
        self.is_reading = False


def _parts(setup: Setup, draft: ReplayDraft, clock: SimulatedClock) -> tuple[Drafter | None, DraftWorker | None]:
    """Return the drafter for sequential drafting or the worker for parallel drafting, as the setup needs."""
    if setup.decoder.drafting is None:
        return None, None
    drafter = build_drafter(setup.drafter, BuildContext(draft), setup.options)
    if setup.decoder.drafting == "parallel":
        return None, InlineWorker(drafter, clock)
    return ClockedDrafter(drafter, clock), None


def _write(
    engine: Engine,
    answer: IndexedAnswer,
    setup: Setup,
    rule: Rule,
    draft_length: int | None,
    after_prefill: Callable[[], None] = lambda: None,
) -> TokenSequence:
    """Write one answer."""
    options = dict(setup.options) | ({} if draft_length is None else {"draft_length": draft_length})
    request = Request(answer.prompt, rule, len(answer.tokens), Sampling(answer.temperature))
    run = engine.submit(request, setup.decoder, registry.build_options(setup.decoder, options))
    engine.step()  # only reads the prompt
    after_prefill()
    while run.finish_reason is None:
        engine.step()
    if run.error is not None:
        raise run.error
    return run


@dataclass
class PassCounts:
    """What a setup did on the answers of one task: its rounds, and the number of draft forwards by rows."""

    tokens: int = 0
    forwards: Counter[int] = field(default_factory=Counter)
    steps: list[RoundStats] = field(default_factory=list)


class CountingModel:
    """A draft model that counts its forwards by rows; everything else is the wrapped model's."""

    def __init__(self, model: Model) -> None:
        self._model, self.forwards = model, Counter[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def score_held(self, forest: Sequence[Part]) -> SparseLogits:
        """Run a forward; one without logit rows, as of a prompt, takes no simulated time and is not counted."""
        if rows := sum(len(part.logit_rows) for part in forest):
            self.forwards[rows] += 1
        return self._model.score_held(forest)


class LiveModels:
    """The models of a trace, for drafters that use the target's answers on wrong branches, which no trace has.

    Lookahead's window and the phrases of Ouroboros consist of such answers. Their rounds do not depend on the costs, so
    the models run once per setup, and the counted passes are priced for every ratio of times.
    """

    def __init__(self, trace: Trace, target: Model, draft: Model) -> None:
        if trace.temperature:
            raise UserError("the models can repeat a trace at temperature 0 only, for a trace has no seed")
        answers = (
            IndexedAnswer((*a.prompt, *a.tokens), len(a.prompt), a.draft_tokens, a.draft_logprobs, task=a.task)
            for a in trace.answers
        )
        self.indexed = IndexedTrace(0, trace.vocab_size, tuple(answers))  # in the models' own tokens
        self._target, self._draft = target, draft
        self._known: dict[tuple[str, int | None, int], dict[str, PassCounts]] = {}

    def pass_counts(
        self, setup: Setup, draft_length: int | None, answers: Sequence[IndexedAnswer]
    ) -> dict[str, PassCounts]:
        """Run a setup on these answers, or return the stored result, by task."""
        key = setup.name, draft_length, len(answers)
        if key in self._known:
            return self._known[key]
        draft: Any = CountingModel(self._draft)
        drafter = build_drafter(setup.drafter, BuildContext(draft), setup.options)
        options = EngineOptions(nodes=setup.nodes, rows=max(setup.nodes, 64), batch=1, reuse=False)
        found: dict[str, PassCounts] = defaultdict(PassCounts)
        with Engine(self._target, drafter, options=options) as engine:
            for answer in answers:
                counts = found[answer.task]
                draft.forwards = counts.forwards
                run = _write(engine, answer, setup, Greedy(), draft_length)
                if tuple(run.tokens) != answer.tokens:
                    raise UserError(
                        "the models write another text than the trace: they are not those that it was recorded from"
                    )
                counts.tokens += len(answer.tokens)
                counts.steps += run.history.steps
        self._known[key] = found
        return found


def _run_live(
    live: LiveModels,
    setup: Setup,
    costs: PassCosts,
    draft_length: int | None = None,
    some: Sequence[IndexedAnswer] | None = None,
) -> Outcome:
    """Price a setup that the models run themselves; target and draft model work sequentially."""
    counts = live.pass_counts(setup, draft_length, live.indexed.answers if some is None else some)
    target, draft = dict[str, float](), dict[str, float]()  # seconds by task
    for task, of_task in counts.items():
        target[task] = sum(costs.target(step.verified_rows) for step in of_task.steps)
        draft[task] = sum(costs.draft(rows) * count for rows, count in of_task.forwards.items())
    steps = [step for of_task in counts.values() for step in of_task.steps]
    tokens = {task: of_task.tokens for task, of_task in counts.items()}
    seconds = {task: target[task] + draft[task] for task in counts}
    return _outcome(setup, costs, draft_length, steps, tokens, seconds, (sum(target.values()), sum(draft.values())))
