"""Accept while the token is the target's most likely one.

No paper: this is the definition of greedy decoding, a rule of its own rather than a limit of temperature 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from outpace.core.adjust import adjust_logits
from outpace.core.lazy import torch
from outpace.core.logits import SparseLogits, host_rows
from outpace.core.sampling import GREEDY
from outpace.core.tree import Siblings, TokenTree
from outpace.core.types import Pick, Row, Rule, RuleTraits, TopK, Verdict
from outpace.rules._ranking import ranked
from outpace.rules.base import follow_picks

if TYPE_CHECKING:
    from torch import Tensor

LOSSLESS = True
COST = "an argmax for each row"


@dataclass(frozen=True)
class Options:
    """No options."""


class Greedy(Rule):
    """Picks argmax p; of equal logits the lowest id."""

    traits = RuleTraits(
        lossless=LOSSLESS,
        siblings=Siblings.PICKED,
        same_text=True,
        greedy=True,
        sampled=False,
        pick=Pick.BEST_SCORE,
        takes_arrays=True,
    )

    def reduce(self, logits: Tensor | np.ndarray, rows: Sequence[Row]) -> list[int]:
        logits = adjust_logits(logits, rows)
        host = host_rows(logits)
        picks: list[int] = (logits if host is None else host).argmax(-1).tolist()
        return picks

    def walk(self, tree: TokenTree, picks: Sequence[int]) -> Verdict:
        return follow_picks(tree, picks)

    def rank(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        return torch.log_softmax(adjust_logits(logits, rows).float(), dim=-1)

    def best(self, scores: np.ndarray, held: SparseLogits, rows: Sequence[Row], count: int) -> list[TopK] | None:
        return ranked(scores, [GREEDY] * len(rows), count, ids=held.ids)


def build(options: Options) -> Greedy:
    """Build the rule."""
    return Greedy()
