"""Log-probabilities of what was written, and of the best tokens beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from outpace.core.adjust import adjusted
from outpace.core.lazy import torch
from outpace.core.sampling import filtered
from outpace.core.scores import largest, log_softmax, tensor_of
from outpace.core.types import LogprobsOptions, Row, TokenLogprobs

if TYPE_CHECKING:
    from torch import Tensor


def token_logprobs(
    logits: Tensor | np.ndarray, rows: Sequence[Row], tokens: Sequence[int], options: LogprobsOptions
) -> list[TokenLogprobs]:
    """One record for each of `tokens`, `tokens[i]` written where row i decides. `logits` [rows, vocab].

    Tokens that adjustments or filters exclude are left out of the best; the written one never is.
    """
    scores = tensor_of(logits)
    if options.processed:
        scores = filtered(adjusted(scores, rows), [row.request.sampling for row in rows])
    host = scores.detach().to("cpu", torch.promote_types(scores.dtype, torch.float32)).numpy()
    records = []
    for token, row in zip(tokens, host, strict=True):
        log_p = log_softmax(row)
        places = largest(log_p, min(options.top, len(log_p)))
        best = zip(places.tolist(), log_p[places].tolist(), strict=True)
        top = tuple((other, value) for other, value in best if value > float("-inf"))
        records.append(TokenLogprobs(token, float(log_p[token]), top))
    return records
