"""As multi_round, for children drawn without replacement: after a rejection that token is removed from q too.

Sequoia, Chen et al., arXiv:2402.12374.

After a rejected child x, P = norm((P - q)+) with the q from which x was drawn, then q(x) = 0 and q is normalised again.
No token is tried twice, so the acceptance rate is higher than with independent draws.
"""

from __future__ import annotations

from dataclasses import replace

from outpace.core.distribution import TokenDistribution
from outpace.core.tree import Siblings
from outpace.rules._ratio import TopDown


class WithoutReplacement(TopDown):
    """The ratio rule for distinct children."""

    cost = "as multi_round, and q is renormalised after each rejection"
    traits = replace(TopDown.traits, siblings=Siblings.WITHOUT_REPLACEMENT, several_draws=True)

    def after(self, q: TokenDistribution, token: int) -> TokenDistribution:
        return q.without(token)
