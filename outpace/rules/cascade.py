"""Lossy: sample exactly from a mixture pi of target and draft, which follows the draft where it is about as good.

Speculative cascades, Narasimhan et al., arXiv:2405.19261.

The ratio rule with pi in place of p: a drafted token is accepted with min(1, pi / q), the residual is norm((pi - q)+),
and the bonus token is drawn from pi too. So the output distribution is exactly pi, which is not p. With p and q after
the sampling options (at temperature 0 each has all mass on its likeliest token), and with P and Q at temperature 1 and
without filters, pi is q
- chow: where max Q >= 1 - a;
- diff: where max Q >= max P - a;
- opt: where max Q >= max P - a TV(p, q);
- token_v1, v2, v3: on a set of tokens A, with p for the rest of q's mass: pi = q 1_A + (1 - q(A)) p. A contains v if
  Q(v) >= max P - a, if P(v) >= max P - a, if P(v) >= (1 - a) max P, respectively;
and p otherwise. a = -2 is the target alone in each case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from outpace.core.distribution import TokenDistribution
from outpace.core.errors import UserError
from outpace.core.options import MethodOptions, number, one_of
from outpace.core.tree import TokenTree
from outpace.rules._ratio import NodeScores, TopDown


class DistributionPair(NamedTuple):
    """Both models' distributions after one node: with the sampling options, and P and Q without."""

    p: TokenDistribution
    q: TokenDistribution
    raw_p: TokenDistribution
    raw_q: TokenDistribution


def _whole(defers: Callable[[DistributionPair, float], bool]) -> Callable[[DistributionPair, float], TokenDistribution]:
    """Build a mixture that is q if `defers` returns True, else p."""
    return lambda pair, a: pair.q if defers(pair, a) else pair.p


def _by_token(
    chosen: Callable[[np.ndarray, np.ndarray, float], np.ndarray],
) -> Callable[[DistributionPair, float], TokenDistribution]:
    """Build a mixture that is q on the tokens that `chosen` returns, with p for the rest of the mass."""

    def mixed(pair: DistributionPair, a: float) -> TokenDistribution:
        vocab = pair.raw_p.size
        kept = pair.q.to_dense(vocab) * chosen(pair.raw_p.to_dense(vocab), pair.raw_q.to_dense(vocab), a)
        return TokenDistribution(kept + max(1.0 - float(kept.sum(dtype=np.float64)), 0.0) * pair.p.to_dense(vocab))

    return mixed


ALONE = -2.0  # the alpha with which the mixture is p
MIXTURES: dict[str, Callable[[DistributionPair, float], TokenDistribution]] = {
    "chow": _whole(lambda pair, a: pair.raw_q.max_probability >= 1.0 - a),
    "diff": _whole(lambda pair, a: pair.raw_q.max_probability >= pair.raw_p.max_probability - a),
    "opt": _whole(
        lambda pair, a: pair.raw_q.max_probability >= pair.raw_p.max_probability - a * pair.p.above(pair.q).total
    ),
    "token_v1": _by_token(lambda p, q, a: q >= p.max() - a),
    "token_v2": _by_token(lambda p, q, a: p >= p.max() - a),
    "token_v3": _by_token(lambda p, q, a: p >= (1.0 - a) * p.max()),
}


class Cascade(TopDown):
    """The ratio rule with pi in place of p."""

    cost = "as rejection, with p and q at temperature 1 too; one more draft step a round"
    traits = replace(TopDown.traits, lossless=False, unscaled_q=True, q_at_leaves=True, greedy=True)

    @dataclass(frozen=True)
    class Options(MethodOptions):
        defer: str = one_of(
            "opt", tuple(MIXTURES), "how pi is computed: chow, diff, opt, token_v1, token_v2 or token_v3"
        )
        alpha: float = number(0.2, ALONE, 1.0, help="higher values follow the draft more; -2 is the target alone")

    def goal(self, tree: TokenTree, node: int, scores: NodeScores, p: TokenDistribution) -> TokenDistribution:
        drawn = tree.drawn.get(node)
        if drawn is None or drawn.raw is None:
            raise UserError(
                "rule cascade needs the draft model's q after every token, but none came; use drafter model"
            )
        if self.options.alpha == ALONE:
            return p
        vocab = scores.logits.shape[-1]
        q = drawn.q if drawn.q.size <= vocab else TokenDistribution(drawn.q.to_dense(vocab))
        pair = DistributionPair(p, q, scores.raw_p, drawn.raw())
        return MIXTURES[self.options.defer](pair, self.options.alpha)

    def strict(self, goal: TokenDistribution, p: TokenDistribution) -> TokenDistribution:
        return p
