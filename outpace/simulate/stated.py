"""A trace from a stated model instead of a real pair: every place is alike and independent of all others.

The target's token is the draft's first with chance A, its second with A (1 - A), and so on: what is left after each
rank meets the same odds again. The draft knows these chances.
"""

from __future__ import annotations

import math
import random

import numpy as np

from outpace.core.errors import check_range, check_whole
from outpace.simulate.trace import Trace, TracedAnswer

_RANKS = 16
_VOCAB = 64


def synthetic_trace(acceptance: float, answers: int = 8, tokens: int = 256, seed: int = 0) -> Trace:
    """A made-up trace with this chance of acceptance, between 0 and 1."""
    check_range("acceptance", acceptance, 0.0, 1.0)
    check_whole("answers", answers, 1)
    check_whole("tokens", tokens, 1)
    chance = random.Random(seed)
    made = tuple(_answer(chance, acceptance, tokens) for _ in range(answers))
    return Trace("stated", f"acceptance {acceptance:g}", _VOCAB, made)


def _answer(chance: random.Random, acceptance: float, tokens: int) -> TracedAnswer:
    written, rows = [], []
    for _ in range(tokens):
        token, *others = chance.sample(range(_VOCAB), _RANKS + 1)
        rank = 0
        while rank < _RANKS and chance.random() >= acceptance:
            rank += 1
        written.append(token)
        rows.append([*others[:rank], token, *others[rank:]][:_RANKS])
    log_miss = math.log1p(-acceptance) if acceptance < 1 else -50.0
    log_hit = math.log(acceptance) if acceptance else 0.0
    falling = np.array([log_hit + rank * log_miss for rank in range(_RANKS)], dtype=np.float32)
    return TracedAnswer(
        prompt=(0,),
        tokens=tuple(written),
        target_logprobs=np.zeros(tokens, dtype=np.float32),
        draft_tokens=np.array(rows, dtype=np.int32),
        draft_logprobs=np.broadcast_to(falling, (tokens, _RANKS)).copy(),
        task="stated",
    )
