"""What parsers tell of a text while it comes, and what they hold back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Text(NamedTuple):
    """A bit of the answer's own text."""

    text: str


class CallBegin(NamedTuple):
    """A tool call begins; calls are numbered from 0."""

    number: int
    name: str


class CallArguments(NamedTuple):
    """A bit of a call's arguments, the text of a JSON object."""

    number: int
    text: str


Delta = Text | CallBegin | CallArguments


def held(text: str, mark: str) -> int:
    """The length of the longest end of `text` with which `mark` begins, `mark` itself not counted."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)


def merged(deltas: Iterable[Delta]) -> list[Delta]:
    """Neighbours of one kind as one."""
    result: list[Delta] = []
    for delta in deltas:
        last = result[-1] if result else None
        if isinstance(delta, Text) and isinstance(last, Text):
            result[-1] = Text(last.text + delta.text)
        elif isinstance(delta, CallArguments) and isinstance(last, CallArguments) and last.number == delta.number:
            result[-1] = CallArguments(delta.number, last.text + delta.text)
        else:
            result.append(delta)
    return result
