"""Drafters without a model, which copy tokens from somewhere and score each copy by how often copies of its kind were
accepted.

A copy's kind combines the number of tokens before it that match (in the text and in its source) and how sure the source
is of it. Each accepted token makes the match longer by one, so one table of rates serves the first token of a branch
and all others. A request starts with the rates of all requests before it and soon follows its own.

Several of them find earlier occurrences of a text's last tokens by `NgramIndex`: hash chains of n-grams of a few
lengths, as in LZ77 coders. Neither its work per token nor its memory grows with the text.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from heapq import heappop, heappush
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar

from outpace.core.drafting import NO_NEEDS, Needs
from outpace.core.errors import UserError
from outpace.core.stats import DecayedMean, acceptance_rate, restored_rate
from outpace.core.tree import TokenTree
from outpace.core.types import Capabilities, Drafter, DraftSource, DraftState, Observation, Request


def allowed(state: DraftState, tokens: Sequence[int]) -> Sequence[int]:
    """Cut proposed tokens below the root where the request's constraint refuses them. Only for picked tokens: drawn
    ones must not be pruned by their value."""
    constraint = state.request.constraint
    if constraint is None:
        return tokens
    try:
        return tokens[: constraint.allowed(state.tokens, tokens)]
    except UserError:  # a failed constraint ends its request in the target pass
        return tokens


_LENGTHS = (0, 1, 2, 3, 4, 5, 7, 9, 13, 17, 33, 65)  # match lengths at which the next kind begins
_PRIORS = (0.2, 0.35, 0.5, 0.65, 0.75, 0.8, 0.85, 0.88, 0.9, 0.92, 0.94, 0.95)  # rates by length, if the source is sure
_OWN = 6.0  # weight of other requests' rates at the beginning of a request, in trials
NEVER = 1e-300  # below the probability of any branch
_NOTHING: Mapping[int, int] = {}
_MIN_RATE, _MAX_RATE = 0.001, 0.999  # bounds of a rate, so that its logarithm is finite and no branch is certain


class Certainty(IntEnum):
    """How sure a source is of one token among its proposals after the same text."""

    SURE = 0
    LIKELY = 1
    OTHER = 2


_GRADES = len(Certainty)
_NUMBERS = [bisect_right(_LENGTHS, length) - 1 for length in range(_LENGTHS[-1] + 1)]  # of `_LENGTHS`, by length
_SHARES = {Certainty.SURE: 1.0, Certainty.LIKELY: 0.7, Certainty.OTHER: 0.3}  # of the prior


def kind_of(length: int, grade: Certainty = Certainty.SURE, origin: int = 0) -> int:
    """Return the kind of a token copied after `length` matching tokens; `origin`: which of the drafter's sources."""
    number = _NUMBERS[length] if length < len(_NUMBERS) else len(_LENGTHS) - 1
    return (origin * len(_LENGTHS) + number) * _GRADES + grade


@dataclass
class LookupState(DraftState):
    """`proposed`: the tokens proposed below each node, by node id, with their kinds. `rates`: this request's own
    rates. `log_rates`: cached results of `LookupDrafter.log_rate`, until the rates change."""

    proposed: dict[int, dict[int, int]] = field(default_factory=dict)
    rates: dict[int, DecayedMean] = field(default_factory=dict)
    log_rates: dict[int, float] = field(default_factory=dict)

    def num_left(self, limit: int) -> int:
        """Return how many of `limit` tokens may still be proposed in this round; a decoder may ask several times."""
        return limit - sum(map(len, self.proposed.values()))


State = TypeVar("State", bound=LookupState)


def lookup(name: str, needs: Needs = NO_NEEDS) -> Capabilities:
    """Return the capabilities of a drafter that copies tokens."""
    return Capabilities((DraftSource(name, is_calibrated=True),), needs)


