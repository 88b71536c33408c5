"""Slow twins of the ratio rules, in plain Python and in another form than the library's: what one round gives.

They know a drawn tree as nested lists and a pair of models as two functions of the path. Each gives the chance to
accept every path, from which lengths follow.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

Path = tuple[int, ...]
Row = list[float]
Rows = Callable[[Path], Row]  # the distribution after a path
Tree = dict[Path, list[int]]  # the tokens drawn below each path, in order; repeats included
Paths = dict[Path, float]


def mean_length(paths: Paths) -> float:
    """Tokens accepted on average."""
    return math.fsum(len(path) * chance for path, chance in paths.items())


def above(p: Sequence[float], q: Sequence[float]) -> Row:
    return [max(one - other, 0.0) for one, other in zip(p, q, strict=True)]


def norm(row: Row) -> Row:
    total = math.fsum(row)
    return [value / total for value in row]


def but(q: Row, token: int) -> Row:
    rest = [0.0 if other == token else value for other, value in enumerate(q)]
    return norm(rest) if any(rest) else rest


def trees(q: Rows, counts: Sequence[int], distinct: bool, path: Path = ()) -> Iterator[tuple[float, Tree]]:
    """Yield every tree that may be drawn with this many children below a node by its depth, and its probability.

    Below a token drawn n times there are n times as many children.
    """
    if not counts:
        yield 1.0, {}
        return
    for chance, tokens in _draws(q(path), counts[0], distinct):
        below = [
            list(
                trees(
                    q,
                    [counts[1] * tokens.count(token), *counts[2:]] if len(counts) > 1 else [],
                    distinct,
                    (*path, token),
                )
            )
            for token in dict.fromkeys(tokens)
        ]
        for parts in itertools.product(*below):
            tree: Tree = {path: list(tokens)}
            for _, part in parts:
                tree |= part
            yield chance * math.prod(one for one, _ in parts), tree


def _draws(q: Row, count: int, distinct: bool) -> Iterator[tuple[float, tuple[int, ...]]]:
    if not count or not any(q):
        yield 1.0, ()
        return
    for token, chance in enumerate(q):
        if chance:
            for rest, tokens in _draws(but(q, token) if distinct else q, count - 1, distinct):
                yield chance * rest, (token, *tokens)


def averaged(
    judge: Callable[[Rows, Rows, Tree], Paths], p: Rows, q: Rows, counts: Sequence[int], distinct: bool
) -> Paths:
    """The chance that a round accepts each path, over all trees."""
    found: defaultdict[Path, float] = defaultdict(float)
    for chance, tree in trees(q, counts, distinct):
        for path, accepted in judge(p, q, tree).items():
            found[path] += chance * accepted
    return found


def by_rounds(p: Rows, q: Rows, tree: Tree, distinct: bool, path: Path = ()) -> Paths:
    """multi_round, without_replacement, and rejection where one child is drawn: one acceptance after the other."""
    found: Paths = {}
    left, goal, proposal = 1.0, p(path), q(path)
    for token in tree.get(path, []):
        chance = min(1.0, goal[token] / proposal[token])
        for below, accepted in by_rounds(p, q, tree, distinct, (*path, token)).items() if chance else ():
            found[below] = found.get(below, 0.0) + left * chance * accepted
        left *= 1.0 - chance
        if left <= 0.0:
            break
        goal = norm(above(goal, proposal))
        proposal = but(proposal, token) if distinct else proposal
    found[path] = left
    return found


def by_k_seq(p: Rows, q: Rows, tree: Tree, path: Path = ()) -> Paths:
    """spectr, with rho found by small steps of a secant."""
    tokens = tree.get(path, [])
    if not tokens:
        return {path: 1.0}
    goal, proposal = p(path), q(path)
    rho = _rho(goal, proposal, len(tokens))
    found: Paths = {}
    left = 1.0
    for token in tokens:
        chance = min(1.0, goal[token] / (rho * proposal[token]))
        for below, accepted in by_k_seq(p, q, tree, (*path, token)).items() if chance else ():
            found[below] = found.get(below, 0.0) + left * chance * accepted
        left *= 1.0 - chance
    found[path] = left
    return found


def _rho(p: Row, q: Row, count: int) -> float:
    def excess(rho: float) -> float:
        beta = math.fsum(min(one / rho, other) for one, other in zip(p, q, strict=True))
        return 1.0 - (1.0 - beta) ** count - rho * beta

    low, high = 1.0, float(count)
    while high - low > 1e-14 * high and excess(low) > 0:
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high if excess(low) > 0 else low


def by_blocks(p: Rows, q: Rows, tree: Tree) -> Paths:
    """block, as the paper has it: all positions are tried on their own, and the last that passes counts."""
    chain: Path = ()
    while chain in tree:
        chain = (*chain, tree[chain][0])
    weight, passes = 1.0, [1.0]
    for length in range(1, len(chain) + 1):
        before, token = chain[: length - 1], chain[length - 1]
        weight = min(1.0, weight * p(before)[token] / q(before)[token])
        if length == len(chain):
            passes.append(weight)
        else:
            rest = math.fsum(
                max(weight * a - b, 0.0) for a, b in zip(p(chain[:length]), q(chain[:length]), strict=True)
            )
            passes.append(rest / (rest + 1.0 - weight) if rest + 1.0 - weight > 0 else 1.0)
    return {
        chain[:length]: passes[length] * math.prod(1.0 - later for later in passes[length + 1 :])
        for length in range(len(chain) + 1)
    }


def by_traversal(p: Rows, q: Rows, tree: Tree) -> Paths:
    """traversal, as the paper has it: leaves are deleted from a tree whose weights are computed anew each time."""
    rows = {path: p(path) for path in [(), *((*path, token) for path in tree for token in tree[path])]}
    proposals = {path: q(path) for path in tree}
    left = {path: list(tokens) for path, tokens in tree.items()}
    ends: defaultdict[Path, float] = defaultdict(float)
    root, chance = 1.0, 1.0
    inner: dict[Path, float] = {}  # weights of nodes that lost a child
    while True:
        leaf: Path = ()
        weights = {(): root}
        while left.get(leaf):
            child = (*leaf, left[leaf][0])
            token = child[-1]
            ratio = weights[leaf] * rows[leaf][token] / proposals[leaf][token]
            weights[child] = inner.get(child, min(1.0, ratio))
            leaf = child
        ends[leaf] += chance * weights[leaf]
        chance *= 1.0 - weights[leaf]
        if not leaf or chance <= 0.0:
            return ends
        parent, token = leaf[:-1], leaf[-1]
        weight = weights[parent]
        rest = above([weight * value for value in rows[parent]], proposals[parent])
        total = math.fsum(rest)
        after = total / (total + (1.0 - weight)) if total else 0.0
        rows[parent] = norm(rest) if total else rows[parent]
        proposals[parent] = but(proposals[parent], token)
        left[parent].remove(token)
        inner = {path: value for path, value in inner.items() if path != leaf}
        if parent:
            inner[parent] = after
        else:
            root = after
