"""Several drafters on one tree: each grafts its own nodes, and each may grow what another has planted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import sub
from typing import Any

from outpace.core.carried import Carrier
from outpace.core.needs import Needs, Seen
from outpace.core.tree import TokenTree
from outpace.core.types import Drafter, Observation, Request, Source
from outpace.core.untold import Untold
from outpace.drafters._carrier import CopiesText, ModelCarrier, PartCarrier
from outpace.drafters._several import Several, SeveralState


class Combined(Several):
    """Drafters that grow in turn; cheap ones stand first, so that a model expands their branches in the same round."""

    def __init__(self, parts: Sequence[Drafter]) -> None:
        super().__init__(parts)
        self.needs = reduce(Needs.joined, (part.needs for part in parts))
        self._growers: dict[Source | None, list[tuple[int, Drafter, Source | None]]] = {None: []}
        for number, part in enumerate(parts):
            self._growers[None].append((number, part, None))
            for source in part.sources:
                own = source if len(part.sources) > 1 else None  # else whatever the part has
                self._growers.setdefault(source, []).append((number, part, own))

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
        untold = [Untold() for _ in self.parts]
        return SeveralState(request, parts=[part.open(request) for part in self.parts], untold=untold)

    def grow(self, states: Sequence[SeveralState], trees: Sequence[TokenTree]) -> list[int]:
        """Nodes added to each tree by all parts together."""
        return self.grow_by(None, states, trees)

    def grow_by(self, source: Source | None, states: Sequence[SeveralState], trees: Sequence[TokenTree]) -> list[int]:
        """Nodes added to each tree by the parts that have this source."""
        before = [*map(len, trees)]
        for number, part, asked in self._growers.get(source, ()):
            inner = []
            for state, tree in zip(states, trees, strict=True):
                own = self._told(state, number)
                own.base, own.has_company = state.base, state.has_company
                tree.planter = part.name if source is None else source.name
                inner.append(own)
            part.grow_by(asked, inner, trees)
        return [*map(sub, map(len, trees), before)]

    def carrier(self, target: Any) -> Carrier | None:
        """That of the one part that runs a model, which copies as the one that copies from the text would."""
        numbers = [number for number, part in enumerate(self.parts) if part.runs_model]
        inner = self.parts[numbers[0]].carrier(target) if len(numbers) == 1 else None
        if not isinstance(inner, ModelCarrier):
            return None
        copiers = [(number, part) for number, part in enumerate(self.parts) if isinstance(part, CopiesText)]
        copier = copiers[0] if len(copiers) == 1 and copiers[0][1].can_be_copied else None
        return PartCarrier(inner, self._told, numbers[0], copier)

    def _told(self, state: SeveralState, number: int) -> Any:
        """A part's own state, when it was told what it had not been told yet."""
        if (seen := state.untold[number].take()) is not None:
            self.parts[number].observe(state.parts[number], seen)
        return state.parts[number]

    def remember(self) -> list[Any]:
        """What a profile keeps, of each part."""
        return [part.remember() for part in self.parts]

    def recall(self, kept: Sequence[Any]) -> None:
        """Begins from a profile."""
        for part, known in zip(self.parts, kept, strict=True):
            if known is not None:
                part.recall(known)

    def observe(self, state: SeveralState, seen: Observation) -> None:
        """Each part is told when it is asked next; at once where it is shown something of the pass."""
        if seen.seen is None:
            for untold in state.untold:
                untold.add(seen)
            return
        for part, untold in zip(self.parts, state.untold, strict=True):
            untold.add(seen._replace(seen=seen.seen.only(part.needs, self.needs.layers)))
        self._tell(state)

    def _tell(self, state: SeveralState) -> None:
        """Tells all parts what they were not told yet."""
        for number in range(len(self.parts)):
            self._told(state, number)

    def pause(self, state: SeveralState) -> None:
        self._tell(state)
        super().pause(state)

    def close(self, state: SeveralState) -> None:
        self._tell(state)
        super().close(state)

    def read(self, state: SeveralState, seen: Seen) -> None:
        for part, inner in zip(self.parts, state.parts, strict=True):
            if part.needs.prompt:
                part.read(inner, seen.only(part.needs, self.needs.layers))
