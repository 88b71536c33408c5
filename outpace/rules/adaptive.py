"""Lossy: lenient where a token matters little, strict where the target is confident and the draft differs.

After decentralised speculative decoding, arXiv:2511.11733, whose formula we could not read; this one is our own.

A drafted token is accepted with min(1, p / ((1 - l) q)), where l = l_max (1 - importance) and the importance is
sqrt(exp(-H(p)) TV(p, q)): near 1 where p has little entropy H and q differs from it, near 0 where p is flat or q equals
it. l_max 0 is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from outpace.core.distribution import TokenDistribution
from outpace.core.options import MethodOptions, number
from outpace.rules._ratio import TopDown


class Adaptive(TopDown):
    """The ratio rule with each ratio raised according to the importance of its position."""

    cost = "as rejection, and an entropy and a distance for each verified token"
    traits = replace(TopDown.traits, lossless=False)

    @dataclass(frozen=True)
    class Options(MethodOptions):
        most_lenience: float = number(
            0.3, 0.0, 0.999, help="the lenience for a token that does not matter at all (l_max); 0 is exact"
        )

    def acceptance(self, p: TokenDistribution, q: TokenDistribution, token: int) -> float:
        return super().acceptance(p, q, token) / (1.0 - self.options.most_lenience * (1.0 - importance(p, q)))


def importance(p: TokenDistribution, q: TokenDistribution) -> float:
    """Return sqrt(exp(-H(p)) TV(p, q)), in [0, 1]."""
    return math.sqrt(math.exp(-p.entropy) * p.above(q).total)
