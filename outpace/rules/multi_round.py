"""Several children drawn from q are tried one after another, each against what the earlier rejections left of p.

Multi-step speculative sampling of SpecInfer, Miao et al., arXiv:2305.09781.

A child x is accepted with min(1, P(x) / q(x)), P = p at first; after a rejection P = norm((P - q)+), and the recovery
token is drawn from the last P. Children are drawn independently: a token drawn twice is tried twice.
"""

from __future__ import annotations

from dataclasses import replace

from outpace.rules._ratio import TopDown


class MultiRound(TopDown):
    """The ratio rule for several independently drawn children."""

    cost = "as rejection; a residual for each child that is rejected"
    traits = replace(TopDown.traits, several_draws=True)
