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
    """What stood at one place, behind so many tokens that are the text's last ones, in one of the grafter's origins."""

    length: int
    tokens: Sequence[int]
    origin: int = 0


_Open = tuple[float, int, int, Sequence[Copy]]  # -W, depth, node, and the places that led to it


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


def _agreed(here: Sequence[Copy], depth: int) -> int:
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
    grafter: Grafter[Any],
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
        kind = kind_of(length + depth, Grade.SURE, origin)
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


def _choices(copies: Sequence[Copy], depth: int) -> Iterator[tuple[int, Grade, Sequence[Copy]]]:
    """The tokens that stand so deep, the weightiest first: how sure the places are of each, and those that have it. A
    place weighs as the square of its match, and less the later it stands in their order."""
    by_token: dict[int, list[Copy]] = {}
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
    grade = Grade.LIKELY
    for token in sorted(weights, key=weights.__getitem__, reverse=True):
        yield token, Grade.SURE if weights[token] >= _AGREED * total else grade, by_token[token]
        grade = Grade.OTHER
