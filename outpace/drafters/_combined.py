"""Several drafters on one tree: each grafts its own nodes, and each may grow what another has planted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outpace.core.tree import TokenTree
from outpace.core.types import Drafter, DraftState, Observation, Request


@dataclass
class CombinedState(DraftState):
    """The parts' own states, in the parts' order."""

    parts: list[DraftState] = field(default_factory=list)


class Combined:
    """Drafters that grow in turn; cheap ones stand first, so that a model expands their branches in the same round."""

    def __init__(self, parts: Sequence[Drafter]) -> None:
        self._parts = parts

    def open(self, request: Request) -> CombinedState:
        return CombinedState(request, parts=[part.open(request) for part in self._parts])

    def grow(self, states: Sequence[CombinedState], trees: Sequence[TokenTree]) -> list[int]:
        """Nodes added to each tree by all parts together."""
        added = [0] * len(trees)
        for number, part in enumerate(self._parts):
            more = part.grow([state.parts[number] for state in states], trees)
            added = [a + b for a, b in zip(added, more, strict=True)]
        return added

    def observe(self, state: CombinedState, seen: Observation) -> None:
        for part, inner in zip(self._parts, state.parts, strict=True):
            part.observe(inner, seen)

    def close(self, state: CombinedState) -> None:
        for part, inner in zip(self._parts, state.parts, strict=True):
            part.close(inner)
