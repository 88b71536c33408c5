"""As multi_round, for children drawn without replacement: after a rejection q loses that token too.

Sequoia, Chen et al., arXiv:2402.12374.

After a rejected child x, P = norm((P - q)+) with the q that x was drawn from, then q(x) = 0 and q is normalised again.
No child is tried twice, so more of them are accepted than of children that were drawn independently.
"""

from __future__ import annotations

from dataclasses import dataclass

from outpace.core.distribution import TokenDistribution
from outpace.core.tree import Siblings
from outpace.rules._ratio import TopDown

LOSSLESS = True
COST = "as multi_round, and q is renormalised after each rejection"


@dataclass(frozen=True)
class Options:
    """None."""


class WithoutReplacement(TopDown):
    """The ratio rule for distinct children."""

    lossless = LOSSLESS
    siblings = Siblings.WITHOUT_REPLACEMENT
    fan = True

    def after(self, q: TokenDistribution, token: int) -> TokenDistribution:
        return q.without(token)


def build(options: Options) -> WithoutReplacement:
    """The rule."""
    return WithoutReplacement()
