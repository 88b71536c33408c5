"""Lossy: lenient where a token matters little, strict where the target is confident and the draft differs.

After decentralised speculative decoding, arXiv:2511.11733, whose formula is not public; this formula is our own.

A drafted token is accepted with min(1, p / ((1 - l) q)), where l = l_max (1 - importance) and the importance is
sqrt(exp(-H(p)) TV(p, q)): near 1 where p has little entropy H and q differs from it, near 0 where p is flat or q equals
it. l_max 0 is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from outpace.core.distribution import TokenDistribution
from outpace.core.errors import check_range
from outpace.rules._ratio import TopDown

LOSSLESS = False
COST = "as rejection, and an entropy and a distance for each verified token"


@dataclass(frozen=True)
class Options:
    """`most_lenience`: the lenience for a token that does not matter at all (l_max); 0 is exact."""

    most_lenience: float = 0.3

    def __post_init__(self) -> None:
        check_range("most_lenience", self.most_lenience, 0.0, 0.999)


class Adaptive(TopDown):
    """The ratio rule with each ratio raised according to the importance of its position."""

    traits = replace(TopDown.traits, lossless=LOSSLESS)

    def __init__(self, options: Options) -> None:
        self._most = options.most_lenience

    def acceptance(self, p: TokenDistribution, q: TokenDistribution, token: int) -> float:
        return super().acceptance(p, q, token) / (1.0 - self._most * (1.0 - importance(p, q)))


def importance(p: TokenDistribution, q: TokenDistribution) -> float:
    """Return sqrt(exp(-H(p)) TV(p, q)), in [0, 1]."""
    return math.sqrt(math.exp(-p.entropy) * p.above(q).total)


def build(options: Options) -> Adaptive:
    """Build the rule."""
    return Adaptive(options)
