"""Renumbers a trace's tokens from 0 for each answer, so that a row of logits is short.

A text begins with a token that identifies its answer, so the models that replay it are functions of the text alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from outpace.core.errors import UserError
from outpace.simulate.trace import Trace


@dataclass(frozen=True)
class IndexedAnswer:
    """One answer: `text` is its identifying token, prompt and answer tokens; the answer begins at `start`."""

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
        return self.text[self.start :]


@dataclass(frozen=True)
class IndexedTrace:
    """All answers; the index of a text's answer is its first token minus `first_id`."""

    first_id: int
    vocab_size: int
    answers: tuple[IndexedAnswer, ...]


def index_trace(trace: Trace, ranks: int | None = None) -> IndexedTrace:
    """Renumber a trace's tokens, keeping the draft's best `ranks` tokens at each position (None: all)."""
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for answer in trace.answers:
        drafts = answer.draft_tokens[:, :ranks]
        tokens = np.concatenate([np.array(answer.prompt), np.array(answer.tokens), drafts.ravel()])
        ids = np.unique(tokens, return_inverse=True)[1]
        prompt, written, rest = np.split(ids, np.cumsum([len(answer.prompt), len(answer.tokens)]))
        parts.append((prompt, written, rest.reshape(drafts.shape)))
    first_id = max(int(part.max()) + 1 for some in parts for part in some)
    answers = []
    for number, (answer, (prompt, written, rows)) in enumerate(zip(trace.answers, parts, strict=True)):
        text = (first_id + number, *prompt.tolist(), *written.tolist())
        logprobs = answer.draft_logprobs[:, :ranks]
        answers.append(IndexedAnswer(text, len(prompt) + 1, rows, logprobs, trace.temperature, answer.task))
    return IndexedTrace(first_id, first_id + len(answers), tuple(answers))


def limit_trace(trace: Trace, answers: int | None, tasks: Sequence[str] = ()) -> Trace:
    """Keep these tasks' answers only (none: all tasks), and at most `answers` of them, evenly spread over the tasks."""
    chosen = [answer for answer in trace.answers if not tasks or answer.task in tasks]
    if not chosen:
        known = sorted({answer.task for answer in trace.answers})
        raise UserError(f"the trace has no answers of {', '.join(tasks)}, it has {', '.join(known)}")
    if answers is not None:
        chosen = [chosen[number] for number in spread([answer.task for answer in chosen], answers)]
    return replace(trace, answers=tuple(chosen))


def spread(tasks: Sequence[str], count: int) -> list[int]:
    """Return the indices of at most `count` answers with these tasks, evenly spread over each task's."""
    if count >= len(tasks):
        return list(range(len(tasks)))
    by_task = sorted(range(len(tasks)), key=lambda number: tasks[number])
    return sorted(by_task[number * len(tasks) // count] for number in range(count))
