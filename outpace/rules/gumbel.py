"""The target writes argmax(log p + g) with noise keyed by position: exactly p, and the text depends on the seed alone.

Daliri, Musco, Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding", arXiv:2408.07978.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from outpace.core.adjust import adjust_logits
from outpace.core.logits import host_rows, tensor_of
from outpace.core.noise import exponential
from outpace.core.sampling import log_probs, race_winners
from outpace.core.tree import Siblings
from outpace.core.types import Pick, Ranks, Row, RuleTraits
from outpace.rules.base import LogProbRule, ranked

if TYPE_CHECKING:
    from torch import Tensor


class Gumbel(LogProbRule):
    """Picks the winner of the exponential race argmax(p / E), with the same E for target and drafter."""

    cost = "noise for the tokens of each row that can be the maximum"
    traits = RuleTraits(
        lossless=True, siblings=Siblings.PICKED, same_text=True, pick=Pick.RACE, ranks=Ranks.RACE, takes_arrays=True
    )

    def reduce(self, logits: Tensor | np.ndarray, rows: Sequence[Row]) -> list[int]:
        logits = adjust_logits(logits, rows)
        host = host_rows(logits)
        if host is None:
            return self.run(tensor_of(logits), rows)
        samplings, keys = [row.request.sampling for row in rows], [row.noise_key for row in rows]
        best = ranked(host, samplings, 1, keys=keys, whole=any(sampling.filters for sampling in samplings))
        return [tokens[0] if tokens else int(row.argmax()) for (tokens, _), row in zip(best, host, strict=True)]

    def run(self, logits: Tensor, rows: Sequence[Row]) -> list[int]:
        """Run the race of all tokens on a device, on adjusted logits [rows, vocab]."""
        log_p = log_probs(logits, [row.request.sampling for row in rows])
        race = exponential([row.noise_key for row in rows], logits.shape[-1], logits.device)
        picks: list[int] = race_winners(log_p, race).tolist()
        return picks
