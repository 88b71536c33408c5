"""Judge a tree from its leaves up: what is rejected there may still be accepted further above, by another branch.

Traversal Verification, Weng et al., arXiv:2505.12398.

For children drawn without replacement. On a chain it is block verification.
"""

from __future__ import annotations

from dataclasses import dataclass

from outpace.core.tree import Siblings
from outpace.rules._bottom_up import BottomUp

LOSSLESS = True
COST = "p and a residual of every node that the walk comes to, at worst of all"


@dataclass(frozen=True)
class Options:
    """None."""


class Traversal(BottomUp):
    """The walk from the leaves up, for trees."""

    lossless = LOSSLESS
    siblings = Siblings.WITHOUT_REPLACEMENT
    fan = True


def build(options: Options) -> Traversal:
    """The rule."""
    return Traversal()
