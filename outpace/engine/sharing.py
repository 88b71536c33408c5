"""How requests share a pass's room for prompts: by the time that tokens take, not by their number."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

_LEAST = 16  # of the room: the part that the oldest gets at least in tokens, however long they take


class Unread(NamedTuple):
    """What is not read yet of a request's text, and how many tokens of it are."""

    tokens: int
    before: int


def share_prompt_room(texts: Sequence[Unread], room: int, slope: float = 0.0, is_awaited: bool = False) -> list[int]:
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
    left = room - min(float(third), time_of(oldest, oldest.tokens, slope))
    for place in sorted(others, key=lambda other: time_of(texts[other], texts[other].tokens, slope)):
        if left >= 1:
            text = texts[place]
            given[place] = min(text.tokens, max(tokens_in(text, min(half, left), slope), 1))
            left = max(left - time_of(text, given[place], slope), 0.0)
    most = third if is_awaited else min(third + left, half if others else room)
    given[0] = min(oldest.tokens, max(tokens_in(oldest, most, slope), -(-room // _LEAST)))
    return given


def time_of(text: Unread, tokens: int, slope: float) -> float:
    """What the next tokens of a text take, in times of one that has nothing before it."""
    return tokens * (1.0 + slope * (text.before + tokens / 2))


def tokens_in(text: Unread, room: float, slope: float) -> int:
    """How many of a text's next tokens take as long as `room` of those that have nothing before them."""
    first = 1.0 + slope * text.before
    return int(2.0 * room / (first + sqrt(first * first + 2.0 * slope * room)))
