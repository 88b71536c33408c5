"""The walk of the rules that judge by the ratio p / q, from the root down; what they share with those that walk up.

A picked token (an n-gram's) counts as drawn from a q that is certain of it: it is accepted with p, and the residual is
p without it; several picked siblings are tried in turn. Every number is keyed by the id of its node, which never
returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from outpace.core.adjust import adjusted
from outpace.core.chance import Key
from outpace.core.chances import UNSCALED, Chances, certain, chances_of
from outpace.core.logits import host_array
from outpace.core.noise import ACCEPT, RESIDUAL
from outpace.core.sampling import processed
from outpace.core.tree import Role, Siblings, TokenTree
from outpace.core.types import Row, Rule, Verdict
from outpace.rules._arrays import takes_arrays

if TYPE_CHECKING:
    from torch import Tensor


class Judged(NamedTuple):
    """A node's row of scores [vocab], of which p is made where the walk comes to the node: most it never does."""

    row: Row
    logits: Tensor | np.ndarray

    @property
    def p(self) -> Chances:
        """p after the node."""
        return chances_of(self.scores, self.row.request.sampling)

    @property
    def raw_p(self) -> Chances:
        """The same at temperature 1 and without filters."""
        return chances_of(self.scores, UNSCALED)

    @property
    def scores(self) -> np.ndarray:
        """What p is made of, as the row's request adjusts it, on the host. [vocab]"""
        return host_array(adjusted(self.logits[None], [self.row]))[0]

    def key(self, purpose: int) -> Key:
        """What decides at this node."""
        return key_of(self.row, self.row.node_id, purpose)


class Draw(NamedTuple):
    """One drawn token, the child that carries it, and what decides whether that is accepted."""

    token: int
    child: int
    key: Key


class Group(NamedTuple):
    """Children that were drawn from one q, in the order drawn; a token that came out again has its child again."""

    q: Chances
    draws: list[Draw]


class RatioRule(Rule):
    """What all rules of this kind share: p where it is needed, and which trees they take."""

    siblings = Siblings.DRAWN

    @takes_arrays
    def reduce(self, logits: Tensor | np.ndarray, rows: Sequence[Row]) -> list[Judged]:
        return [Judged(row, scores) for row, scores in zip(rows, logits, strict=True)]

    def rank(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        """log q"""
        return processed(adjusted(logits, rows), [row.request.sampling for row in rows])

    def groups(self, tree: TokenTree, node: int, judged: Judged) -> Iterator[Group]:
        """The children of a node, as they are to be judged one group after the other."""
        children = [child for child in tree.children(node) if tree.roles[child] is not Role.PROBE]
        kind = tree.siblings.get(node, Siblings.PICKED)
        if kind is Siblings.PICKED:
            for child in children:
                token = tree.tokens[child]
                yield Group(certain(token), [Draw(token, child, key_of(judged.row, tree.ids[child], ACCEPT))])
        elif children:
            drawn = tree.drawn[node]
            if kind is not self.siblings or (len(drawn.tokens) > 1 and not self.fan):
                name = type(self).__module__.rpartition(".")[2]
                raise ValueError(f"{name} is not exact for {len(drawn.tokens)} {kind.value} children of node {node}")
            yield Group(drawn.q, _draws(tree, children, drawn.tokens, judged.row))


class TopDown(RatioRule):
    """Goes on while a child is accepted; where none is, or none stands, the target's own token comes from what the
    rejections have left of p."""

    def walk(self, tree: TokenTree, picks: Sequence[Judged]) -> Verdict:
        path, relaxed = [0], 0
        while path[-1] < len(picks):
            judged = picks[path[-1]]
            child, rest, is_relaxed = self._accept(tree, path[-1], judged)
            if child is None:
                return Verdict(path, self.chance.draw(judged.key(RESIDUAL), rest), relaxed)
            path.append(child)
            relaxed += is_relaxed
        return Verdict(path, None, relaxed)

    def _accept(self, tree: TokenTree, node: int, judged: Judged) -> tuple[int | None, Chances, bool]:
        """The child that is accepted, or None with the distribution of the target's own token; and whether the exact
        rule, by the same number, would have rejected that child."""
        own = judged.p
        p = self.goal(tree, node, judged, own)
        for group in self.groups(tree, node, judged):
            child, p = self.judge(p, group)
            if child is not None:
                return child, p, not self.lossless and self._is_relaxed(child, self.strict(p, own), group)
        return None, p, False

    def _is_relaxed(self, child: int, p: Chances, group: Group) -> bool:
        token, _, key = next(draw for draw in group.draws if draw.child == child)
        return self.chance.number(key) * group.q.of(token) >= p.of(token)

    def goal(self, tree: TokenTree, node: int, judged: Judged, p: Chances) -> Chances:
        """The distribution that is kept after a node, where the target's is p."""
        return p

    def strict(self, goal: Chances, p: Chances) -> Chances:
        """What a lossy rule would judge by if it were exact; `goal` is what the rejections have left."""
        return goal

    def judge(self, p: Chances, group: Group) -> tuple[int | None, Chances]:
        """The accepted child of a group, or None and the residual: every draw in turn with min(1, p / q)."""
        q = group.q
        for token, child, key in group.draws:
            if self.chance.accepts(key, self.acceptance(p, q, token)):
                return child, p
            p, q = residual(p, q), self.after(q, token)
        return None, p

    def acceptance(self, p: Chances, q: Chances, token: int) -> float:
        """The chance to accept a drawn token; certain from 1 on."""
        return p.of(token) / q.of(token)

    def after(self, q: Chances, token: int) -> Chances:
        """What the next token of the group was drawn from."""
        return q


def _draws(tree: TokenTree, children: Sequence[int], tokens: Sequence[int], row: Row) -> list[Draw]:
    known = {tree.tokens[child]: child for child in children}
    draws = []
    for place, token in enumerate(tokens):
        key = key_of(row, tree.ids[known[token]], ACCEPT).again(tokens[:place].count(token))
        draws.append(Draw(token, known[token], key))
    return draws


def key_of(row: Row, node_id: int, purpose: int) -> Key:
    """What decides a node of this row's request."""
    return Key(row.request.seed, row.request.choice, node_id, purpose)


def residual(p: Chances, q: Chances) -> Chances:
    """norm((p - q)+)"""
    rest = p.above(q)
    return rest if rest.total > 0 else p  # p = q up to rounding: nothing is ever rejected there
