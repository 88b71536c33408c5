"""How often a draft says what the target says on held-out answers, and how long the chains are that this accepts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outpace.distill.batches import Packer, Sample
from outpace.distill.student import Student

CHAIN = 4
ROWS = 8  # samples packed into a forward are few: logits over a whole vocabulary are large


@dataclass(frozen=True)
class Agreement:
    """`top1`: share of answer tokens at which both have the same likeliest token. `chain`: mean accepted length of
    chains of 4 at temperature 0, emitted tokens a target pass (greedy answers alone; None where none is held out)."""

    top1: float
    chain: float | None


@torch.inference_mode()
def agreement(student: Student, packer: Packer, samples: Sequence[Sample]) -> Agreement:
    """Teacher-forced: the draft sees the target's own text. At temperature 0 the accepted lengths are exact all the
    same, for a chain is judged only as far as it equals the target's text."""
    hits: list[np.ndarray] = []
    passes = emitted = 0
    for rows in packer.epoch(samples, 0, 0):
        batch = packer.batch(samples, rows)
        same = (student.logits(batch.packed).argmax(1) == batch.goals.top[:, 0]).cpu().numpy()
        hits.append(same)
        start = 0
        for number in (number for row in rows for number in row):
            count = len(samples[number].top_ids)
            if samples[number].temperature == 0:
                passes += _passes(same[start : start + count])
                emitted += count
            start += count
    every = np.concatenate(hits) if hits else np.zeros(1)
    return Agreement(round(float(every.mean()), 4), round(emitted / passes, 4) if passes else None)


def _passes(same: np.ndarray) -> int:
    """Target passes for an answer whose tokens the draft knows or does not know, in chains of CHAIN."""
    passes = place = 0
    while place < len(same):
        accepted = 0
        while accepted < CHAIN and place + accepted < len(same) and same[place + accepted]:
            accepted += 1
        place += accepted + 1
        passes += 1
    return passes
