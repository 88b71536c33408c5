"""Judge a chain as a whole: accept the longest prefix that the ratios p / q of all its tokens allow.

Block verification, Sun et al., arXiv:2403.10444.

A token with a low p / q may be accepted if p exceeded q at earlier tokens, and it does not cut off the tokens after it,
because the scan runs from the end. No rule for a drawn chain accepts more tokens on average.
"""

from __future__ import annotations

from outpace.rules._ratio import BottomUp


class Block(BottomUp):
    """The bottom-up walk for chains."""

    cost = "p and a residual of every node of the chain"
