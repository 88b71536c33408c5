"""Log-probabilities of what was written, and of the best tokens beside it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.core.adjust import adjusted
from outpace.core.sampling import processed
from outpace.core.types import Report, Row, TokenLogprobs


def token_logprobs(logits: Tensor, rows: Sequence[Row], tokens: Sequence[int], report: Report) -> list[TokenLogprobs]:
    """One record for each of `tokens`, `tokens[i]` written where row i decides. `logits` [rows, vocab].

    Tokens that adjustments or filters exclude are left out of the best; the written one never is.
    """
    if report.processed:
        log_p = processed(adjusted(logits, rows), [row.request.sampling for row in rows])
    else:
        log_p = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
    best = torch.topk(log_p, min(report.top, log_p.shape[-1]))
    chosen = log_p[torch.arange(len(tokens)), torch.tensor(tokens, device=log_p.device)].tolist()
    records = []
    for token, own, ids, values in zip(tokens, chosen, best.indices.tolist(), best.values.tolist(), strict=True):
        top = tuple((other, value) for other, value in zip(ids, values, strict=True) if value > float("-inf"))
        records.append(TokenLogprobs(token, own, top))
    return records
