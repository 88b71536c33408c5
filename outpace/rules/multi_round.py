"""Several children drawn from q are tried in turn, each against what the rejections before it have left of p.

Multi-step speculative sampling of SpecInfer, Miao et al., arXiv:2305.09781.

A child x is accepted with min(1, P(x) / q(x)), P = p at first; after a rejection P = norm((P - q)+), and what is left
in the end gives the target's own token. Children are drawn independently: a token that came out twice is tried twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from outpace.rules._ratio import TopDown

LOSSLESS = True
COST = "as rejection; a residual for each child that is rejected"


@dataclass(frozen=True)
class Options:
    """None."""


class MultiRound(TopDown):
    """The ratio rule for several children that were drawn independently."""

    lossless = LOSSLESS
    fan = True


def build(options: Options) -> MultiRound:
    """The rule."""
    return MultiRound()
