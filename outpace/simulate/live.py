"""Methods that ask the target about wrong branches, which no trace answers: the recorded models themselves run them.

Lookahead's window of guesses and the phrases of Ouroboros are made of what the target says there. Their rounds do not
depend on what passes cost, so they run once, and what they did is priced for every ratio of times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outpace.core import registry
from outpace.core.errors import UserError
from outpace.core.logits import Held
from outpace.core.needs import Given
from outpace.core.sampling import GREEDY
from outpace.core.stats import Step
from outpace.core.types import Request
from outpace.engine.build import build_drafter
from outpace.engine.engine import Engine, EngineOptions
from outpace.models.base import Model, Part
from outpace.rules import greedy
from outpace.simulate.costs import Cost, PassTimes
from outpace.simulate.indexed_trace import IndexedTrace, Script
from outpace.simulate.setups import Setup
from outpace.simulate.trace import Trace


@dataclass
class Course:
    """What a setup did with the answers of one task: the rows of each pass of the target and of each forward of the
    draft model, and how often each number of them came."""

    tokens: int = 0
    passes: Counter[int] = field(default_factory=Counter)
    forwards: Counter[int] = field(default_factory=Counter)
    steps: list[Step] = field(default_factory=list)

    def seconds(self, costs: PassTimes) -> tuple[float, float]:
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

    def score_held(self, forest: Sequence[Part]) -> Held:
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
        drafter = build_drafter(setup.drafter, Given(draft), setup.options)
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
