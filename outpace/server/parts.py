"""An answer's text taken apart while it comes: what is thought, what is said, and which tools are called."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Thought:
    """Reasoning before the answer."""

    text: str


@dataclass(frozen=True)
class Text:
    """The answer."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A tool is called."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Part = Thought | Text | CallBegin | CallArguments


class Splitter:
    """One choice's text. However it is cut into pieces, the parts put together are the same."""

    def __init__(self) -> None:
        self.calls = 0  # that have begun

    def push(self, text: str) -> list[Part]:
        """What became certain with this text."""
        return [Text(text)] if text else []

    def finish(self) -> list[Part]:
        """What was held back."""
        return []
