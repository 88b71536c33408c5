"""Lossy: accept a drafted token with min(1, p / ((1 - l) q)), more often than the ratio rule by the lenience l.

Leviathan, Kalman, Matias, arXiv:2211.17192, appendix A.5.

No token is written with a probability above p / (1 - l). After a rejection the recovery token is drawn from norm((p -
q)+), which loses the least at this acceptance rate (Yin et al., NeurIPS 2024). Lenience 0 is exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from outpace.core.distribution import TokenDistribution
from outpace.core.options import MethodOptions, number
from outpace.rules._ratio import TopDown


class Lenience(TopDown):
    """The ratio rule with all ratios raised by a constant factor."""

    cost = "as rejection"
    traits = replace(TopDown.traits, lossless=False)

    @dataclass(frozen=True)
    class Options(MethodOptions):
        lenience: float = number(
            0.2, 0.0, 0.999, help="l, from 0, the exact ratio rule, to nearly 1, which accepts almost every token"
        )

    def acceptance(self, p: TokenDistribution, q: TokenDistribution, token: int) -> float:
        return super().acceptance(p, q, token) / (1.0 - self.options.lenience)
