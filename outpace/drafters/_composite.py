"""Drafters made of several: on one shared tree, or as alternatives from which each round takes one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import chain
from typing import Any

from outpace.core.drafting import Needs
from outpace.core.stats import DecayedMean
from outpace.core.tree import TokenTree
from outpace.core.types import Capabilities, Drafter, DraftState, Observation, Request, SavedState


@dataclass
class CompositeState(DraftState):
    """The parts' own states, in the parts' order."""

    parts: list[Any] = field(default_factory=list)

    @property
    def unread(self) -> int:
        return sum([part.unread for part in self.parts])

    @property
    def held_prefix(self) -> int:
        return max(part.held_prefix for part in self.parts)

    def part(self, number: int) -> Any:
        """Return a part's own state, with what was set for the next growth."""
        own = self.parts[number]
        own.source, own.directives, own.target_session = self.source, self.directives, self.target_session
        own.max_read = self.max_read
        return own


class JoinedState:
    """The states of several drafters that a profile keeps between runs."""

    def __init__(self, parts: Sequence[SavedState | None]) -> None:
        self._parts = parts

    def state_dict(self) -> list[Any]:
        """Return the state of each part, None for one that keeps nothing."""
        return [part and part.state_dict() for part in self._parts]

    def load_state_dict(self, kept: Sequence[Any]) -> None:
        for part, known in zip(self._parts, kept, strict=True):
            if part is not None and known is not None:
                part.load_state_dict(known)


def joined(parts: Sequence[Capabilities]) -> Capabilities:
    """Return the capabilities of several drafters together."""

    def save() -> None:
        for part in parts:
            part.save()

    return Capabilities(
        sources=tuple(source for part in parts for source in part.sources),
        needs=reduce(Needs.joined, (part.needs for part in parts)),
        models=tuple(model for part in parts for model in part.models),
        memory=lambda lengths: sum(part.memory(lengths) for part in parts),
        learnt=JoinedState([part.learnt for part in parts]),
        save=save,
    )


class CompositeDrafter(Drafter):
    """A drafter made of several `parts`. Subclasses decide which part drafts."""

    def __init__(self, parts: Sequence[Any]) -> None:
        """`parts` are drafters."""
        self.parts, self._names = parts, [part.name for part in parts]
        self._run_models = [part.capabilities.runs_model for part in parts]
        self.capabilities = joined([part.capabilities for part in parts])

    def copy_prefix(self, state: CompositeState, other: CompositeState, length: int) -> None:
        for part, mine, its in zip(self.parts, state.parts, other.parts, strict=True):
            part.copy_prefix(mine, its, length)

    def pause(self, state: CompositeState) -> None:
        for part, inner in zip(self.parts, state.parts, strict=True):
            inner.target_session = None
            part.catch_up(inner)
            part.pause(inner)

    def close(self, state: CompositeState) -> None:
        for part, inner in zip(self.parts, state.parts, strict=True):
            part.catch_up(inner)
            part.close(inner)


class SharedTree(CompositeDrafter):
    """Several drafters that add to one tree; each may expand what another has added. Drafters without a model come
    first, so that a model expands their branches in the same round."""

    def open(self, request: Request) -> CompositeState:
        parts = [part.open(request) for part in self.parts]
        pairs = zip(self.parts, parts, strict=True)
        sources = [part.capabilities.sources if own.sources is None else own.sources for part, own in pairs]
        return CompositeState(request, parts=parts, sources=tuple(chain.from_iterable(sources)))

    def grow(self, states: Sequence[CompositeState], trees: Sequence[TokenTree]) -> None:
        """Grow by the part that has the states' source, or by all."""
        source = states[0].source
        for number, part in enumerate(self.parts):
            if source is None or source in part.capabilities.sources:
                inner, name = [], self._names[number]
                for state, tree in zip(states, trees, strict=True):
                    part.catch_up(state.parts[number])
                    inner.append(state.part(number))
                    tree.current_source = name
                part.grow(inner, trees)

    def observe(self, state: CompositeState, seen: Observation) -> None:
        """Note the observation for each part, which sees it when it drafts next; at once if it runs a model, so that
        `unread` is known, or if the observation contains details of the target pass."""
        layers = self.capabilities.needs.layers
        for number, part in enumerate(self.parts):
            needs = part.capabilities.needs
            if seen.tokens or needs.prompt:
                own = seen.seen and seen.seen.select(needs, layers)
                state.parts[number].pending.add(seen._replace(seen=own))
            if seen.seen is not None or self._run_models[number]:
                part.catch_up(state.parts[number])


