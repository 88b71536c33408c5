"""Accept while the token is the target's most likely one.

No paper: this is the definition of greedy decoding, a rule of its own rather than a limit of temperature 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from outpace.core.adjust import adjust_logits
from outpace.core.logits import host_rows
from outpace.core.tree import Siblings
from outpace.core.types import Pick, Row, RuleTraits
from outpace.rules.base import LogProbRule

if TYPE_CHECKING:
    from torch import Tensor


class Greedy(LogProbRule):
    """Picks argmax p; of equal logits the lowest id."""

    cost = "an argmax for each row"
    traits = RuleTraits(
        lossless=True,
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
