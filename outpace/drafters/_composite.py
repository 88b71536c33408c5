"""Drafters made of several: on one shared tree, or as alternatives from which each round takes one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import sub
from typing import Any

from outpace.core.drafting import DraftDirectives, Needs, TargetFeedback
from outpace.core.theory import best_length, expected_tokens, speedup
from outpace.core.tree import TokenTree
from outpace.core.types import Drafter, DraftState, Observation, PendingObservations, Request, Source


@dataclass
class CompositeState(DraftState):
    """The parts' own states, in the parts' order; `pending`: what each part has not observed yet, if it observes
    late."""

    parts: list[Any] = field(default_factory=list)
    pending: list[PendingObservations] = field(default_factory=list)


class CompositeDrafter(Drafter):
    """A drafter made of several `parts`; forwards to all of them what concerns all. Subclasses decide which part
    drafts."""

    def __init__(self, parts: Sequence[Drafter]) -> None:
        self.parts = parts
        self.shares_work = any(part.shares_work for part in parts)

    def set_directives(self, state: CompositeState, directives: DraftDirectives) -> None:
        for part, inner in zip(self.parts, state.parts, strict=True):
            part.set_directives(inner, directives)

    def amortized(self, seconds: float) -> float:
        for part in self.parts:
            seconds = part.amortized(seconds)
        return seconds

    def limit_threads(self, most: int) -> None:
        for part in self.parts:
            part.limit_threads(most)

    @property
    def num_captures(self) -> int:
        return sum([part.num_captures for part in self.parts])

    def stored_bytes(self, lengths: Sequence[int]) -> int:
        """Return the sum over all parts."""
        return sum(part.stored_bytes(lengths) for part in self.parts)

    def pause(self, state: CompositeState) -> None:
        for part, inner in zip(self.parts, state.parts, strict=True):
            inner.base = None
            part.pause(inner)

    def close(self, state: CompositeState) -> None:
        for part, inner in zip(self.parts, state.parts, strict=True):
            part.close(inner)

    def end(self) -> None:
        for part in self.parts:
            part.end()


class SharedTree(CompositeDrafter):
    """Several drafters that add to one tree; each may expand what another has added. Drafters without a model come
    first, so that a model expands their branches in the same round."""

    def __init__(self, parts: Sequence[Drafter]) -> None:
        super().__init__(parts)
        self.needs = reduce(Needs.joined, (part.needs for part in parts))
        self._growers: dict[Source | None, list[tuple[int, Drafter, Source | None]]] = {None: []}
        for number, part in enumerate(parts):
            self._growers[None].append((number, part, None))
            for source in part.sources:
                own = source if len(part.sources) > 1 else None  # otherwise all that the part has
                self._growers.setdefault(source, []).append((number, part, own))

    @property
    def sources(self) -> tuple[Source, ...]:
        """The sources of all parts."""
        return tuple(source for part in self.parts for source in part.sources)

    def sources_for(self, request: Request) -> Sequence[Source]:
        return tuple(source for part in self.parts for source in part.sources_for(request))

    def weight_bytes(self, source: Source) -> int | None:
        """Ask the part that has this source."""
        return next((part.weight_bytes(source) for part in self.parts if source in part.sources), None)

    def reads_at_most(self, source: Source) -> int | None:
        """Ask the part that has this source."""
        return next((part.reads_at_most(source) for part in self.parts if source in part.sources), None)

    def open(self, request: Request) -> CompositeState:
        pending = [PendingObservations() for _ in self.parts]
        return CompositeState(request, parts=[part.open(request) for part in self.parts], pending=pending)

    def grow(self, states: Sequence[CompositeState], trees: Sequence[TokenTree]) -> list[int]:
        """Grow by all parts; return the number of nodes added to each tree by all of them together."""
        return self.grow_by(None, states, trees)

    def grow_by(self, source: Source | None, states: Sequence[CompositeState], trees: Sequence[TokenTree]) -> list[int]:
        """Grow by the parts that have this source, or by all (None)."""
        before = [*map(len, trees)]
        for number, part, asked in self._growers.get(source, ()):
            inner = []
            for state, tree in zip(states, trees, strict=True):
                own = self._observed(state, number)
                own.base, own.has_other_requests = state.base, state.has_other_requests
                tree.current_source = part.name if source is None else source.name
                inner.append(own)
            part.grow_by(asked, inner, trees)
        return [*map(sub, map(len, trees), before)]

    def _observed(self, state: CompositeState, number: int) -> Any:
        """Return a part's own state after it has observed everything pending."""
        if (seen := state.pending[number].take()) is not None:
            self.parts[number].observe(state.parts[number], seen)
        return state.parts[number]

    def state_dict(self) -> list[Any]:
        """Return the learnt state of each part, for the profile."""
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, kept: Sequence[Any]) -> None:
        """Restore each part's learnt state."""
        for part, known in zip(self.parts, kept, strict=True):
            if known is not None:
                part.load_state_dict(known)

    def observe(self, state: CompositeState, seen: Observation) -> None:
        """Note the observation for each part, which sees it when it drafts next; at once if it contains details of the
        target pass."""
        if seen.seen is None:
            for pending in state.pending:
                pending.add(seen)
            return
        for part, pending in zip(self.parts, state.pending, strict=True):
            pending.add(seen._replace(seen=seen.seen.only(part.needs, self.needs.layers)))
        self._observe_all(state)

    def _observe_all(self, state: CompositeState) -> None:
        """Let all parts observe what is pending."""
        for number in range(len(self.parts)):
            self._observed(state, number)

    def pause(self, state: CompositeState) -> None:
        self._observe_all(state)
        super().pause(state)

    def close(self, state: CompositeState) -> None:
        self._observe_all(state)
        super().close(state)

    def read(self, state: CompositeState, seen: TargetFeedback) -> None:
        for part, inner in zip(self.parts, state.parts, strict=True):
            if part.needs.prompt:
                part.read(inner, seen.only(part.needs, self.needs.layers))


