"""Accept a drafted token with min(1, p / q), else write from the residual norm((p - q)+): keeps p, not the text.

Leviathan, Kalman, Matias, arXiv:2211.17192; Chen et al., arXiv:2302.01318.

For chains that were drawn, and for picked trees.
"""

from __future__ import annotations

from dataclasses import dataclass

from outpace.rules._ratio import TopDown

LOSSLESS = True
COST = "p of every node that the walk visits, and a residual after each rejection"


@dataclass(frozen=True)
class Options:
    """No options."""


class Rejection(TopDown):
    """The ratio rule."""


def build(options: Options) -> Rejection:
    """Build the rule."""
    return Rejection()
