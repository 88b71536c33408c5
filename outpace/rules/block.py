"""Judge a chain as a whole: accept the longest prefix that the ratios p / q of all its tokens allow.

Block verification, Sun et al., arXiv:2403.10444.

A token whose p / q is low may be accepted because those before it stood above q, and it does not cut off what follows
it, because the scan runs from the end. No rule for a drawn chain accepts more tokens on average.
"""

from __future__ import annotations

from dataclasses import dataclass

from outpace.rules._ratio import BottomUp

LOSSLESS = True
COST = "p and a residual of every node of the chain"


@dataclass(frozen=True)
class Options:
    """None."""


class Block(BottomUp):
    """The walk from the leaves up, for chains."""

    lossless = LOSSLESS


def build(options: Options) -> Block:
    """The rule."""
    return Block()
