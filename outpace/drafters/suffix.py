"""Copies what followed the longest ends of the text that stood before, here or in past answers, as often as it did.

SuffixDecoding: Oliaro et al., 2024, arXiv:2411.04975; no training, no model.

Chains of n-grams stand for the suffix trees, so that neither work a token nor memory grows with the text: of all
places where the last tokens stood, those with the longest match are looked at, of these the latest ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice
from typing import NamedTuple

from outpace.core.errors import check_range, check_whole
from outpace.core.tree import TokenTree
from outpace.core.types import Observation, Request
from outpace.drafters._grafter import Grade, Grafter, GraftState, kind_of
from outpace.drafters._index import BREAK, Index

_LENGTHS = (1, 2, 4, 8, 16)  # n-grams that are looked up; what is longer is compared token by token
_AGREED = 0.8  # of the places' weight, behind one token: the source is sure of it


@dataclass(frozen=True)
class Options:
    """Match up to `depth` tokens, at `places` places of the text and as many of past answers; copy `copies` tokens of
    each, and offer those that are expected to be reached with a chance of `least_chance`, `offered` in all and
    `branches` behind the same token. `window` tokens of the text and `past` tokens of past answers are held; 0: none of
    these."""

    depth: int = 64
    places: int = 16
    copies: int = 32
    offered: int = 48
    branches: int = 4
    least_chance: float = 0.1
    window: int = 65536
    past: int = 65536

    def __post_init__(self) -> None:
        check_whole("depth", self.depth, 1, 1024)
        check_whole("places", self.places, 1, 1024)
        check_whole("copies", self.copies, 1, 256)
        check_whole("offered", self.offered, 1, 4096)
        check_whole("branches", self.branches, 1, 64)
        check_range("least_chance", self.least_chance, 0.0, 1.0)
        check_whole("window", self.window, 16)
        check_whole("past", self.past, 0)


@dataclass
class SuffixState(GraftState):
    """Where the text's n-grams stood in it."""

    index: Index = field(default_factory=lambda: Index((1,), 1))


class _Copy(NamedTuple):
    """What stood at one place, behind so many tokens that are the text's last ones."""

    length: int
    tokens: Sequence[int]


class Suffix(Grafter[SuffixState]):
    """Grows the tree of all that followed, the likeliest nodes first."""

    name = "suffix"

    def __init__(self, options: Options) -> None:
        super().__init__()
        self._options = options
        self._past = Index(_LENGTHS, options.past) if options.past else None

    def open(self, request: Request) -> SuffixState:
        state = SuffixState(request, list(request.prompt))
        state.index = Index(_LENGTHS, self._options.window)
        state.index.extend(request.prompt)
        return state

    def propose(self, state: SuffixState, tree: TokenTree) -> None:
        """Best first: a node's children are what stands behind it at the places that led to it."""
        least = math.log(self._options.least_chance) if self._options.least_chance else -math.inf
        waiting = [(0.0, 0, 0, list(self._copies(state)))]  # -W, depth, node, places
        left = self._options.offered
        while waiting and left > 0:
            loss, depth, node, copies = heappop(waiting)
            for token, grade, those in islice(_choices(copies, depth), self._options.branches):
                kind = kind_of(max(copy.length for copy in those) + depth, grade)
                if math.log(self.rate(state, kind)) - loss >= least:
                    child = self.plant(state, tree, node, token, kind)
                    heappush(waiting, (-tree.scores[child], depth + 1, child, those))
                    left -= 1

    def observe(self, state: SuffixState, seen: Observation) -> None:
        super().observe(state, seen)
        state.index.extend(seen.tokens)

    def close(self, state: SuffixState) -> None:
        if self._past is not None:
            self._past.extend([*state.tokens[len(state.request.prompt) :], BREAK])

    def _copies(self, state: SuffixState) -> Iterator[_Copy]:
        """What followed at the best places of the text and of past answers."""
        options = self._options
        for index in (state.index, self._past):
            if index is not None:
                for length, place in index.matches(state.tokens, options.places, options.depth):
                    yield _Copy(min(length, options.depth), index.after(place, options.copies))


def _choices(copies: Sequence[_Copy], depth: int) -> Iterator[tuple[int, Grade, list[_Copy]]]:
    """The tokens that stand so deep, the weightiest first: how sure the places are of each, and those that have it. A
    place weighs as the square of its match."""
    by_token: dict[int, list[_Copy]] = {}
    for copy in copies:
        if depth < len(copy.tokens):
            by_token.setdefault(copy.tokens[depth], []).append(copy)
    weights = {token: sum(copy.length**2 for copy in those) for token, those in by_token.items()}
    total = sum(weights.values())
    grade = Grade.LIKELY
    for token in sorted(weights, key=weights.__getitem__, reverse=True):
        yield token, Grade.SURE if weights[token] >= _AGREED * total else grade, by_token[token]
        grade = Grade.OTHER


def build(options: Options, **_: object) -> Suffix:
    """The drafter; it needs no model."""
    return Suffix(options)
