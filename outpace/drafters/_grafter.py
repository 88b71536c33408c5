"""Copied tokens on a tree, scored by what accepted copies of their kind were worth here.

A copy's kind is the number of tokens before it that were equal, in the text and where it comes from, and how sure its
source is of it. A token that is accepted makes the match longer by one, so one table of rates serves a branch's first
token and all others. A request begins with the rates of all requests before it, and soon follows its own.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Generic, TypeVar

from outpace.core.tree import TokenTree
from outpace.core.types import Drafter, DraftState, Observation, Request
from outpace.drafters._allowed import allowed
from outpace.drafters._calibration import AcceptanceRate

_LENGTHS = (0, 1, 2, 3, 4, 5, 7, 9, 13, 17, 33, 65)  # where the next kind begins
_PRIORS = (0.2, 0.35, 0.5, 0.65, 0.75, 0.8, 0.85, 0.88, 0.9, 0.92, 0.94, 0.95)  # by length, where the source is sure
_OWN = 6.0  # trials that other requests' rates are worth at the beginning of a request
NEVER = 1e-300  # below the chance of any branch
_NOTHING: Mapping[int, int] = {}
_LEAST, _MOST = 0.001, 0.999  # a rate has a logarithm, and no branch is free of doubt


class Grade(IntEnum):
    """How sure a source is of one token among those that it offers after the same text."""

    SURE = 0
    LIKELY = 1
    OTHER = 2


_GRADES = len(Grade)
_NUMBERS = [bisect_right(_LENGTHS, length) - 1 for length in range(_LENGTHS[-1] + 1)]  # of `_LENGTHS`, by length
_SHARES = {Grade.SURE: 1.0, Grade.LIKELY: 0.7, Grade.OTHER: 0.3}  # of the prior


def kind_of(length: int, grade: Grade = Grade.SURE, origin: int = 0) -> int:
    """The kind of a token that is copied from behind `length` equal tokens, of one of a source's several origins."""
    number = _NUMBERS[length] if length < len(_NUMBERS) else len(_LENGTHS) - 1
    return (origin * len(_LENGTHS) + number) * _GRADES + grade


@dataclass
class GraftState(DraftState):
    """`planted`: what was offered below each node, by the node's id: the tokens and their kinds. `rates`: this
    request's own."""

    planted: dict[int, dict[int, int]] = field(default_factory=dict)
    rates: dict[int, AcceptanceRate] = field(default_factory=dict)


State = TypeVar("State", bound=GraftState)


class Grafter(Drafter, Generic[State]):
    """A drafter that copies. What it copies is `propose`'s to say, in a class for each source."""

    runs_model = False
    is_fitted = True

    def __init__(self, origins: int = 1) -> None:
        """`origins`: places of different worth that it copies from."""
        priors = [prior * _SHARES[grade] for prior in _PRIORS for grade in Grade] * origins
        self._rates = [AcceptanceRate(prior) for prior in priors]

    def open(self, request: Request) -> State:
        raise NotImplementedError

    def propose(self, state: State, tree: TokenTree) -> None:
        """Plants what may follow the text."""
        raise NotImplementedError

    def grow(self, states: Sequence[State], trees: Sequence[TokenTree]) -> list[int]:
        """Nodes added to each tree; 0 where there is nothing new to copy."""
        before = [len(tree) for tree in trees]
        for state, tree in zip(states, trees, strict=True):
            self.propose(state, tree)
        return [len(tree) - count for tree, count in zip(trees, before, strict=True)]

    def plant(self, state: State, tree: TokenTree, node: int, token: int, kind: int) -> int:
        """The child of `node` with this token, which is added where it is not there."""
        state.planted.setdefault(tree.ids[node], {}).setdefault(token, kind)
        child = tree.child(node, token)
        if child is None:
            child = tree.add(node, token, tree.scores[node] + math.log(self.rate(state, kind)))
            assert child is not None
        return child

    def branch(
        self, state: State, tree: TokenTree, tokens: Sequence[int], length: int, grade: Grade, least: float = 0.0
    ) -> None:
        """Plants tokens that stand one behind the other, below the root, while the chance that they are reached is at
        least so much. `length` tokens before them are equal; the grade is that of the first token that another branch
        has no part in."""
        tokens, planted, ids, floor = allowed(state, tokens), state.planted, tree.ids, math.log(least or NEVER)
        node = place = 0
        while place < len(tokens) and (child := tree.child(node, tokens[place])) is not None:  # another branch's part
            kind, below = kind_of(length + place, grade), planted.setdefault(ids[node], {})
            if tree.scores[node] + self.log_rate(state, kind) < floor:
                return
            if tokens[place] not in below:
                below[tokens[place]], grade = kind, Grade.SURE
            node, place = child, place + 1
        rest = tokens[place:]
        kinds, scores, score = [], [], tree.scores[node]
        for number in range(length + place, length + len(tokens)):
            kind = kind_of(number, grade)
            score += self.log_rate(state, kind)
            if score < floor:
                break
            kinds.append(kind)
            scores.append(score)
            if len(kinds) > 1 or rest[0] not in planted.get(ids[node], ()):
                grade = Grade.SURE
        if kinds:
            self.plant_chain(state, tree, node, rest[: len(kinds)], kinds, scores)

    def plant_chain(
        self,
        state: State,
        tree: TokenTree,
        node: int,
        tokens: Sequence[int],
        kinds: Sequence[int],
        scores: Sequence[float],
    ) -> None:
        """Plants tokens one below the other, the first of which `node` has no child of, with their path scores."""
        planted, first = state.planted, tree.chain(node, tokens, scores)
        planted.setdefault(tree.ids[node], {}).setdefault(tokens[0], kinds[0])
        for above, token, kind in zip(tree.ids[first:], tokens[1:], kinds[1:], strict=False):
            planted[above] = {token: kind}

    def rate(self, state: State, kind: int) -> float:
        """How often a copy of this kind is what the target writes."""
        value = (state.rates.get(kind) or self._rates[kind]).value
        return min(max(value, _LEAST), _MOST)

    def log_rate(self, state: State, kind: int) -> float:
        """Its natural logarithm."""
        return math.log(self.rate(state, kind))

    def log_rates(self, state: State) -> list[float]:
        """Those of all kinds."""
        own, log = state.rates, math.log
        return [log(min(max((own.get(kind) or known).value, _LEAST), _MOST)) for kind, known in enumerate(self._rates)]

    def observe(self, state: State, seen: Observation) -> None:
        self.learn(state, seen)
        state.tokens.extend(seen.tokens)

    def learn(self, state: State, seen: Observation) -> None:
        """What came true of that which was planted below the walked nodes."""
        rates, own = self._rates, state.rates
        for node, written in zip(seen.path, seen.tokens, strict=False):
            for token, kind in state.planted.get(node, _NOTHING).items():
                if kind not in own:
                    own[kind] = AcceptanceRate(rates[kind].value, _OWN)
                own[kind].learn(token == written)
                rates[kind].learn(token == written)
        planted = state.planted
        state.planted = {node: planted[node] for node in seen.tree.ids if node in planted}

    def remember(self) -> Mapping[str, float]:
        """What a profile keeps: how often copies came true, by kind."""
        return {str(kind): rate.remember() for kind, rate in enumerate(self._rates)}

    def recall(self, kept: Mapping[str, float]) -> None:
        """Begins from a profile."""
        for kind, rate in enumerate(self._rates):
            if str(kind) in kept:
                rate.recall(float(kept[str(kind)]))
