"""Lossy: accept drafted tokens up to the first one that the target finds too unlikely.

The rollback policy of BiLD, Kim et al., arXiv:2302.07863; the rule of method bild.

A token is kept if it is the target's likeliest or -log P(x) is at most `rollback`, with P at temperature 1 and without
filters. Rollback 0 keeps exactly what greedy decoding would write.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outpace.core.arrays import torch
from outpace.core.options import MethodOptions, number
from outpace.core.tree import Siblings
from outpace.core.types import Row
from outpace.rules._ratio import NodeScores
from outpace.rules._relaxed import Relaxed

if TYPE_CHECKING:
    from torch import Tensor


class Rollback(Relaxed):
    """Judges the draft model's own text: its likeliest token at temperature 0, else a drawn one."""

    cost = "p of every node with accepted ancestors"
    traits = replace(Relaxed.traits, siblings=Siblings.DRAWN, unscaled_q=True, greedy=True)

    @dataclass(frozen=True)
    class Options(MethodOptions):
        rollback: float = number(
            5.0, 0.0, 1e9, help="highest -log p, in nats, at which the target accepts a token; the paper uses 2 to 5"
        )

    def acceptable(self, scores: NodeScores) -> Callable[[int], bool]:
        p, best, floor = scores.raw_p, int(scores.scores.argmax()), math.exp(-self.options.rollback)
        return lambda token: token == best or p.probability(token) >= floor

    def rank(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        """Return log q, at temperature 0 with all mass on the likeliest token."""
        log_q = super().rank(logits, rows)
        for place, row in enumerate(rows):
            if row.request.sampling.is_greedy:
                best = log_q[place].argmax()
                log_q[place] = -torch.inf
                log_q[place, best] = 0.0
        return log_q
