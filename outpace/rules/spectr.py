"""Several independent drafts are judged together: each is accepted with the same chance min(1, p / (rho q)).

K-SEQ of SpecTr, Sun et al., arXiv:2310.15141.

With beta(rho) the sum of min(p / rho, q), rho in [1, K] is where 1 - (1 - beta)^K = rho beta: as high an acceptance as
keeps the target's distribution. With a = 1 - (1 - beta)^K, the chance that any of the K is accepted, the target's own
token comes from norm(p - min(p / rho, q) a / beta).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from outpace.core.distribution import TokenDistribution
from outpace.rules._ratio import SiblingGroup, TopDown

LOSSLESS = True
COST = "as rejection, and forty sums over the tokens of both models for each node with several drafts"
_HALVINGS = 40


@dataclass(frozen=True)
class Options:
    """None."""


class SpecTr(TopDown):
    """K-SEQ: below a child, as many go on as had its token."""

    lossless = LOSSLESS
    fan = True

    def judge(self, p: TokenDistribution, group: SiblingGroup) -> tuple[int | None, TokenDistribution]:
        own, other, count = p.on(p), group.q.on(p), len(group.draws)  # of the tokens that p gives
        rho = least_rho(own, other, count)
        for token, child, key in group.draws:
            if self.chance.accepts(key, p.of(token) / (rho * group.q.of(token))):
                return child, p
        shared = np.minimum(own / own.dtype.type(rho), other)
        beta = float(shared.sum(dtype=np.float64))
        if beta > 0:
            own -= shared * own.dtype.type(any_of(beta, count) / beta)
        rest = TokenDistribution(np.maximum(own, 0.0), p.tokens)
        return None, rest if rest.total > 0 else p


def any_of(beta: float, count: int) -> float:
    """1 - (1 - beta)^count, exact for a small beta too."""
    return -math.expm1(count * math.log1p(-beta)) if beta < 1.0 else 1.0


def least_rho(p: np.ndarray, q: np.ndarray, count: int) -> float:
    """The least rho in [1, count] by which no token is accepted more often than p has it, or just above.

    The distribution is kept by any rho from there on, so the end of a bisection decides nothing but the acceptance. A
    token gives min(p / rho, q) to beta: p / rho for good once rho is known to be above p / q, q once it is below; those
    in between become fewer with each halving.
    """
    low, high = 1.0, float(count)
    if count == 1:
        return high
    open_ = np.flatnonzero(p > q)
    scaled, fixed = _sum(p) - _sum(p[open_]), 0.0  # of tokens that give p / rho, and of those that give q
    p, q = p[open_], q[open_]
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        is_above = p > middle * q
        over, under = _sum(q[is_above]), _sum(p[~is_above])
        beta = (scaled + under) / middle + fixed + over
        if any_of(beta, count) <= middle * beta:
            high, fixed, kept = middle, fixed + over, ~is_above
        else:
            low, scaled, kept = middle, scaled + under, is_above
        p, q = p[kept], q[kept]
    return high


def _sum(values: np.ndarray) -> float:
    return float(values.sum(dtype=np.float64))


def build(options: Options) -> SpecTr:
    """The rule."""
    return SpecTr()
