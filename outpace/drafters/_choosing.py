"""Several draft models, of which each round has one: the one that would have been the fastest on what was written.

Choice with full information, as in HedgeSpec: the tokens that the target wrote say how every draft would have fared,
also those that did not draft. Each reads them, so no further pass of the target is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outpace.core.theory import best_length, expected_tokens, speedup
from outpace.core.tree import TokenTree
from outpace.core.types import Drafter, Observation, Request, Source
from outpace.drafters._several import Several, SeveralState

_FIRST, _EVERY = 6, 16  # rounds of an answer that all drafts read at once, and of the later ones one in so many
_FADE = 0.96  # of the past's weight, a token that was read
_BELIEF = 4.0  # tokens that other answers count as, at the beginning of one
_BETTER = 1.03  # by so much another draft must be faster to take over: it has to read what was written
_DEEPEST = 8  # tokens of a chain
UNKNOWN = 0.1  # of a pass, what a draft's step is held to cost


class Share:
    """How much of the chance a draft gave to what was written, on average."""

    def __init__(self, value: float = 0.5, weight: float = 4.0) -> None:
        self._sum, self._count = value * weight, weight

    @property
    def value(self) -> float:
        return self._sum / self._count

    def learn(self, logs: Sequence[float]) -> None:
        """The logarithms of these chances, one for each token."""
        for value in logs:
            self._sum, self._count = self._sum * _FADE + math.exp(value), self._count * _FADE + 1.0


@dataclass
class ChoosingState(SeveralState):
    """What the drafts agreed with in this answer, and which of them drafts."""

    shares: list[Share] = field(default_factory=list)
    rounds: int = 0
    chosen: int = 0


class Choosing(Several):
    """Drafts of one kind, as one source. By costs that are told beforehand and not by the clock, so that the same
    request is drafted alike again."""

    def __init__(self, parts: Sequence[Drafter], costs: Sequence[float | None]) -> None:
        """`costs`: of a draft's step, as a share of the target's pass; None where that is not known."""
        super().__init__(parts)
        self.name = parts[0].name
        self._costs = [UNKNOWN if cost is None else cost for cost in costs]
        self._shares = [Share() for _ in parts]

    def weight_bytes(self, source: Source) -> int | None:
        """The most of any."""
        return max(part.weight_bytes(source) or 0 for part in self.parts) or None

    def reads_at_most(self, source: Source) -> int | None:
        """The most of any; None where one reads all."""
        most = [part.reads_at_most(source) for part in self.parts]
        return None if None in most else max(count for count in most if count is not None)

    def open(self, request: Request) -> ChoosingState:
        shares = [Share(share.value, _BELIEF) for share in self._shares]
        state = ChoosingState(request, parts=[part.open(request) for part in self.parts], shares=shares)
        state.chosen = self._best(state)
        return state

    def grow(self, states: Sequence[ChoosingState], trees: Sequence[TokenTree]) -> list[int]:
        """Each tree by the draft that its request has; nodes added to each."""
        added = [0] * len(trees)
        for number, part in enumerate(self.parts):
            mine = [n for n, state in enumerate(states) if state.chosen == number]
            for n in mine:
                states[n].parts[number].has_company = states[n].has_company
            if mine:
                found = part.grow([states[n].parts[number] for n in mine], [trees[n] for n in mine])
                for n, count in zip(mine, found, strict=True):
                    added[n] = count
        return added

    def observe(self, state: ChoosingState, seen: Observation) -> None:
        is_due = state.rounds < _FIRST or state.rounds % _EVERY == 0
        state.rounds += 1
        if is_due and seen.tokens:
            self._compare(state, seen.tokens)
        for part, inner in zip(self.parts, state.parts, strict=True):
            part.observe(inner, seen)
        if is_due:
            state.chosen = self._best(state)

    def remember(self) -> list[Any]:
        """What a profile keeps: what the drafts agreed with, and what each learnt."""
        return [
            {"share": share.value, "draft": part.remember()}
            for share, part in zip(self._shares, self.parts, strict=True)
        ]

    def recall(self, kept: Sequence[Mapping[str, Any]]) -> None:
        """Begins from a profile."""
        self._shares = [Share(float(known["share"]), _BELIEF) for known in kept]
        for part, known in zip(self.parts, kept, strict=True):
            part.recall(known["draft"])

    def _compare(self, state: ChoosingState, tokens: Sequence[int]) -> None:
        """Learns what each draft holds of what was written."""
        for number, (part, inner) in enumerate(zip(self.parts, state.parts, strict=True)):
            logs = part.likelihood(inner, tokens)
            if logs is not None:
                state.shares[number].learn(logs)
                self._shares[number].learn(logs)

    def _best(self, state: ChoosingState) -> int:
        """The draft whose chains would be the fastest; the one that drafts already unless another is clearly better."""
        speeds = [speed(share.value, cost) for share, cost in zip(state.shares, self._costs, strict=True)]
        best = max(range(len(speeds)), key=speeds.__getitem__)
        return best if speeds[best] > _BETTER * speeds[state.chosen] else state.chosen


def speed(chance: float, cost: float) -> float:
    """Tokens in the time of a pass by chains of the best length, each token accepted with this chance, where a step of
    the draft takes `cost` of a pass."""
    length = best_length(chance, cost, _DEEPEST)
    return speedup(expected_tokens(chance, length), length, cost)