class LookupDrafter(Drafter, Generic[State]):
    """A drafter that copies tokens; a subclass implements `propose`, and `open` for a state of its own."""

    def __init__(self, options: Any = None, origins: int = 1) -> None:
        """`origins`: number of places that are copied from, with rates of their own."""
        self._options = options
        priors = [prior * _SHARES[grade] for prior in _PRIORS for grade in Certainty] * origins
        self._rates = [acceptance_rate(prior) for prior in priors]
        self.capabilities = replace(self.capabilities, learnt=self)

    def open(self, request: Request) -> Any:
        return LookupState(request)

    def propose(self, state: State, tree: TokenTree) -> None:
        """Attach tokens that may continue the text, by `attach`, `attach_chain` or `attach_branch`."""
        raise NotImplementedError

    def grow(self, states: Sequence[State], trees: Sequence[TokenTree]) -> None:
        for state, tree in zip(states, trees, strict=True):
            self.propose(state, tree)

    def attach(self, state: State, tree: TokenTree, node: int, token: int, kind: int) -> int:
        """Return the child of `node` with this token, adding it if it is missing."""
        state.proposed.setdefault(tree.ids[node], {}).setdefault(token, kind)
        child = tree.child(node, token)
        if child is None:
            child = tree.add(node, token, tree.scores[node] + self.log_rate(state, kind))
            assert child is not None
        return child

    def attach_branch(
        self,
        state: State,
        tree: TokenTree,
        tokens: Sequence[int],
        length: int,
        grade: Certainty,
        min_chance: float = 0.0,
        node: int = 0,
        origin: int = 0,
        max_nodes: int | None = None,
    ) -> int:
        """Attach a chain below `node`, as far as the probability of reaching a token is at least `min_chance`, the tree
        has at most `max_nodes` nodes, and its tokens may be written; return the last node.

        `length`: number of matching tokens before the chain; `grade`: certainty of the first token that no other branch
        shares.
        """
        proposed, ids, floor = state.proposed, tree.ids, math.log(min_chance or NEVER)
        tokens = tokens[: max(tree.max_depth - tree.depth(node), 0)]
        tokens, place = tokens if node else allowed(state, tokens), 0
        while place < len(tokens) and (child := tree.child(node, tokens[place])) is not None:  # shared with a branch
            kind, below = kind_of(length + place, grade, origin), proposed.setdefault(ids[node], {})
            if tree.scores[node] + self.log_rate(state, kind) < floor:
                return node
            if tokens[place] not in below:
                below[tokens[place]], grade = kind, Certainty.SURE
            node, place = child, place + 1
        rest = tokens[place:] if max_nodes is None else tokens[place : place + max(max_nodes - len(tree), 0)]
        kinds, scores, score, log_rates = [], [], tree.scores[node], state.log_rates
        for number in range(length + place, length + place + len(rest)):
            kind = kind_of(number, grade, origin)
            score += log_rates.get(kind) or self.log_rate(state, kind)
            if score < floor:
                break
            kinds.append(kind)
            scores.append(score)
            if len(kinds) > 1 or rest[0] not in proposed.get(ids[node], ()):
                grade = Certainty.SURE
        return self.attach_chain(state, tree, node, rest[: len(kinds)], kinds, scores) if kinds else node

    def attach_chain(
        self,
        state: State,
        tree: TokenTree,
        node: int,
        tokens: Sequence[int],
        kinds: Sequence[int],
        scores: Sequence[float],
    ) -> int:
        """Attach a chain with these path scores below `node`, which has no child with the first token; return its last
        node."""
        proposed, first = state.proposed, tree.chain(node, tokens, scores)
        proposed.setdefault(tree.ids[node], {}).setdefault(tokens[0], kinds[0])
        for above, token, kind in zip(tree.ids[first:], tokens[1:], kinds[1:], strict=False):
            proposed[above] = {token: kind}
        return first + len(tokens) - 1

    def log_rate(self, state: State, kind: int) -> float:
        """Return the log of the acceptance rate of copies of this kind."""
        known = state.log_rates.get(kind)
        if known is None:
            value = (state.rates.get(kind) or self._rates[kind]).value
            known = math.log(min(max(value, _MIN_RATE), _MAX_RATE))
            state.log_rates[kind] = known
        return known

    def observe(self, state: State, seen: Observation) -> None:
        self.learn(state, seen)
        super().observe(state, seen)

    def learn(self, state: State, seen: Observation) -> None:
        """Update the rates by which of the proposals below the accepted nodes came true."""
        rates, own = self._rates, state.rates
        state.log_rates = {}
        for node, written in zip(seen.node_ids, seen.tokens, strict=False):
            for token, kind in state.proposed.get(node, _NOTHING).items():
                if kind not in own:
                    own[kind] = acceptance_rate(rates[kind].value, _OWN)
                own[kind].learn(token == written)
                rates[kind].learn(token == written)
        proposed = state.proposed
        state.proposed = {node: proposed[node] for node in seen.tree.ids if node in proposed}

    def state_dict(self) -> Mapping[str, float]:
        return {str(kind): rate.value for kind, rate in enumerate(self._rates)}

    def load_state_dict(self, kept: Mapping[str, float]) -> None:
        for kind in range(len(self._rates)):
            if str(kind) in kept:
                self._rates[kind] = restored_rate(float(kept[str(kind)]))


