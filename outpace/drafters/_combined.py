"""Several drafters on one tree: each grafts its own nodes, and each may grow what another has planted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from outpace.core.needs import Needs, Seen
from outpace.core.orders import Orders
from outpace.core.tree import TokenTree
from outpace.core.types import Drafter, DraftState, Observation, Request, Source


@dataclass
class CombinedState(DraftState):
    """The parts' own states, in the parts' order."""

    parts: list[DraftState] = field(default_factory=list)


class Combined(Drafter):
    """Drafters that grow in turn; cheap ones stand first, so that a model expands their branches in the same round."""

    def __init__(self, parts: Sequence[Drafter]) -> None:
        self.parts = parts
        self.needs = reduce(Needs.joined, (part.needs for part in parts))

    @property
    def sources(self) -> tuple[Source, ...]:
        """Those of all parts."""
        return tuple(source for part in self.parts for source in part.sources)

    def weight_bytes(self, source: Source) -> int | None:
        """Of the part that has this source."""
        return next((part.weight_bytes(source) for part in self.parts if source in part.sources), None)

    def reads_at_most(self, source: Source) -> int | None:
        """That of the part that has this source."""
        return next((part.reads_at_most(source) for part in self.parts if source in part.sources), None)

    def open(self, request: Request) -> CombinedState:
        return CombinedState(request, parts=[part.open(request) for part in self.parts])

    def grow(self, states: Sequence[CombinedState], trees: Sequence[TokenTree]) -> list[int]:
        """Nodes added to each tree by all parts together."""
        return self.grow_by(None, states, trees)

    def grow_by(self, source: Source | None, states: Sequence[CombinedState], trees: Sequence[TokenTree]) -> list[int]:
        """Nodes added to each tree by the parts that have this source."""
        added = [0] * len(trees)
        for number, part in enumerate(self.parts):
            if source is None or source in part.sources:
                for state in states if part.needs.session else ():
                    state.parts[number].base = state.base
                before = [len(tree) for tree in trees]
                more = part.grow_by(source, [state.parts[number] for state in states], trees)
                for tree, first in zip(trees, before, strict=True):
                    tree.mark(first, part.name)
                added = [a + b for a, b in zip(added, more, strict=True)]
        return added

    def remember(self) -> list[Any]:
        """What a profile keeps, of each part."""
        return [part.remember() for part in self.parts]

    def recall(self, kept: Sequence[Any]) -> None:
        """Begins from a profile."""
        for part, known in zip(self.parts, kept, strict=True):
            if known is not None:
                part.recall(known)

    def observe(self, state: CombinedState, seen: Observation) -> None:
        for part, inner in zip(self.parts, state.parts, strict=True):
            own = None if seen.seen is None else seen.seen.only(part.needs, self.needs.layers)
            part.observe(inner, seen._replace(seen=own))

    def heed(self, state: CombinedState, orders: Orders) -> None:
        for part, inner in zip(self.parts, state.parts, strict=True):
            part.heed(inner, orders)

    def share_cores(self, most: int) -> None:
        for part in self.parts:
            part.share_cores(most)

    def read(self, state: CombinedState, seen: Seen) -> None:
        for part, inner in zip(self.parts, state.parts, strict=True):
            if part.needs.prompt:
                part.read(inner, seen.only(part.needs, self.needs.layers))

    def close(self, state: CombinedState) -> None:
        for part, inner in zip(self.parts, state.parts, strict=True):
            part.close(inner)

    def end(self) -> None:
        for part in self.parts:
            part.end()
