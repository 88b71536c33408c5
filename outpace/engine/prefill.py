"""What the tokens before a token add to its time in a pass, learnt from the engine's own passes.

A pass over rows is held to take fixed + each * rows + more * (tokens before all rows together). The three are fitted
by least squares of relative errors, so that a pass that others held up for long says little.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import sqrt
from typing import NamedTuple

import numpy as np

_FADE = 0.98  # of the past's weight, a pass
_FIXED, _SLOPE = 16.0, 1 / 1500  # what is held before anything was timed: in times of a row, and of a row a token
_EXPECTED = ((1, 0), (256, 0), (256, 256 * 4000))  # passes, by rows and tokens before them, that this is known from
_WEIGHT = 0.2  # of each of these, against a pass that was timed
_MOST = 1 / 50  # of a row's time, that a token before it may be held to add
_UNIT = 1024.0  # tokens, that the fitted numbers are of one size


class Span(NamedTuple):
    """Some rows of one text in a pass, and the tokens of it that stand before them."""

    rows: int
    before: int


class PrefillCostModel:
    """`slope`: of the time of a row with nothing before it, what each token before it adds."""

    def __init__(self, learns: bool = True) -> None:
        """`learns` False: what is expected holds, so that how a text is cut does not depend on the clock."""
        self._learns = learns
        self._known = np.zeros((3, 4))  # sums of x x^T and of x
        self._passes = self._speeds = 0.0  # how many, faded, and the sum of how fast they were
        self.slope = _SLOPE

    def learn(self, spans: Iterable[Span], seconds: float) -> None:
        """A pass over these rows took so long."""
        if not self._learns or seconds <= 0.0:
            return
        rows = before = 0
        for span in spans:
            rows += span.rows
            before += span.rows * span.before + span.rows * (span.rows - 1) // 2
        self._speeds = _FADE * self._speeds + _expected_time(rows, before) / seconds
        self._passes = _FADE * self._passes + 1.0
        self._known = _FADE * self._known + _equation(rows, before, seconds)
        self.slope = self._fitted()

    def _fitted(self) -> float:
        """The slope that explains the passes best."""
        row = self._passes / self._speeds  # seconds, as far as what is expected holds
        expected = sum(_equation(rows, before, row * _expected_time(rows, before)) for rows, before in _EXPECTED)
        sums = self._known + _WEIGHT * expected
        _, each, more = np.linalg.solve(sums[:, :3], sums[:, 3])
        return float(min(max(more / _UNIT / each, 0.0), _MOST)) if each > 0.0 else _SLOPE


def _expected_time(rows: int, before: int) -> float:
    """In times of a row with nothing before it."""
    return _FIXED + rows + _SLOPE * before


def _equation(rows: int, before: int, seconds: float) -> np.ndarray:
    """What a pass adds to the sums: of x x^T and of x, with x so that fixed, each and more give 1. [3, 4]"""
    x = np.array([1.0, rows, before / _UNIT]) / seconds
    return np.outer(x, np.append(x, 1.0))


_LEAST = 16  # of the room: the part that the oldest gets at least in tokens, however long they take


class Unread(NamedTuple):
    """What is not read yet of a request's text, and how many tokens of it are."""

    tokens: int
    before: int


def split_prefill_budget(texts: Sequence[Unread], room: int, slope: float = 0.0, is_awaited: bool = False) -> list[int]:
    """How many tokens of each text are read in a pass, the texts in the order in which their requests came.

    `room` is the time of so many tokens with nothing before them; each token before one adds `slope` of that to its
    time. `is_awaited`: some request has read its text and is to write its first token in this pass.

    A third of the room is the oldest's, so that it ends; the rest goes to those that are read the soonest, so that a
    long prompt keeps no short one waiting. Nobody takes more than half while others read. What they leave is the
    oldest's, up to its half, but not while somebody awaits a first token.
    """
    if not texts:
        return []
    oldest, others = texts[0], range(1, len(texts))
    third, half = -(-room // 3), room - room // 2
    given = [0] * len(texts)
    left = room - min(float(third), prefill_time(oldest, oldest.tokens, slope))
    for place in sorted(others, key=lambda other: prefill_time(texts[other], texts[other].tokens, slope)):
        if left >= 1:
            text = texts[place]
            given[place] = min(text.tokens, max(tokens_within(text, min(half, left), slope), 1))
            left = max(left - prefill_time(text, given[place], slope), 0.0)
    most = third if is_awaited else min(third + left, half if others else room)
    given[0] = min(oldest.tokens, max(tokens_within(oldest, most, slope), -(-room // _LEAST)))
    return given


def prefill_time(text: Unread, tokens: int, slope: float) -> float:
    """What the next tokens of a text take, in times of one that has nothing before it."""
    return tokens * (1.0 + slope * (text.before + tokens / 2))


def tokens_within(text: Unread, room: float, slope: float) -> int:
    """How many of a text's next tokens take as long as `room` of those that have nothing before them."""
    first = 1.0 + slope * text.before
    return int(2.0 * room / (first + sqrt(first * first + 2.0 * slope * room)))