_FADE = 0.9  # decay of weight per continuation; of equal matches the latest comes first
_AGREED = 0.8  # share of the weight at which the source is sure of a token


class LookupMatch(NamedTuple):
    """The tokens after one earlier occurrence of the last `length` tokens; `origin`: which of the drafter's sources."""

    length: int
    tokens: Sequence[int]
    origin: int = 0


_Open = tuple[float, int, int, Sequence[LookupMatch]]  # -path score, depth, node, the continuations that lead to it


class TreeLimits(NamedTuple):
    """Most nodes in all, most children of a node, and the least probability of reaching a node."""

    offered: int
    branches: int
    least_chance: float


def grow_continuations(
    drafter: LookupDrafter[Any], state: Any, tree: TokenTree, copies: Sequence[LookupMatch], limits: TreeLimits
) -> None:
    """Build the tree of several continuations, best node first: a node's children are the next tokens of the
    continuations that lead to it. The likeliest first token is always added, so that its kind's rate can recover."""
    min_log_chance = math.log(limits.least_chance) if limits.least_chance else -math.inf
    waiting: list[_Open] = [(0.0, 0, 0, copies)] if copies else []
    left = state.num_left(limits.offered)
    while waiting and left > 0:
        loss, depth, node, here = heappop(waiting)
        if depth >= tree.max_depth:
            continue
        end = min(_agreed(here, depth), tree.max_depth)
        if end > depth and not tree.children(node):
            left -= _run_on(drafter, state, tree, waiting, (loss, depth, node, here), (left, end, min_log_chance))
            continue
        for rank, (token, grade, those) in enumerate(islice(_choices(here, depth), limits.branches)):
            kind = kind_of(max([copy.length for copy in those]) + depth, grade, min([copy.origin for copy in those]))
            if left > 0 and (drafter.log_rate(state, kind) - loss >= min_log_chance or not (depth or rank)):
                child = drafter.attach(state, tree, node, token, kind)
                heappush(waiting, (-tree.scores[child], depth + 1, child, those))
                left -= 1


def _agreed(here: Sequence[LookupMatch], depth: int) -> int:
    """Return the depth up to which all of these continuations have the same tokens."""
    first = here[0].tokens
    end = min([len(copy.tokens) for copy in here])
    for copy in here[1:]:
        at, tokens = depth, copy.tokens
        while at < end and tokens[at] == first[at]:
            at += 1
        end = at
    return end


def _run_on(
    drafter: LookupDrafter[Any],
    state: Any,
    tree: TokenTree,
    waiting: list[_Open],
    leaf: _Open,
    limits: tuple[int, int, float],
) -> int:
    """Attach at once what all continuations of a leaf agree on, as long as it is the best open node; this covers most
    of a tree. `limits`: most nodes, deepest depth, least log probability. Return the number of nodes."""
    loss, depth, node, here = leaf
    left, end, min_log_chance = limits
    length, origin = max([copy.length for copy in here]), min([copy.origin for copy in here])
    first, start, child, is_likely = len(tree), depth, node, True
    kinds: list[int] = []
    scores: list[float] = []
    while depth < end and len(kinds) < left:
        kind = kind_of(length + depth, Certainty.SURE, origin)
        chance = drafter.log_rate(state, kind)
        if chance - loss < min_log_chance and depth:
            is_likely = False
            break
        loss, depth, child = loss - chance, depth + 1, first + len(kinds)
        kinds.append(kind)
        scores.append(-loss)
        if waiting and waiting[0][:3] < (loss, depth, child):
            break
    if kinds:
        drafter.attach_chain(state, tree, node, here[0].tokens[start:depth], kinds, scores)
    if is_likely and depth < max([len(copy.tokens) for copy in here]):
        heappush(waiting, (loss, depth, child, here))
    return len(kinds)


def _choices(copies: Sequence[LookupMatch], depth: int) -> Iterator[tuple[int, Certainty, Sequence[LookupMatch]]]:
    """Yield the tokens at this depth by falling weight, with the certainty of each and the continuations that have it.
    A continuation weighs the square of its match length, and less the later it comes."""
    by_token: dict[int, list[LookupMatch]] = {}
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


