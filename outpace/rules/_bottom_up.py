"""The walk from the leaves up: a token counts by the ratios of its whole path, so a doubtful one may be carried by
those above and below it.

Every node has a weight w: 1 at the root, min(1, w p(x) / q(x)) at a child with token x. A node without children left is
accepted with its weight, and the target's own token comes from its p. Where it is not, it is taken away, and with
S = sum (w p - q)+ its parent goes on with w = S / (S + 1 - w) and p = norm((w p - q)+).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outpace.core.chances import Chances
from outpace.core.noise import ACCEPT, RESIDUAL
from outpace.core.tree import TokenTree, path_to
from outpace.core.types import Verdict
from outpace.rules._ratio import Judged, RatioRule


class BottomUp(RatioRule):
    """Accepts the first leaf that it may, in the order in which children were drawn; at the latest the root."""

    def walk(self, tree: TokenTree, picks: Sequence[Judged]) -> Verdict:
        verdict = self._visit(tree, picks, 0, 1.0)
        assert verdict is not None, "the root's weight is 1"
        return verdict

    def _visit(self, tree: TokenTree, picks: Sequence[Judged], node: int, weight: float) -> Verdict | None:
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

    def _in_turn(self, tree: TokenTree, node: int, judged: Judged) -> Iterator[tuple[int, int, Chances]]:
        """Each child's token, the child, and the q that it was drawn from once those before it were taken away."""
        for group in self.groups(tree, node, judged):
            q = group.q
            for token, child, _ in group.draws:
                yield token, child, q
                q = q.without(token)


def without_child(weight: float, p: Chances, q: Chances) -> tuple[float, Chances]:
    """The weight and p of a node whose child, drawn from q, was not accepted."""
    rest = p.above(q, weight)
    if rest.total <= 0.0:
        return (weight, p) if weight >= 1.0 else (0.0, p)  # p = q up to rounding: the child is always accepted
    return rest.total / (rest.total + (1.0 - weight)), rest
