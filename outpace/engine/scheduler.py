"""The scheduler: admits requests in order of arrival, preempts them when memory ends, and releases finished ones.

Also prefill: what reading a token of a prompt costs, and how requests share a pass's budget for prompts. The time of a
pass is modelled as fixed + each * rows + more * (tokens before each row, summed over rows). The three are fitted to the
engine's own passes by least squares of relative errors, so that a pass which was delayed has little weight.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import sqrt
from typing import NamedTuple

import numpy as np

from outpace.engine.draft_runner import DraftRunner
from outpace.engine.earlier_texts import AnswerCache
from outpace.engine.kv_memory import KVMemory
from outpace.engine.sequence import TokenSequence

_FADE = 0.98  # weight of the past, for each new pass
_FIXED, _SLOPE = 16.0, 1 / 1500  # priors in units of a row's time: of a pass, and of a token before a row
_EXPECTED = ((1, 0), (256, 0), (256, 256 * 4000))  # (rows, tokens before them) of the passes that represent the priors
_WEIGHT = 0.2  # of each of these, relative to a timed pass
_MAX_SLOPE = 1 / 50  # largest slope
_UNIT = 1024.0  # tokens; scales the equations so that the fitted numbers have similar sizes
_MIN_SHARE = 16  # the oldest text gets at least budget / 16 tokens, however long they take


class Scheduler:
    """Keeps `waiting` (paused sequences included) and `running` in order of arrival.

    The oldest sequence is never paused while another runs, so it finishes, and then the next is the oldest.

    An interrupt may come between any two statements. Therefore a sequence enters `running` before it acquires anything
    and leaves it after everything was released, and each release may be repeated.
    """

    def __init__(
        self,
        memory: KVMemory,
        drafting: DraftRunner,
        batch: int,
        clock: Callable[[], float],
        answers: AnswerCache | None,
    ) -> None:
        """`batch` sequences run at once; `answers` stores the texts of finished ones."""
        self._memory, self._drafting, self._batch, self._clock = memory, drafting, batch, clock
        self._answers = answers
        self.waiting: deque[TokenSequence] = deque()
        self.running: list[TokenSequence] = []

    def enqueue(self, sequence: TokenSequence) -> None:
        insort(self.waiting, sequence, key=_age)

    def admit(self) -> list[TokenSequence]:
        """Start waiting sequences in order of arrival while there is memory; return those that were tried."""
        tried: list[TokenSequence] = []
        for sequence in list(self.waiting) if self.waiting else ():
            if len(self.running) >= self._batch or not self._memory.has_room(sequence):
                break
            if self._memory.should_wait(sequence):
                continue
            insort(self.running, sequence, key=_age)
            self.waiting.remove(sequence)
            tried.append(sequence)
            try:
                self._memory.open(sequence)
                self._start(sequence)
            except Exception as error:
                self.fail([sequence], error)
                self.sweep()
        return tried

    def reserve(self, rows: Iterable[tuple[TokenSequence, int]]) -> bool:
        """Reserve slots for the rows of each sequence, oldest first. Return False if memory ended, after pausing the
        youngest sequence: the caller must build its batch again."""
        for sequence, count in rows:
            try:
                if not self._memory.fit(sequence, count):
                    self._pause(self.running[-1])
                    return False
            except Exception as error:
                self.fail([sequence], error)
                return False
        return True

    def sweep(self) -> list[TokenSequence]:
        """Release finished sequences; return those that had been started."""
        done = dict.fromkeys([one for one in [*self.running, *self.waiting] if one.finish_reason is not None])
        if not done:
            return []
        started = [sequence for sequence in done if sequence in self.running or sequence.coroutine]
        for sequence in started:
            self._end(sequence)
        self.waiting = deque(sequence for sequence in self.waiting if sequence not in done)
        self.running = [sequence for sequence in self.running if sequence not in done]
        return started

    def fail(self, sequences: Sequence[TokenSequence], error: Exception, reason: str = "error") -> None:
        """End these sequences, whose rounds failed, so that the content of their sessions is unknown. Each keeps its
        tokens."""
        for sequence in sequences:
            sequence.kv.is_broken = True
            if sequence.finish_reason is None:
                sequence.error, sequence.finish_reason = error, reason

    def _start(self, sequence: TokenSequence) -> None:
        """Start a sequence that has got a session, or continue it after a pause."""
        if sequence.coroutine is None:
            sequence.history.began, sequence.history.reused = self._clock(), sequence.prefilled
            self._drafting.open(sequence)
            sequence.coroutine = sequence.decoder.decode(sequence.context, sequence.options)
        else:
            self._drafting.resume(sequence)

    def _end(self, sequence: TokenSequence) -> None:
        if sequence.coroutine:
            sequence.coroutine.close()
        sequence.coroutine = sequence.action = None  # releases the last tree and its q rows
        self._drafting.close(sequence)
        self._memory.close(sequence)
        if self._answers is not None:
            self._answers.store(sequence.request, sequence.committed)

    def _pause(self, sequence: TokenSequence) -> None:
        """Preempt a sequence: release its keys and values and its draft's until there is memory for them. Everything
        else stays: its text is read again like a prompt, and then what its decoder waits for now is done."""
        self._drafting.pause(sequence)
        self._memory.release(sequence)
        if sequence.needs_prompt_logprobs:
            sequence.history.prompt_logprobs.clear()
        insort(self.waiting, sequence, key=_age)
        self.running.remove(sequence)


def _age(sequence: TokenSequence) -> int:
    """Return the sort key for the order of arrival."""
    return sequence.key


class Span(NamedTuple):
    """Rows of one text in a pass, and the number of its tokens before them."""

    rows: int
    before: int


class PrefillCostModel:
    """`slope` is the time that each token before a row adds, as a fraction of the time of a row with none."""

    def __init__(self, learns: bool = True, untimed: int = 16) -> None:
        """With `learns` False the priors stay, so that the cuts of a text do not depend on the clock. `untimed`: rows
        that `rows_within` returns until passes were timed."""
        self._learns, self._most = learns, untimed
        self._known = np.zeros((3, 4))  # decayed sums of x x^T and of x
        self._passes = self._speeds = 0.0  # decayed sums of the passes and of expected / measured time
        self._row = 0.0  # seconds of a row with no token before it; 0: unknown
        self.slope = _SLOPE

    def learn(self, spans: Iterable[Span], seconds: float) -> None:
        if not self._learns or seconds <= 0.0:
            return
        rows = before = 0
        for span in spans:
            rows += span.rows
            before += span.rows * span.before + span.rows * (span.rows - 1) // 2
        self._speeds = _FADE * self._speeds + _expected_time(rows, before) / seconds
        self._passes = _FADE * self._passes + 1.0
        self._known = _FADE * self._known + _equation(rows, before, seconds)
        self._most = max(self._most, 2 * rows)
        self._fit()

    def rows_within(self, seconds: float) -> int:
        """Return how many rows with no token before them take this time: at least one, and at most twice as many as
        the widest timed pass had, because few rows do not tell what many cost."""
        return max(min(int(seconds / self._row), self._most), 1) if self._row else self._most

    def _fit(self) -> None:
        """Fit the time of a row, and the slope, to the passes."""
        row = self._passes / self._speeds  # seconds, if the priors are right
        expected = sum(_equation(rows, before, row * _expected_time(rows, before)) for rows, before in _EXPECTED)
        sums = self._known + _WEIGHT * expected
        _, each, more = np.linalg.solve(sums[:, :3], sums[:, 3])
        self._row = float(each) if each > 0.0 else row
        self.slope = float(min(max(more / _UNIT / each, 0.0), _MAX_SLOPE)) if each > 0.0 else _SLOPE


def _expected_time(rows: int, before: int) -> float:
    """Return the prior for the time of a pass, in units of a row's time."""
    return _FIXED + rows + _SLOPE * before


