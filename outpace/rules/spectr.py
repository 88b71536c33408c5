"""Several independent drafts are judged together: each is accepted with the same chance min(1, p / (rho q)).

K-SEQ of SpecTr, Sun et al., arXiv:2310.15141.

With beta(rho) the sum of min(p / rho, q), rho in [1, K] is where 1 - (1 - beta)^K = rho beta: as high an acceptance as
keeps the target's distribution. With a = 1 - (1 - beta)^K, the chance that any of the K is accepted, the target's own
token comes from norm(p - min(p / rho, q) a / beta).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outpace.core.lazy import torch
from outpace.rules._ratio import Group, TopDown

if TYPE_CHECKING:
    from torch import Tensor

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

    def judge(self, p: Tensor, group: Group) -> tuple[int | None, Tensor]:
        q, count = group.q, len(group.draws)
        rho = least_rho(p, q, count)
        for token, child, key in group.draws:
            if self.chance.accepts(key, float(p[token]) / (rho * float(q[token]))):
                return child, p
        shared = torch.minimum(p / rho, q)
        beta = float(shared.sum())
        rest = (p - shared * (any_of(beta, count) / beta)).clamp_(min=0.0) if beta > 0 else p
        total = rest.sum()
        return None, rest / total if total > 0 else p


def any_of(beta: float, count: int) -> float:
    """1 - (1 - beta)^count, exact for a small beta too."""
    return -math.expm1(count * math.log1p(-beta)) if beta < 1.0 else 1.0


def least_rho(p: Tensor, q: Tensor, count: int) -> float:
    """The least rho in [1, count] by which no token is accepted more often than p has it, or just above.

    The distribution is kept by any rho from there on, so the end of a bisection decides nothing but the acceptance.
    """
    both = (p > 0) & (q > 0)
    p, q = p[both], q[both]  # [tokens that may be accepted]
    low, high = 1.0, float(count)
    for _ in range(_HALVINGS if count > 1 and len(p) else 0):
        middle = (low + high) / 2
        beta = float(torch.minimum(p / middle, q).sum())
        low, high = (low, middle) if any_of(beta, count) <= middle * beta else (middle, high)
    return high


def build(options: Options) -> SpecTr:
    """The rule."""
    return SpecTr()
