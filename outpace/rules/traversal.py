"""Judge a tree from its leaves up: after a rejection, a node closer to the root or another branch may be accepted.

Traversal Verification, Weng et al., arXiv:2505.12398.

For children drawn without replacement. On a chain it is block verification.
"""

from __future__ import annotations

from dataclasses import replace

from outpace.core.tree import Siblings
from outpace.rules._ratio import BottomUp


class Traversal(BottomUp):
    """The bottom-up walk for trees."""

    cost = "p and a residual of every node that the walk visits, at worst of all nodes"
    traits = replace(BottomUp.traits, siblings=Siblings.WITHOUT_REPLACEMENT, several_draws=True)
