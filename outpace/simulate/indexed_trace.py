"""A trace in small numbers: every answer's tokens counted from 0, so that a row of scores is short.

A text begins with a token that names its answer; so the models that replay it are functions of the text alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from outpace.core.errors import UserError
from outpace.simulate.trace import Trace


@dataclass(frozen=True)
class Script:
    """One answer: `text` is its name, prompt and tokens; the answer begins at `start`."""

    text: tuple[int, ...]
    start: int
    draft_tokens: np.ndarray  # [tokens, ranks]
    draft_logprobs: np.ndarray
    temperature: float = 0.0  # at which it was written
    task: str = ""

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.text[: self.start]

    @property
    def tokens(self) -> tuple[int, ...]:
        """The answer."""
        return self.text[self.start :]


@dataclass(frozen=True)
class IndexedTrace:
    """All answers. A text's first token, less `names`, is its number."""

    names: int
    vocab_size: int
    scripts: tuple[Script, ...]

    def some(self, count: int) -> tuple[Script, ...]:
        """At most `count` of them, evenly spread over each task's."""
        return tuple(self.scripts[number] for number in _spread([script.task for script in self.scripts], count))


def index_trace(trace: Trace, ranks: int | None = None) -> IndexedTrace:
    """Renumbers a trace's tokens; of the draft's tokens at each place only the best `ranks` are kept (None: all)."""
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for answer in trace.answers:
        offered = answer.draft_tokens[:, :ranks]
        together = np.concatenate([np.array(answer.prompt), np.array(answer.tokens), offered.ravel()])
        numbers = np.unique(together, return_inverse=True)[1]
        asked, written, rest = np.split(numbers, np.cumsum([len(answer.prompt), len(answer.tokens)]))
        parts.append((asked, written, rest.reshape(offered.shape)))
    names = max(int(part.max()) + 1 for some in parts for part in some)
    scripts = []
    for number, (answer, (asked, written, rows)) in enumerate(zip(trace.answers, parts, strict=True)):
        text = (names + number, *asked.tolist(), *written.tolist())
        logprobs = answer.draft_logprobs[:, :ranks]
        scripts.append(Script(text, len(asked) + 1, rows, logprobs, trace.temperature, answer.task))
    return IndexedTrace(names, names + len(scripts), tuple(scripts))


def limit_trace(trace: Trace, answers: int | None, tasks: Sequence[str] = ()) -> Trace:
    """The trace with these tasks' answers alone, and at most so many of them, evenly spread over each task's."""
    chosen = [answer for answer in trace.answers if not tasks or answer.task in tasks]
    if not chosen:
        known = sorted({answer.task for answer in trace.answers})
        raise UserError(f"the trace has no answers of {', '.join(tasks)}, it has {', '.join(known)}")
    if answers is not None:
        chosen = [chosen[number] for number in _spread([answer.task for answer in chosen], answers)]
    return replace(trace, answers=tuple(chosen))


def _spread(tasks: Sequence[str], count: int) -> list[int]:
    """At most so many answers of these tasks, evenly spread over each one's, however they take turns."""
    if count >= len(tasks):
        return list(range(len(tasks)))
    by_task = sorted(range(len(tasks)), key=lambda number: tasks[number])
    return sorted(by_task[number * len(tasks) // count] for number in range(count))
