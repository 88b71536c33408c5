"""The rules that accept by the ratio p / q: the walks from the root down and from the leaves up.

A picked token (an n-gram's, for example) counts as drawn from a q that is certain of it: it is accepted with
probability p, and the residual is p without it; several picked siblings are tried one after another. Every random
number is keyed by the id of its node, and ids are never used again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from outpace.core.adjust import adjust_logits
from outpace.core.distribution import UNFILTERED, DecisionKey, TokenDistribution, distribution_of, one_hot
from outpace.core.logits import host_array
from outpace.core.noise import ACCEPT, RESIDUAL
from outpace.core.sampling import Sampling
from outpace.core.tree import Role, Siblings, TokenTree
from outpace.core.types import Row, RuleTraits, Verdict
from outpace.rules.base import LogProbRule

if TYPE_CHECKING:
    from torch import Tensor


class NodeScores(NamedTuple):
    """A node's logits [vocab]. p is computed when the walk reaches the node; most nodes are never reached."""

    row: Row
    logits: Tensor | np.ndarray

    @property
    def p(self) -> TokenDistribution:
        """Return p after the node."""
        return self._p(self.row.request.sampling)

    @property
    def raw_p(self) -> TokenDistribution:
        """Return p at temperature 1 and without filters."""
        return self._p(UNFILTERED)

    def _p(self, sampling: Sampling) -> TokenDistribution:
        """Return p; where no score is finite, all mass is on the token that greedy decoding would write."""
        p = distribution_of(scores := self.scores, sampling)
        return p if p.total > 0 else one_hot(int(scores.argmax()))

    @property
    def scores(self) -> np.ndarray:
        """Return the adjusted logits on the host. [vocab]"""
        return host_array(adjust_logits(self.logits[None], [self.row]))[0]

    def key(self, purpose: int) -> DecisionKey:
        """Return the key of a random decision at this node."""
        return key_of(self.row, self.row.node_id, purpose)


class DrawnToken(NamedTuple):
    """One drawn token, the child that carries it, and the key that decides whether it is accepted."""

    token: int
    child: int
    key: DecisionKey


class SiblingGroup(NamedTuple):
    """Children drawn from one q, in the order drawn; a token drawn twice appears twice with the same child."""

    q: TokenDistribution
    draws: list[DrawnToken]


class RatioRule(LogProbRule):
    """The base of all ratio rules: computes p where it is needed, and refuses trees that a rule is not exact for."""

    traits = RuleTraits(lossless=True, siblings=Siblings.DRAWN, takes_arrays=True)

    def reduce(self, logits: Tensor | np.ndarray, rows: Sequence[Row]) -> list[NodeScores]:
        return [NodeScores(row, scores) for row, scores in zip(rows, logits, strict=True)]

    def groups(self, tree: TokenTree, node: int, scores: NodeScores) -> Iterator[SiblingGroup]:
        """Yield the children of a node in the groups in which they are to be tried."""
        children = [child for child in tree.children(node) if tree.roles[child] != Role.PROBE]
        kind = tree.siblings_of(node)
        if kind == Siblings.PICKED:
            for child in children:
                token = tree.tokens[child]
                yield SiblingGroup(one_hot(token), [DrawnToken(token, child, key_of(scores.row, tree.ids[child]))])
        elif children:
            drawn = tree.drawn[node]
            if kind is not self.traits.siblings or (len(drawn.tokens) > 1 and not self.traits.several_draws):
                name = type(self).__module__.rpartition(".")[2]
                raise ValueError(f"{name} is not exact for {len(drawn.tokens)} {kind.label} children of node {node}")
            yield SiblingGroup(drawn.q, _draws(tree, children, drawn.tokens, scores.row))


