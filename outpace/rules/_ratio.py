"""The walk of the rules that judge by the ratio p / q, from the root down; what they share with those that walk up.

A picked token (an n-gram's) counts as drawn from a q that is certain of it: it is accepted with p, and the residual is
p without it; several picked siblings are tried in turn. Every number is keyed by the id of its node, which never
returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from outpace.core.adjust import adjust_logits
from outpace.core.distribution import UNFILTERED, DecisionKey, TokenDistribution, distribution_of, one_hot
from outpace.core.logits import host_array
from outpace.core.noise import ACCEPT, RESIDUAL
from outpace.core.sampling import log_probs
from outpace.core.tree import Role, Siblings, TokenTree, path_to
from outpace.core.types import Row, Rule, Verdict
from outpace.rules.base import takes_arrays

if TYPE_CHECKING:
    from torch import Tensor


class NodeScores(NamedTuple):
    """A node's row of scores [vocab], of which p is made where the walk comes to the node: most it never does."""

    row: Row
    logits: Tensor | np.ndarray

    @property
    def p(self) -> TokenDistribution:
        """p after the node."""
        return distribution_of(self.scores, self.row.request.sampling)

    @property
    def raw_p(self) -> TokenDistribution:
        """The same at temperature 1 and without filters."""
        return distribution_of(self.scores, UNFILTERED)

    @property
    def scores(self) -> np.ndarray:
        """What p is made of, as the row's request adjusts it, on the host. [vocab]"""
        return host_array(adjust_logits(self.logits[None], [self.row]))[0]

    def key(self, purpose: int) -> DecisionKey:
        """What decides at this node."""
        return key_of(self.row, self.row.node_id, purpose)


class DrawnToken(NamedTuple):
    """One drawn token, the child that carries it, and what decides whether that is accepted."""

    token: int
    child: int
    key: DecisionKey


class SiblingGroup(NamedTuple):
    """Children that were drawn from one q, in the order drawn; a token that came out again has its child again."""

    q: TokenDistribution
    draws: list[DrawnToken]


