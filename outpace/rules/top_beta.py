"""Lossy: greedy decoding that accepts a drafted token among the target's best, and not much less likely than the best.

SpecDec, Xia et al., arXiv:2203.16487.

A token is accepted if it is among the target's `beta` likeliest and at most `tau` nats below the likeliest; the paper
drafts 25 tokens at a time. Beta 1 is exact greedy decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from outpace.core.errors import check_range, check_whole
from outpace.core.logits import largest_indices
from outpace.rules._ratio import NodeScores
from outpace.rules._relaxed import Relaxed

LOSSLESS = False
COST = "the `beta` best tokens of every node with accepted ancestors"


@dataclass(frozen=True)
class Options:
    """`beta`: number of the target's likeliest tokens that are acceptable; `tau`: largest gap to the best, in nats."""

    beta: int = 3
    tau: float = 1.0

    def __post_init__(self) -> None:
        check_whole("beta", self.beta, 1, 1024)
        check_range("tau", self.tau, 0.0, 100.0)


class TopBeta(Relaxed):
    """Accepts tokens among the target's best."""

    traits = replace(Relaxed.traits, greedy=True, sampled=False)

    def __init__(self, options: Options) -> None:
        super().__init__()
        self._options = options

    def acceptable(self, scores: NodeScores) -> Callable[[int], bool]:
        row = scores.scores
        best = largest_indices(row, min(self._options.beta, len(row)))
        floor = float(row[best[0]]) - self._options.tau
        good = {int(token) for token in best if float(row[token]) >= floor}
        return good.__contains__


def build(options: Options) -> TopBeta:
    """Build the rule."""
    return TopBeta(options)