BREAK = -1  # marks the end of a text; equal to no token
_SLACK = 1024  # tokens beyond the memory that are freed together


class NgramMatch(NamedTuple):
    """The last `length` tokens of the text also precede `place`."""

    length: int
    place: int


@dataclass
class _Chains:
    """All n-grams of one length: the last place after each, and for each place the previous one with the same
    n-gram."""

    length: int
    heads: dict[int, int] = field(default_factory=dict)  # hash of the n-gram -> the latest place after it
    before: array[int] = field(default_factory=lambda: array("q"))  # by place


class NgramIndex:
    """An index of the last `memory` tokens of a text. A place is indexed once a token is there, so a text never finds
    its own end."""

    def __init__(self, lengths: Sequence[int], memory: int) -> None:
        self._chains = [_Chains(length) for length in sorted(lengths, reverse=True)]
        self._memory, self._longest = memory, max(lengths)
        self._tokens: list[int] = []
        self._start = 0  # place of the first stored token
        self._has_ends = False  # whether there is a BREAK

    def __len__(self) -> int:
        """Return the number of indexed tokens."""
        return len(self._tokens)

    @property
    def entries(self) -> int:
        """Number of stored n-grams of all lengths."""
        return sum(len(chains.heads) for chains in self._chains)

    def extend(self, tokens: Sequence[int]) -> None:
        for start in range(0, len(tokens), _SLACK):
            self._extend(tokens[start : start + _SLACK])

    def _extend(self, tokens: Sequence[int]) -> None:
        """Index one n-gram length after the other, with tokens that an interrupted call left out, then forget what is
        too old."""
        known = self._tokens
        known += tokens
        end = self._start + len(known)
        self._has_ends = self._has_ends or BREAK in tokens
        for chains in self._chains:
            length, heads, before = chains.length, chains.heads, chains.before
            at = min(len(before) - length, 0)  # start of the n-gram before the next place
            text = tuple(known[len(before) - length - at :])
            for place in range(self._start + len(before), end):
                if at >= 0:
                    key = hash(text[at : at + length])
                    before.append(heads.get(key, -1))
                    heads[key] = place
                else:
                    before.append(-1)
                at += 1
        for place in range(max(end - len(tokens) - self._memory, 0), end - self._memory):
            self._forget(place)
        self._trim()

    def matches(self, text: Sequence[int], count: int, longest: int = 0, is_alone: bool = False) -> list[NgramMatch]:
        """Return at most `count` places after an occurrence of the last tokens of `text`: those of the longest n-gram
        first, of these the latest first; `is_alone`: only those of the longest n-gram. Match lengths are extended up to
        `longest`."""
        found: dict[int, int] = {}
        tokens, start, end = self._tokens, self._start, tuple(text[-self._longest :])
        oldest = max(start + len(tokens) - self._memory, 0)
        for chains in self._chains:
            length, left = chains.length, 2 * count
            longest_match = min(max(length, longest), len(text))
            place = chains.heads.get(hash(end[-length:]), -1) if len(end) >= length else -1
            while place >= oldest and left and len(found) < count:
                here, same = place - start, 0
                limit = min(longest_match, here)
                while same < limit and tokens[here - same - 1] == text[-same - 1]:
                    same += 1
                if same >= length:  # not just a hash collision
                    found.setdefault(place, same)
                place, left = chains.before[here], left - 1
            if is_alone and found:
                break
        return [NgramMatch(length, place) for place, length in found.items()]

    def after(self, place: int, count: int) -> list[int]:
        """Return up to `count` tokens from a place on, within its text."""
        tokens = self._tokens[place - self._start : place - self._start + count]
        return tokens[: tokens.index(BREAK)] if self._has_ends and BREAK in tokens else tokens

    def _forget(self, place: int) -> None:
        """Remove the n-grams whose last occurrence is here."""
        for chains in self._chains:
            if place - self._start >= chains.length:
                here = place - self._start
                key = hash(tuple(self._tokens[here - chains.length : here]))
                if chains.heads.get(key) == place:
                    del chains.heads[key]

    def _trim(self) -> None:
        """Free old tokens from time to time."""
        spare = len(self._tokens) - self._memory - self._longest
        if spare >= _SLACK:
            chains = [_Chains(each.length, each.heads, each.before[spare:]) for each in self._chains]
            self._tokens, self._chains, self._start = self._tokens[spare:], chains, self._start + spare