class RatioRule(Rule):
    """What all rules of this kind share: p where it is needed, and which trees they take."""

    siblings = Siblings.DRAWN

    @takes_arrays
    def reduce(self, logits: Tensor | np.ndarray, rows: Sequence[Row]) -> list[NodeScores]:
        return [NodeScores(row, scores) for row, scores in zip(rows, logits, strict=True)]

    def rank(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        """log q"""
        return log_probs(adjust_logits(logits, rows), [row.request.sampling for row in rows])

    def groups(self, tree: TokenTree, node: int, judged: NodeScores) -> Iterator[SiblingGroup]:
        """The children of a node, as they are to be judged one group after the other."""
        children = [child for child in tree.children(node) if tree.roles[child] is not Role.PROBE]
        kind = tree.siblings.get(node, Siblings.PICKED)
        if kind is Siblings.PICKED:
            for child in children:
                token = tree.tokens[child]
                yield SiblingGroup(
                    one_hot(token), [DrawnToken(token, child, key_of(judged.row, tree.ids[child], ACCEPT))]
                )
        elif children:
            drawn = tree.drawn[node]
            if kind is not self.siblings or (len(drawn.tokens) > 1 and not self.fan):
                name = type(self).__module__.rpartition(".")[2]
                raise ValueError(f"{name} is not exact for {len(drawn.tokens)} {kind.value} children of node {node}")
            yield SiblingGroup(drawn.q, _draws(tree, children, drawn.tokens, judged.row))


class TopDown(RatioRule):
    """Goes on while a child is accepted; where none is, or none stands, the target's own token comes from what the
    rejections have left of p."""

    def walk(self, tree: TokenTree, picks: Sequence[NodeScores]) -> Verdict:
        path, relaxed = [0], 0
        while path[-1] < len(picks):
            judged = picks[path[-1]]
            child, rest, is_relaxed = self._accept(tree, path[-1], judged)
            if child is None:
                return Verdict(path, self.chance.draw(judged.key(RESIDUAL), rest), relaxed)
            path.append(child)
            relaxed += is_relaxed
        return Verdict(path, None, relaxed)

    def _accept(self, tree: TokenTree, node: int, judged: NodeScores) -> tuple[int | None, TokenDistribution, bool]:
        """The child that is accepted, or None with the distribution of the target's own token; and whether the exact
        rule, by the same number, would have rejected that child."""
        own = judged.p
        p = self.goal(tree, node, judged, own)
        for group in self.groups(tree, node, judged):
            child, p = self.judge(p, group)
            if child is not None:
                return child, p, not self.lossless and self._is_relaxed(child, self.strict(p, own), group)
        return None, p, False

    def _is_relaxed(self, child: int, p: TokenDistribution, group: SiblingGroup) -> bool:
        token, _, key = next(draw for draw in group.draws if draw.child == child)
        return self.chance.number(key) * group.q.of(token) >= p.of(token)

    def goal(self, tree: TokenTree, node: int, judged: NodeScores, p: TokenDistribution) -> TokenDistribution:
        """The distribution that is kept after a node, where the target's is p."""
        return p

    def strict(self, goal: TokenDistribution, p: TokenDistribution) -> TokenDistribution:
        """What a lossy rule would judge by if it were exact; `goal` is what the rejections have left."""
        return goal

    def judge(self, p: TokenDistribution, group: SiblingGroup) -> tuple[int | None, TokenDistribution]:
        """The accepted child of a group, or None and the residual: every draw in turn with min(1, p / q)."""
        q = group.q
        for token, child, key in group.draws:
            if self.chance.accepts(key, self.acceptance(p, q, token)):
                return child, p
            p, q = residual(p, q), self.after(q, token)
        return None, p

    def acceptance(self, p: TokenDistribution, q: TokenDistribution, token: int) -> float:
        """The chance to accept a drawn token; certain from 1 on."""
        return p.of(token) / q.of(token)

    def after(self, q: TokenDistribution, token: int) -> TokenDistribution:
        """What the next token of the group was drawn from."""
        return q


def _draws(tree: TokenTree, children: Sequence[int], tokens: Sequence[int], row: Row) -> list[DrawnToken]:
    known = {tree.tokens[child]: child for child in children}
    draws = []
    for place, token in enumerate(tokens):
        key = key_of(row, tree.ids[known[token]], ACCEPT).again(tokens[:place].count(token))
        draws.append(DrawnToken(token, known[token], key))
    return draws


def key_of(row: Row, node_id: int, purpose: int) -> DecisionKey:
    """What decides a node of this row's request."""
    return DecisionKey(row.request.seed, row.request.choice, node_id, purpose)


def residual(p: TokenDistribution, q: TokenDistribution) -> TokenDistribution:
    """norm((p - q)+)"""
    rest = p.above(q)
    return rest if rest.total > 0 else p  # p = q up to rounding: nothing is ever rejected there


class BottomUp(RatioRule):
    """Accepts the first leaf that it may, in the order in which children were drawn; at the latest the root."""

    def walk(self, tree: TokenTree, picks: Sequence[NodeScores]) -> Verdict:
        verdict = self._visit(tree, picks, 0, 1.0)
        assert verdict is not None, "the root's weight is 1"
        return verdict

    def _visit(self, tree: TokenTree, picks: Sequence[NodeScores], node: int, weight: float) -> Verdict | None:
        """What is accepted at or below a node that is reached with this weight; None for nothing."""
        judged = picks[node]
        p = judged.p
        for token, child, q in self._in_turn(tree, node, judged):
            carried = min(1.0, weight * p.of(token) / q.of(token))
            verdict = self._visit(tree, picks, child, carried) if carried > 0 else None
            if verdict is not None:
                return verdict
            weight, p = without_child(weight, p, q)
        if not self.chance.accepts(judged.key(ACCEPT), weight):
            return None
        return Verdict(path_to(tree, node), self.chance.draw(judged.key(RESIDUAL), p))

    def _in_turn(self, tree: TokenTree, node: int, judged: NodeScores) -> Iterator[tuple[int, int, TokenDistribution]]:
        """Each child's token, the child, and the q that it was drawn from once those before it were taken away."""
        for group in self.groups(tree, node, judged):
            q = group.q
            for token, child, _ in group.draws:
                yield token, child, q
                q = q.without(token)


def without_child(weight: float, p: TokenDistribution, q: TokenDistribution) -> tuple[float, TokenDistribution]:
    """The weight and p of a node whose child, drawn from q, was not accepted."""
    rest = p.above(q, weight)
    if rest.total <= 0.0:
        return (weight, p) if weight >= 1.0 else (0.0, p)  # p = q up to rounding: the child is always accepted
    return rest.total / (rest.total + (1.0 - weight)), rest
