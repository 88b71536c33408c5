"""Lossy: accept a drafted token with min(1, p / ((1 - l) q)), more often than the ratio rule by the lenience l.

Leviathan, Kalman, Matias, arXiv:2211.17192, appendix A.5.

No token is written with a probability above p / (1 - l). After a rejection the recovery token is drawn from norm((p -
q)+), which loses the least at this acceptance rate (Yin et al., NeurIPS 2024). Lenience 0 is exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from outpace.core.distribution import TokenDistribution
from outpace.core.errors import check_range
from outpace.rules._ratio import TopDown

LOSSLESS = False
COST = "as rejection"


@dataclass(frozen=True)
class Options:
    """`lenience`: l, from 0, the exact ratio rule, to nearly 1, which accepts almost every drafted token."""

    lenience: float = 0.2

    def __post_init__(self) -> None:
        check_range("lenience", self.lenience, 0.0, 0.999)


class Lenience(TopDown):
    """The ratio rule with all ratios raised by a constant factor."""

    traits = replace(TopDown.traits, lossless=LOSSLESS)

    def __init__(self, options: Options) -> None:
        self._kept = 1.0 - options.lenience

    def acceptance(self, p: TokenDistribution, q: TokenDistribution, token: int) -> float:
        return super().acceptance(p, q, token) / self._kept


def build(options: Options) -> Lenience:
    """Build the rule."""
    return Lenience(options)
