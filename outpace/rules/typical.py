"""Lossy: accept a drafted token that is likely enough for the target, p(x) > min(epsilon, delta exp(-H(p))).

Typical acceptance of Medusa, Cai et al., arXiv:2401.10774.

Where p is flat (its entropy H is high), the threshold is lower. The longest accepted path is kept, followed by the
token that plain decoding writes there. With epsilon 1 and a delta so high that nothing is accepted, the text is plain
decoding's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from outpace.core.options import MethodOptions, number
from outpace.rules._ratio import NodeScores
from outpace.rules._relaxed import Relaxed


class Typical(Relaxed):
    """Accepts tokens whose p exceeds a threshold that falls with the entropy."""

    cost = "p and its entropy for every node with accepted ancestors"

    @dataclass(frozen=True)
    class Options(MethodOptions):
        epsilon: float = number(0.09, 0.0, 1.0, help="a token with a higher p is always accepted")
        delta: float = number(0.3, 0.0, 1e9, help="factor of the threshold where p is flat")

    def acceptable(self, scores: NodeScores) -> Callable[[int], bool]:
        p = scores.p
        floor = min(self.options.epsilon, self.options.delta * math.exp(-p.entropy))
        return lambda token: p.probability(token) > floor