_FIRST, _EVERY = 6, 16  # drafts are compared in the first 6 rounds of an answer, then in every 16th
_FADE = 0.96  # decay per token
_BELIEF = 4.0  # weight of other answers at the beginning of one, in tokens
_BETTER = 1.03  # speed ratio at which another draft takes over; it has to read the text first
_DEEPEST = 8  # longest chain considered
UNKNOWN = 0.1  # cost of a draft step as a fraction of a target pass, if unknown


@dataclass
class SelectorState(CompositeState):
    """`shares`: the mean probability that each draft gave to the tokens of this answer. `chosen`: the one that
    drafts."""

    shares: list[DecayedMean] = field(default_factory=list)
    rounds: int = 0
    chosen: int = 0


class DraftSelector(CompositeDrafter):
    """Several draft models as one source: each round is drafted by the one that would have been the fastest on the
    recent text.

    Full-information selection, as in HedgeSpec: the tokens that the target wrote tell how every draft would have done,
    also those that did not draft, without a further target pass. Costs are fixed in advance and not measured, so that
    the same request is drafted in the same way again.
    """

    def __init__(self, parts: Sequence[Any], costs: Sequence[float | None]) -> None:
        """`parts` are drafters of draft models, with `likelihood`. `costs`: of each draft's step as a fraction of the
        target pass; None if unknown."""
        super().__init__(parts)
        self._costs = [UNKNOWN if cost is None else cost for cost in costs]
        self._shares = [DecayedMean(0.5, _BELIEF, _FADE) for _ in parts]
        reads = [source.reads for source in self.capabilities.sources]
        learnt = self.capabilities.learnt
        assert learnt is not None
        self._learnt = learnt
        slowest = max(self.capabilities.sources, key=lambda source: source.weight_bytes or 0)
        slowest = slowest._replace(reads=None if None in reads else max(filter(None, reads)))
        self.capabilities = replace(self.capabilities, sources=(slowest,), learnt=self)

    def open(self, request: Request) -> SelectorState:
        shares = [DecayedMean(share.value, _BELIEF, _FADE) for share in self._shares]
        state = SelectorState(request, parts=[part.open(request) for part in self.parts], shares=shares)
        state.chosen = self._best(state)
        return state

    def grow(self, states: Sequence[SelectorState], trees: Sequence[TokenTree]) -> None:
        """Grow each tree by the draft that its request has selected."""
        for number, part in enumerate(self.parts):
            mine = [n for n, state in enumerate(states) if state.chosen == number]
            if mine:
                part.grow([states[n].part(number) for n in mine], [trees[n] for n in mine])

    def observe(self, state: SelectorState, seen: Observation) -> None:
        is_due = state.rounds < _FIRST or state.rounds % _EVERY == 0
        state.rounds += 1
        if is_due:
            self._compare(state, seen.tokens)
        for part, inner in zip(self.parts, state.parts, strict=True):
            part.observe(inner, seen)
        if is_due:
            state.chosen = self._best(state)

    def state_dict(self) -> list[Any]:
        """Return the agreement rates and the learnt state of each draft, for the profile."""
        pairs = zip(self._shares, self._learnt.state_dict(), strict=True)
        return [{"share": share.value, "draft": draft} for share, draft in pairs]

    def load_state_dict(self, kept: Sequence[Mapping[str, Any]]) -> None:
        """Restore the agreement rates and each draft's learnt state."""
        self._shares = [DecayedMean(float(known["share"]), _BELIEF, _FADE) for known in kept]
        self._learnt.load_state_dict([known["draft"] for known in kept])

    def _compare(self, state: SelectorState, tokens: Sequence[int]) -> None:
        """Learn what probability each draft gives to the written tokens."""
        for number, (part, inner) in enumerate(zip(self.parts, state.parts, strict=True)):
            inner.max_read = state.max_read
            for log in part.likelihood(inner, tokens) or ():
                state.shares[number].learn(math.exp(log))
                self._shares[number].learn(math.exp(log))

    def _best(self, state: SelectorState) -> int:
        """Return the fastest draft; the present one unless another is clearly better."""
        speeds = [expected_speed(share.value, cost) for share, cost in zip(state.shares, self._costs, strict=True)]
        best = max(range(len(speeds)), key=speeds.__getitem__)
        return best if speeds[best] > _BETTER * speeds[state.chosen] else state.chosen


def expected_speed(chance: float, cost: float) -> float:
    """Return the expected tokens per target pass time of chains of the best length, if each token is accepted with this
    probability and a draft step takes `cost` target passes."""
    from outpace.core.theory import best_length, expected_tokens, speedup  # for the choice among several drafts

    length = best_length(chance, cost, _DEEPEST)
    return speedup(expected_tokens(chance, length), length, cost)
