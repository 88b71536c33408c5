"""The tree of what stood behind several places: the likeliest nodes first, with chances by how the places agree."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import islice
from typing import Any, NamedTuple

from outpace.core.errors import check_range, check_whole
from outpace.core.tree import TokenTree
from outpace.drafters._grafter import Grade, Grafter, kind_of

_FADE = 0.9  # of a place's weight, for each that stands before it: of equal matches the latest stands first
_AGREED = 0.8  # of the places' weight, behind one token: the source is sure of it


class Copy(NamedTuple):
    """What stood at one place, behind so many tokens that are the text's last ones."""

    length: int
    tokens: Sequence[int]


class Limits(NamedTuple):
    """So many nodes in all, so many children of one, and the least chance that one is reached."""

    offered: int
    branches: int
    least_chance: float


def limits_of(options: Any) -> Limits:
    """From a drafter's options of the same names."""
    return Limits(options.offered, options.branches, options.least_chance)


def check_limits(options: Any) -> None:
    """UserError for a value of these options that is out of range."""
    check_whole("offered", options.offered, 1, 4096)
    check_whole("branches", options.branches, 1, 64)
    check_range("least_chance", options.least_chance, 0.0, 1.0)


def grow_copies(grafter: Grafter[Any], state: Any, tree: TokenTree, copies: Sequence[Copy], limits: Limits) -> None:
    """Best first: a node's children are what stands behind it at the places that led to it."""
    least = math.log(limits.least_chance) if limits.least_chance else -math.inf
    waiting = [(0.0, 0, 0, copies)]  # -W, depth, node, places
    left = limits.offered
    while waiting and left > 0:
        loss, depth, node, here = heappop(waiting)
        for token, grade, those in islice(_choices(here, depth), limits.branches):
            kind = kind_of(max(copy.length for copy in those) + depth, grade)
            if math.log(grafter.rate(state, kind)) - loss >= least:
                child = grafter.plant(state, tree, node, token, kind)
                heappush(waiting, (-tree.scores[child], depth + 1, child, those))
                left -= 1


def _choices(copies: Sequence[Copy], depth: int) -> Iterator[tuple[int, Grade, Sequence[Copy]]]:
    """The tokens that stand so deep, the weightiest first: how sure the places are of each, and those that have it. A
    place weighs as the square of its match, and less the later it stands in their order."""
    if len(copies) == 1:  # as it mostly is, deep in the tree
        if depth < len(copies[0].tokens):
            yield copies[0].tokens[depth], Grade.SURE, copies
        return
    by_token: dict[int, list[Copy]] = {}
    weights: dict[int, float] = {}
    for place, copy in enumerate(copies):
        if depth < len(copy.tokens):
            token = copy.tokens[depth]
            by_token.setdefault(token, []).append(copy)
            weights[token] = weights.get(token, 0.0) + copy.length**2 * _FADE**place
    total = sum(weights.values())
    grade = Grade.LIKELY
    for token in sorted(weights, key=weights.__getitem__, reverse=True):
        yield token, Grade.SURE if weights[token] >= _AGREED * total else grade, by_token[token]
        grade = Grade.OTHER
