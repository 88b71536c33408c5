"""Accept while the token is the target's most likely one.

No paper: the definition of greedy decoding. Its own rule, never "temperature to 0".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from outpace.core.adjust import adjust_logits
from outpace.core.lazy import torch
from outpace.core.logits import SparseLogits, host_rows
from outpace.core.sampling import GREEDY, Sampling
from outpace.core.tree import Siblings, TokenTree
from outpace.core.types import Row, Rule, TopK, Verdict
from outpace.rules.base import by_score, follow_picks, most_likely, takes_arrays

if TYPE_CHECKING:
    from torch import Tensor

LOSSLESS = True
COST = "an argmax for each row"


@dataclass(frozen=True)
class Options:
    """None."""


class Greedy(Rule):
    """argmax p; equal logits go to the lowest id."""

    lossless = LOSSLESS
    keyed = True
    judges_greedy, judges_sampled = True, False
    siblings = Siblings.PICKED

    @by_score
    @takes_arrays
    def reduce(self, logits: Tensor | np.ndarray, rows: Sequence[Row]) -> list[int]:
        logits = adjust_logits(logits, rows)
        host = host_rows(logits)
        picks: list[int] = (logits if host is None else host).argmax(-1).tolist()
        return picks

    def picks_among_all(self, sampling: Sampling) -> bool:
        return True

    def walk(self, tree: TokenTree, picks: Sequence[int]) -> Verdict:
        return follow_picks(tree, picks)

    def rank(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        """log q"""
        return torch.log_softmax(adjust_logits(logits, rows).float(), dim=-1)

    @by_score
    def best(self, scores: np.ndarray, held: SparseLogits, rows: Sequence[Row], count: int) -> list[TopK]:
        """The `count` best by `rank` of each row of scores [rows, held]."""
        return most_likely(scores, held, [GREEDY] * len(rows), count)


def build(options: Options) -> Greedy:
    """The rule."""
    return Greedy()
