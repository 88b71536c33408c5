"""Several independent drafts are judged together: each is accepted with the same probability min(1, p / (rho q)).

K-SEQ of SpecTr, Sun et al., arXiv:2310.15141.

With beta(rho) the sum of min(p / rho, q), rho in [1, K] solves 1 - (1 - beta)^K = rho beta: the highest acceptance that
keeps the target's distribution. With a = 1 - (1 - beta)^K, the probability that any of the K is accepted, the recovery
token is drawn from norm(p - min(p / rho, q) a / beta).
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from outpace.core.distribution import TokenDistribution
from outpace.rules._ratio import SiblingGroup, TopDown

_HALVINGS = 40


class SpecTr(TopDown):
    """K-SEQ: of the drafts, those that have the accepted token continue below it."""

    cost = "as rejection, and forty sums over the tokens of both models for each node with several drafts"
    traits = replace(TopDown.traits, several_draws=True)

    def verify_group(self, p: TokenDistribution, group: SiblingGroup) -> tuple[int | None, TokenDistribution]:
        own, other, count = p.restrict_to(p), group.q.restrict_to(p), len(group.draws)  # for the tokens that p keeps
        rho = least_rho(own, other, count)
        for token, child, key in group.draws:
            if self.random_source.accepts(key, p.probability(token) / (rho * group.q.probability(token))):
                return child, p
        shared = np.minimum(own / own.dtype.type(rho), other)
        beta = float(shared.sum(dtype=np.float64))
        if beta > 0:
            own -= shared * own.dtype.type(any_of(beta, count) / beta)
        rest = TokenDistribution(np.maximum(own, 0.0), p.tokens)
        return None, rest if rest.total > 0 else p


def any_of(beta: float, count: int) -> float:
    """Return 1 - (1 - beta)^count, accurate for a small beta too."""
    return -math.expm1(count * math.log1p(-beta)) if beta < 1.0 else 1.0


def least_rho(p: np.ndarray, q: np.ndarray, count: int) -> float:
    """Return the lowest rho in [1, count] for which no token is accepted more often than p allows, or slightly more.

    Any larger rho keeps the distribution as well, so the precision of the bisection affects the acceptance rate only.
    A token adds min(p / rho, q) to beta: p / rho once rho is known to be above p / q, and q once it is known to be
    below; the tokens still undecided become fewer with each halving.
    """
    low, high = 1.0, float(count)
    if count == 1:
        return high
    open_ = np.flatnonzero(p > q)
    scaled, fixed = _sum(p) - _sum(p[open_]), 0.0  # sums over tokens that add p / rho, and that add q
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
