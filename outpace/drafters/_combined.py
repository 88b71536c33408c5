"""Several drafters on one tree: each grafts its own nodes, and each may grow what another has planted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outpace.core.tree import TokenTree
from outpace.core.types import Drafter, DraftState, Observation, Request


@dataclass
class CombinedState(DraftState):
    """The parts' own states, in the parts' order."""

    parts: list[DraftState] = field(default_factory=list)


class Combined:
    """Drafters that grow in turn; cheap ones stand first, so that a model expands their branches in the same round."""

    def __init__(self, parts: Sequence[Drafter], free: int = 0) -> None:
        """The first `free` of the parts run no model."""
        self.parts, self._free = parts, free

    def open(self, request: Request) -> CombinedState:
        return CombinedState(request, parts=[part.open(request) for part in self.parts])

    def grow(self, states: Sequence[CombinedState], trees: Sequence[TokenTree], free: bool | None = None) -> list[int]:
        """Nodes added to each tree by all parts together, or by those that run no model, or by those that do."""
        added = [0] * len(trees)
        first, end = (0 if free is not False else self._free), (self._free if free else len(self.parts))
        for number in range(first, end):
            more = self.parts[number].grow([state.parts[number] for state in states], trees)
            added = [a + b for a, b in zip(added, more, strict=True)]
        return added

    def remember(self) -> list[Any]:
        """What a profile keeps, of each part."""
        return [part.remember() if hasattr(part, "remember") else None for part in self.parts]

    def recall(self, kept: Sequence[Any]) -> None:
        """Begins from a profile."""
        for part, known in zip(self.parts, kept, strict=True):
            if known is not None:
                part.recall(known)  # type: ignore[attr-defined]

    def observe(self, state: CombinedState, seen: Observation) -> None:
        for part, inner in zip(self.parts, state.parts, strict=True):
            part.observe(inner, seen)

    def close(self, state: CombinedState) -> None:
        for part, inner in zip(self.parts, state.parts, strict=True):
            part.close(inner)
