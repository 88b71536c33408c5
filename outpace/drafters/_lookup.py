"""Copied tokens on a tree, scored by what accepted copies of their kind were worth here.

A copy's kind is the number of tokens before it that were equal, in the text and where it comes from, and how sure its
source is of it. A token that is accepted makes the match longer by one, so one table of rates serves a branch's first
token and all others. A request begins with the rates of all requests before it, and soon follows its own.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from heapq import heappop, heappush
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar

from outpace.core.errors import UserError, check_range, check_whole
from outpace.core.tree import TokenTree
from outpace.core.types import Drafter, DraftState, Observation, Request
from outpace.drafters._calibration import AcceptanceRate


def allowed(state: DraftState, tokens: Sequence[int]) -> Sequence[int]:
    """Tokens that a drafter is about to pick below the root, as far as they may follow the text. For picked tokens
    alone: tokens that were drawn must not be pruned by what they are."""
    constraint = state.request.constraint
    if constraint is None:
        return tokens
    try:
        return tokens[: constraint.allowed(state.tokens, tokens)]
    except UserError:  # its request ends where the target asks it
        return tokens


_LENGTHS = (0, 1, 2, 3, 4, 5, 7, 9, 13, 17, 33, 65)  # where the next kind begins
_PRIORS = (0.2, 0.35, 0.5, 0.65, 0.75, 0.8, 0.85, 0.88, 0.9, 0.92, 0.94, 0.95)  # by length, where the source is sure
_OWN = 6.0  # trials that other requests' rates are worth at the beginning of a request
NEVER = 1e-300  # below the chance of any branch
_NOTHING: Mapping[int, int] = {}
_LEAST, _MOST = 0.001, 0.999  # a rate has a logarithm, and no branch is free of doubt


class Certainty(IntEnum):
    """How sure a source is of one token among those that it offers after the same text."""

    SURE = 0
    LIKELY = 1
    OTHER = 2


_GRADES = len(Certainty)
_NUMBERS = [bisect_right(_LENGTHS, length) - 1 for length in range(_LENGTHS[-1] + 1)]  # of `_LENGTHS`, by length
_SHARES = {Certainty.SURE: 1.0, Certainty.LIKELY: 0.7, Certainty.OTHER: 0.3}  # of the prior


def kind_of(length: int, grade: Certainty = Certainty.SURE, origin: int = 0) -> int:
    """The kind of a token that is copied from behind `length` equal tokens, of one of a source's several origins."""
    number = _NUMBERS[length] if length < len(_NUMBERS) else len(_LENGTHS) - 1
    return (origin * len(_LENGTHS) + number) * _GRADES + grade


@dataclass
class LookupState(DraftState):
    """`planted`: what was offered below each node, by the node's id: the tokens and their kinds. `rates`: this
    request's own."""

    planted: dict[int, dict[int, int]] = field(default_factory=dict)
    rates: dict[int, AcceptanceRate] = field(default_factory=dict)


State = TypeVar("State", bound=LookupState)


class LookupDrafter(Drafter, Generic[State]):
    """A drafter that copies. What it copies is `propose`'s to say, in a class for each source."""

    runs_model = False
    is_fitted = True

    def __init__(self, origins: int = 1) -> None:
        """`origins`: places of different worth that it copies from."""
        priors = [prior * _SHARES[grade] for prior in _PRIORS for grade in Certainty] * origins
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
        self, state: State, tree: TokenTree, tokens: Sequence[int], length: int, grade: Certainty, least: float = 0.0
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
                below[tokens[place]], grade = kind, Certainty.SURE
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
                grade = Certainty.SURE
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

    def state_dict(self) -> Mapping[str, float]:
        """What a profile keeps: how often copies came true, by kind."""
        return {str(kind): rate.state_dict() for kind, rate in enumerate(self._rates)}

    def load_state_dict(self, kept: Mapping[str, float]) -> None:
        """Begins from a profile."""
        for kind, rate in enumerate(self._rates):
            if str(kind) in kept:
                rate.load_state_dict(float(kept[str(kind)]))


_FADE = 0.9  # of a place's weight, for each that stands before it: of equal matches the latest stands first
_AGREED = 0.8  # of the places' weight, behind one token: the source is sure of it


class Continuation(NamedTuple):
    """What stood at one place, behind so many tokens that are the text's last ones, in one of the grafter's origins."""

    length: int
    tokens: Sequence[int]
    origin: int = 0


_Open = tuple[float, int, int, Sequence[Continuation]]  # -W, depth, node, and the places that led to it


