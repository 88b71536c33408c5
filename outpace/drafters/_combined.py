"""Several drafters on one tree: each grafts its own nodes, and each may grow what another has planted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from outpace.core.needs import Needs, Seen
from outpace.core.tree import TokenTree
from outpace.core.types import Drafter, Observation, Request, Source
from outpace.drafters._several import Several, SeveralState


class Combined(Several):
    """Drafters that grow in turn; cheap ones stand first, so that a model expands their branches in the same round."""

    def __init__(self, parts: Sequence[Drafter]) -> None:
        super().__init__(parts)
        self.needs = reduce(Needs.joined, (part.needs for part in parts))
        self._sources = [tuple(part.sources) for part in parts]

    @property
    def sources(self) -> tuple[Source, ...]:
        """Those of all parts."""
        return tuple(source for part in self.parts for source in part.sources)

    def sources_for(self, request: Request) -> Sequence[Source]:
        return tuple(source for part in self.parts for source in part.sources_for(request))

    def weight_bytes(self, source: Source) -> int | None:
        """Of the part that has this source."""
        return next((part.weight_bytes(source) for part in self.parts if source in part.sources), None)

    def reads_at_most(self, source: Source) -> int | None:
        """That of the part that has this source."""
        return next((part.reads_at_most(source) for part in self.parts if source in part.sources), None)

    def open(self, request: Request) -> SeveralState:
        return SeveralState(request, parts=[part.open(request) for part in self.parts])

    def grow(self, states: Sequence[SeveralState], trees: Sequence[TokenTree]) -> list[int]:
        """Nodes added to each tree by all parts together."""
        return self.grow_by(None, states, trees)

    def grow_by(self, source: Source | None, states: Sequence[SeveralState], trees: Sequence[TokenTree]) -> list[int]:
        """Nodes added to each tree by the parts that have this source."""
        added = [0] * len(trees)
        for number, part in enumerate(self.parts):
            if source is None or source in self._sources[number]:
                before, inner = [], []
                for state, tree in zip(states, trees, strict=True):
                    own = state.parts[number]
                    own.base, own.has_company = state.base, state.has_company
                    inner.append(own)
                    before.append(len(tree))
                more = part.grow_by(source, inner, trees)
                for place, tree in enumerate(trees):
                    tree.mark(before[place], part.name)
                    added[place] += more[place]
        return added

    def remember(self) -> list[Any]:
        """What a profile keeps, of each part."""
        return [part.remember() for part in self.parts]

    def recall(self, kept: Sequence[Any]) -> None:
        """Begins from a profile."""
        for part, known in zip(self.parts, kept, strict=True):
            if known is not None:
                part.recall(known)

    def observe(self, state: SeveralState, seen: Observation) -> None:
        for part, inner in zip(self.parts, state.parts, strict=True):
            own = seen if seen.seen is None else seen._replace(seen=seen.seen.only(part.needs, self.needs.layers))
            part.observe(inner, own)

    def read(self, state: SeveralState, seen: Seen) -> None:
        for part, inner in zip(self.parts, state.parts, strict=True):
            if part.needs.prompt:
                part.read(inner, seen.only(part.needs, self.needs.layers))
