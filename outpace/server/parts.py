"""An answer's text taken apart while it comes: what is thought, what is said, and which tools are called."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from outpace.tools.calls import CallArguments, CallBegin, CallParser, TextDelta
from outpace.tools.reasoning import ReasoningParser, ThoughtDelta

Part = ThoughtDelta | TextDelta | CallBegin | CallArguments


class Splitter:
    """One choice's text. However it is cut into pieces, the parts put together are the same."""

    def __init__(self, thoughts: ReasoningParser | None = None, calls: CallParser | None = None) -> None:
        self._thoughts, self._calls = thoughts, calls

    @property
    def calls(self) -> int:
        """Those that have begun."""
        return self._calls.count if self._calls else 0

    def push(self, text: str) -> list[Part]:
        """What became certain with this text."""
        if self._thoughts is not None:
            return list(self._called(self._thoughts.push(text)))
        return list(self._called([TextDelta(text)] if text else []))

    def finish(self) -> list[Part]:
        """What was held back."""
        parts = list(self._called(self._thoughts.finish())) if self._thoughts else []
        return [*parts, *(self._calls.finish() if self._calls else [])]

    def _called(self, parts: Iterable[ThoughtDelta | TextDelta]) -> Iterator[Part]:
        for part in parts:
            if isinstance(part, TextDelta) and self._calls is not None:
                yield from self._calls.push(part.text)
            else:
                yield part