class TreeLimits(NamedTuple):
    """So many nodes in all, so many children of one, and the least chance that one is reached."""

    offered: int
    branches: int
    least_chance: float


def limits_of(options: Any) -> TreeLimits:
    """From a drafter's options of the same names."""
    return TreeLimits(options.offered, options.branches, options.least_chance)


def check_limits(options: Any) -> None:
    """UserError for a value of these options that is out of range."""
    check_whole("offered", options.offered, 1, 4096)
    check_whole("branches", options.branches, 1, 64)
    check_range("least_chance", options.least_chance, 0.0, 1.0)


def grow_continuations(
    grafter: LookupDrafter[Any], state: Any, tree: TokenTree, copies: Sequence[Continuation], limits: TreeLimits
) -> None:
    """Best first: a node's children are what stands behind it at the places that led to it. The likeliest first token
    stands there however unlikely it is, so that it is known when its kind comes true again."""
    least = math.log(limits.least_chance) if limits.least_chance else -math.inf
    waiting: list[_Open] = [(0.0, 0, 0, copies)] if copies else []
    left = limits.offered
    while waiting and left > 0:
        loss, depth, node, here = heappop(waiting)
        end = _agreed(here, depth)
        if end > depth and not tree.children(node):
            left -= _run_on(grafter, state, tree, waiting, (loss, depth, node, here), (left, end, least))
            continue
        for rank, (token, grade, those) in enumerate(islice(_choices(here, depth), limits.branches)):
            kind = kind_of(max([copy.length for copy in those]) + depth, grade, min([copy.origin for copy in those]))
            if grafter.log_rate(state, kind) - loss >= least or not (depth or rank):
                child = grafter.plant(state, tree, node, token, kind)
                heappush(waiting, (-tree.scores[child], depth + 1, child, those))
                left -= 1


def _agreed(here: Sequence[Continuation], depth: int) -> int:
    """The depth up to which all of these places, which led to one node, have the same tokens."""
    first = here[0].tokens
    end = min([len(copy.tokens) for copy in here])
    for copy in here[1:]:
        at, tokens = depth, copy.tokens
        while at < end and tokens[at] == first[at]:
            at += 1
        end = at
    return end


def _run_on(
    grafter: LookupDrafter[Any],
    state: Any,
    tree: TokenTree,
    waiting: list[_Open],
    leaf: _Open,
    limits: tuple[int, int, float],
) -> int:
    """Plants what all places of a leaf agree on, at once as far as it comes before what else waits: as most of a tree
    does. `limits`: so many nodes, so deep, and the least chance. How many nodes."""
    loss, depth, node, here = leaf
    left, end, least = limits
    length, origin = max([copy.length for copy in here]), min([copy.origin for copy in here])
    first, start, child, is_likely = len(tree), depth, node, True
    kinds: list[int] = []
    scores: list[float] = []
    while depth < end and len(kinds) < left:
        kind = kind_of(length + depth, Certainty.SURE, origin)
        chance = grafter.log_rate(state, kind)
        if chance - loss < least and depth:
            is_likely = False
            break
        loss, depth, child = loss - chance, depth + 1, first + len(kinds)
        kinds.append(kind)
        scores.append(-loss)
        if waiting and waiting[0][:3] < (loss, depth, child):
            break
    if kinds:
        grafter.plant_chain(state, tree, node, here[0].tokens[start:depth], kinds, scores)
    if is_likely and depth < max([len(copy.tokens) for copy in here]):
        heappush(waiting, (loss, depth, child, here))
    return len(kinds)


def _choices(copies: Sequence[Continuation], depth: int) -> Iterator[tuple[int, Certainty, Sequence[Continuation]]]:
    """The tokens that stand so deep, the weightiest first: how sure the places are of each, and those that have it. A
    place weighs as the square of its match, and less the later it stands in their order."""
    by_token: dict[int, list[Continuation]] = {}
    weights: dict[int, float] = {}
    fading = 1.0
    for copy in copies:
        if depth < len(copy.tokens):
            token, weight = copy.tokens[depth], copy.length * copy.length * fading
            if token in weights:
                by_token[token].append(copy)
                weights[token] += weight
            else:
                by_token[token], weights[token] = [copy], weight
        fading *= _FADE
    total = sum(weights.values())
    grade = Certainty.LIKELY
    for token in sorted(weights, key=weights.__getitem__, reverse=True):
        yield token, Certainty.SURE if weights[token] >= _AGREED * total else grade, by_token[token]
        grade = Certainty.OTHER
