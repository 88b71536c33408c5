"""Accept a drafted token with min(1, p / q), else write from the residual norm((p - q)+): keeps p, not the text.

Leviathan, Kalman, Matias, arXiv:2211.17192; Chen et al., arXiv:2302.01318.

For chains that were drawn, and for picked trees.
"""

from __future__ import annotations

from outpace.rules._ratio import TopDown


class Rejection(TopDown):
    """The ratio rule."""

    cost = "p of every node that the walk visits, and a residual after each rejection"