class TopDown(RatioRule):
    """Follows accepted children from the root; after the last one, draws from what the rejections left of p."""

    def walk(self, tree: TokenTree, picks: Sequence[NodeScores]) -> Verdict:
        path, relaxed = [0], 0
        while path[-1] < len(picks):
            scores = picks[path[-1]]
            child, rest, is_relaxed = self._accept(tree, path[-1], scores)
            if child is None:
                return Verdict(path, self.random_source.draw(scores.key(RESIDUAL), rest), relaxed)
            path.append(child)
            relaxed += is_relaxed
        return Verdict(path, None, relaxed)

    def _accept(self, tree: TokenTree, node: int, scores: NodeScores) -> tuple[int | None, TokenDistribution, bool]:
        """Return the accepted child, or None and the recovery token's distribution.

        The last value says whether the exact rule would have rejected the child by the same random number.
        """
        own = scores.p
        p = self.goal(tree, node, scores, own)
        for group in self.groups(tree, node, scores):
            child, p = self.verify_group(p, group)
            if child is not None:
                is_relaxed = not self.traits.lossless and self._is_relaxed(child, self.strict(p, own), group)
                return child, p, is_relaxed
        return None, p, False

    def _is_relaxed(self, child: int, p: TokenDistribution, group: SiblingGroup) -> bool:
        token, _, key = next(draw for draw in group.draws if draw.child == child)
        return self.random_source.number(key) * group.q.probability(token) >= p.probability(token)

    def goal(self, tree: TokenTree, node: int, scores: NodeScores, p: TokenDistribution) -> TokenDistribution:
        """Return the distribution that the rule keeps after a node, given the target's p."""
        return p

    def strict(self, goal: TokenDistribution, p: TokenDistribution) -> TokenDistribution:
        """Return what an exact rule would compare with q; `goal` is what the rejections left."""
        return goal

    def verify_group(self, p: TokenDistribution, group: SiblingGroup) -> tuple[int | None, TokenDistribution]:
        """Return the accepted child of a group, or None and the residual: each draw with min(1, p / q), in order."""
        q = group.q
        for token, child, key in group.draws:
            if self.random_source.accepts(key, self.acceptance(p, q, token)):
                return child, p
            p, q = residual(p, q), self.after(q, token)
        return None, p

    def acceptance(self, p: TokenDistribution, q: TokenDistribution, token: int) -> float:
        """Return the probability of accepting a drawn token; values above 1 count as 1."""
        return p.probability(token) / q.probability(token)

    def after(self, q: TokenDistribution, token: int) -> TokenDistribution:
        """Return the distribution from which the group's next token was drawn."""
        return q


class BottomUp(RatioRule):
    """Walks from the leaves up: a token is judged by the ratios of its whole path.

    Every node has a weight w: 1 at the root, min(1, w p(x) / q(x)) at a child with token x. A node without remaining
    children is accepted with probability w, and the next token is drawn from its p. If it is not accepted, it is
    removed, and with S = sum (w p - q)+ its parent continues with w = S / (S + 1 - w) and p = norm((w p - q)+). Leaves
    are tried in the order in which children were drawn; the root is always accepted.
    """

    def walk(self, tree: TokenTree, picks: Sequence[NodeScores]) -> Verdict:
        verdict = self._visit(tree, picks, 0, 1.0)
        assert verdict is not None  # the root is always accepted
        return verdict

    def _visit(self, tree: TokenTree, picks: Sequence[NodeScores], node: int, weight: float) -> Verdict | None:
        """Return the verdict at or below a node that is reached with this weight; None if nothing is accepted."""
        scores = picks[node]
        p = scores.p
        for group in self.groups(tree, node, scores):
            q = group.q
            for token, child, _ in group.draws:
                below = min(1.0, weight * p.probability(token) / q.probability(token))
                verdict = self._visit(tree, picks, child, below) if below > 0 else None
                if verdict is not None:
                    return verdict
                weight, p = without_child(weight, p, q)
                q = q.without(token)
        if node and not self.random_source.accepts(scores.key(ACCEPT), weight):
            return None
        return Verdict(tree.path(node), self.random_source.draw(scores.key(RESIDUAL), p))


def without_child(weight: float, p: TokenDistribution, q: TokenDistribution) -> tuple[float, TokenDistribution]:
    """Return the weight and p of a node after the rejection of a child drawn from q."""
    rest = p.above(q, weight)
    if rest.total <= 0.0:
        return (weight, p) if weight >= 1.0 else (0.0, p)  # p = q up to rounding: the child is always accepted
    return rest.total / (rest.total + (1.0 - weight)), rest


def _draws(tree: TokenTree, children: Sequence[int], tokens: Sequence[int], row: Row) -> list[DrawnToken]:
    known = {tree.tokens[child]: child for child in children}
    draws = []
    for place, token in enumerate(tokens):
        key = key_of(row, tree.ids[known[token]]).again(tokens[:place].count(token))
        draws.append(DrawnToken(token, known[token], key))
    return draws


def key_of(row: Row, node_id: int, purpose: int = ACCEPT) -> DecisionKey:
    """Return the key of a random decision at a node of this row's request."""
    return DecisionKey(row.request.seed, row.request.choice, node_id, purpose)


def residual(p: TokenDistribution, q: TokenDistribution) -> TokenDistribution:
    """Return norm((p - q)+)."""
    rest = p.above(q)
    return rest if rest.total > 0 else p  # p = q up to rounding: nothing is ever rejected there