def _equation(rows: int, before: int, seconds: float) -> np.ndarray:
    """Return what a pass adds to the sums of x x^T and of x, where x . (fixed, each, more) should be 1. [3, 4]"""
    x = np.array([1.0, rows, before / _UNIT]) / seconds
    return np.outer(x, np.append(x, 1.0))


class Unread(NamedTuple):
    """Numbers of unread tokens of a text and of tokens read before them."""

    tokens: int
    before: int


def split_prefill_budget(
    texts: Sequence[Unread], budget: int, slope: float = 0.0, is_awaited: bool = False
) -> list[int]:
    """Return how many tokens of each text to read in a pass. `texts` are in order of arrival.

    `budget` is a time: that of as many tokens with none before them; each token before one adds `slope` of a token's
    time. `is_awaited`: some request has read its text and will write its first token in this pass.

    A third of the budget goes to the oldest text, so that it ends; the rest to those that are read soonest, so that a
    long prompt delays no short one. No text gets more than half while others are read. The oldest gets what the others
    leave, up to its half, except while a first token is awaited.
    """
    if not texts:
        return []
    oldest, others = texts[0], range(1, len(texts))
    third, half = -(-budget // 3), budget - budget // 2
    given = [0] * len(texts)
    left = budget - min(float(third), prefill_time(oldest, oldest.tokens, slope))
    for place in sorted(others, key=lambda other: prefill_time(texts[other], texts[other].tokens, slope)):
        if left >= 1:
            text = texts[place]
            given[place] = min(text.tokens, max(tokens_within(text, min(half, left), slope), 1))
            left = max(left - prefill_time(text, given[place], slope), 0.0)
    max_tokens = third if is_awaited else min(third + left, half if others else budget)
    given[0] = min(oldest.tokens, max(tokens_within(oldest, max_tokens, slope), -(-budget // _MIN_SHARE)))
    return given


def prefill_time(text: Unread, tokens: int, slope: float) -> float:
    """Return the time of a text's next tokens, in units of the time of a token with none before it."""
    return tokens * (1.0 + slope * (text.before + tokens / 2))


def tokens_within(text: Unread, budget: float, slope: float) -> int:
    """Return how many of a text's next tokens take as long as `budget` tokens with none before them."""
    first = 1.0 + slope * text.before
    return int(2.0 * budget / (first + sqrt(first * first + 2.0 * slope * budget)))
