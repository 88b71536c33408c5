"""Lossy: greedy decoding that accepts a drafted token among the target's best, and not much less likely than the best.

SpecDec, Xia et al., arXiv:2203.16487.

A token is accepted if it is among the target's `beta` likeliest and at most `tau` nats below the likeliest; the paper
drafts 25 tokens at a time. Beta 1 is exact greedy decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from outpace.core.logits import largest_indices
from outpace.core.options import MethodOptions, number, whole
from outpace.rules._ratio import NodeScores
from outpace.rules._relaxed import Relaxed


class TopBeta(Relaxed):
    """Accepts tokens among the target's best."""

    cost = "the `beta` best tokens of every node with accepted ancestors"
    traits = replace(Relaxed.traits, greedy=True, sampled=False)

    @dataclass(frozen=True)
    class Options(MethodOptions):
        beta: int = whole(3, 1, 1024, help="number of the target's likeliest tokens that are acceptable")
        tau: float = number(1.0, 0.0, 100.0, help="largest gap to the best, in nats")

    def acceptable(self, scores: NodeScores) -> Callable[[int], bool]:
        row = scores.scores
        best = largest_indices(row, min(self.options.beta, len(row)))
        values = row[best].astype(np.float64)
        return {*best[values >= values[0] - self.options.tau].tolist()}.__contains__