_FIRST, _EVERY = 6, 16  # drafts are compared in the first 6 rounds of an answer, then in every 16th
_FADE = 0.96  # decay per token
_BELIEF = 4.0  # weight of other answers at the beginning of one, in tokens
_BETTER = 1.03  # speed ratio at which another draft takes over; it has to read the text first
_DEEPEST = 8  # longest chain considered
UNKNOWN = 0.1  # cost of a draft step as a fraction of a target pass, if unknown


class AgreementRate:
    """Decayed mean of the probability that a draft gave to the written tokens."""

    def __init__(self, value: float = 0.5, weight: float = 4.0) -> None:
        self._sum, self._count = value * weight, weight

    @property
    def value(self) -> float:
        return self._sum / self._count

    def learn(self, logs: Sequence[float]) -> None:
        """Add the log probabilities of some tokens."""
        for value in logs:
            self._sum, self._count = self._sum * _FADE + math.exp(value), self._count * _FADE + 1.0


@dataclass
class SelectorState(CompositeState):
    """How well each draft agreed with this answer, and which of them drafts."""

    shares: list[AgreementRate] = field(default_factory=list)
    rounds: int = 0
    chosen: int = 0


class DraftSelector(CompositeDrafter):
    """Several draft models as one source: each round is drafted by the one that would have been the fastest on the
    recent text.

    Full-information selection, as in HedgeSpec: the tokens that the target wrote tell how every draft would have done,
    also those that did not draft, without a further target pass. Costs are fixed in advance and not measured, so that
    the same request is drafted in the same way again.
    """

    def __init__(self, parts: Sequence[Drafter], costs: Sequence[float | None]) -> None:
        """`costs`: of each draft's step as a fraction of the target pass; None if unknown."""
        super().__init__(parts)
        self.name = parts[0].name
        self._costs = [UNKNOWN if cost is None else cost for cost in costs]
        self._shares = [AgreementRate() for _ in parts]

    def weight_bytes(self, source: Source) -> int | None:
        """Return the maximum over the drafts."""
        return max(part.weight_bytes(source) or 0 for part in self.parts) or None

    def reads_at_most(self, source: Source) -> int | None:
        """Return the maximum over the drafts; None if one of them reads everything."""
        most = [part.reads_at_most(source) for part in self.parts]
        return None if None in most else max(count for count in most if count is not None)

    def open(self, request: Request) -> SelectorState:
        shares = [AgreementRate(share.value, _BELIEF) for share in self._shares]
        state = SelectorState(request, parts=[part.open(request) for part in self.parts], shares=shares)
        state.chosen = self._best(state)
        return state

    def grow(self, states: Sequence[SelectorState], trees: Sequence[TokenTree]) -> list[int]:
        """Grow each tree by the draft that its request has selected."""
        added = [0] * len(trees)
        for number, part in enumerate(self.parts):
            mine = [n for n, state in enumerate(states) if state.chosen == number]
            for n in mine:
                states[n].parts[number].has_other_requests = states[n].has_other_requests
            if mine:
                found = part.grow([states[n].parts[number] for n in mine], [trees[n] for n in mine])
                for n, count in zip(mine, found, strict=True):
                    added[n] = count
        return added

    def observe(self, state: SelectorState, seen: Observation) -> None:
        is_due = state.rounds < _FIRST or state.rounds % _EVERY == 0
        state.rounds += 1
        if is_due and seen.tokens:
            self._compare(state, seen.tokens)
        for part, inner in zip(self.parts, state.parts, strict=True):
            part.observe(inner, seen)
        if is_due:
            state.chosen = self._best(state)

    def state_dict(self) -> list[Any]:
        """Return the agreement rates and the learnt state of each draft, for the profile."""
        return [
            {"share": share.value, "draft": part.state_dict()}
            for share, part in zip(self._shares, self.parts, strict=True)
        ]

    def load_state_dict(self, kept: Sequence[Mapping[str, Any]]) -> None:
        """Restore the agreement rates and each draft's learnt state."""
        self._shares = [AgreementRate(float(known["share"]), _BELIEF) for known in kept]
        for part, known in zip(self.parts, kept, strict=True):
            part.load_state_dict(known["draft"])

    def _compare(self, state: SelectorState, tokens: Sequence[int]) -> None:
        """Learn what probability each draft gives to the written tokens."""
        for number, (part, inner) in enumerate(zip(self.parts, state.parts, strict=True)):
            logs = part.likelihood(inner, tokens)
            if logs is not None:
                state.shares[number].learn(logs)
                self._shares[number].learn(logs)

    def _best(self, state: SelectorState) -> int:
        """Return the fastest draft; the present one unless another is clearly better."""
        speeds = [expected_speed(share.value, cost) for share, cost in zip(state.shares, self._costs, strict=True)]
        best = max(range(len(speeds)), key=speeds.__getitem__)
        return best if speeds[best] > _BETTER * speeds[state.chosen] else state.chosen


def expected_speed(chance: float, cost: float) -> float:
    """Return the expected tokens per target pass time of chains of the best length, if each token is accepted with this
    probability and a draft step takes `cost` target passes."""
    length = best_length(chance, cost, _DEEPEST)
    return speedup(expected_tokens(chance, length), length, cost)
