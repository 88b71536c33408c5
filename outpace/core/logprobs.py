"""Log-probabilities of the written tokens, and of the best tokens at the same positions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from outpace.core.adjust import adjust_logits
from outpace.core.arrays import to_device, torch
from outpace.core.distribution import UNFILTERED, log_probs_of
from outpace.core.logits import host_rows, largest_indices, stable_top_k, tensor_of
from outpace.core.sampling import filter_logits
from outpace.core.types import LogprobsOptions, Row, TokenLogprobs

if TYPE_CHECKING:
    from torch import Tensor

_AT_ONCE = 64  # rows sorted together on a device, at some 30 bytes per token


def token_logprobs(
    logits: Tensor | np.ndarray, rows: Sequence[Row], tokens: Sequence[int], options: LogprobsOptions
) -> list[TokenLogprobs]:
    """Return one record for each of `tokens`; `tokens[i]` was written where row i predicts. `logits` [rows, vocab]

    Tokens that adjustments or filters exclude are omitted from the best tokens; the written token never is.
    """
    scores = adjust_logits(logits, rows) if options.processed else logits
    samplings = [row.request.sampling for row in rows] if options.processed else [UNFILTERED] * len(tokens)
    host = host_rows(scores)
    if host is None:
        return _on_device(filter_logits(tensor_of(scores), samplings), tokens, options.top)
    records = []
    for token, row, sampling in zip(tokens, host, samplings, strict=True):
        log_p = log_probs_of(row, sampling)
        places = largest_indices(log_p, min(options.top, len(log_p)))
        records.append(_record(token, float(log_p[token]), places.tolist(), log_p[places].tolist()))
    return records


def _on_device(scores: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Compute the records on a device, with one copy to the host."""
    written, found = to_device(tokens, np.int64, scores.device)[:, None], []
    for rows, its in zip(scores.split(_AT_ONCE), written.split(_AT_ONCE), strict=True):
        log_p = torch.log_softmax(rows.to(torch.promote_types(rows.dtype, torch.float32)), dim=-1)
        places, values = stable_top_k(log_p, min(top, log_p.shape[-1]))
        found.append(torch.cat([log_p.gather(-1, its).double(), places.double(), values.double()], dim=-1))
    copied = torch.cat(found).tolist()  # exact: [tokens, 1 + 2 * top]
    return [
        _record(token, row[0], map(int, row[1 : len(row) // 2 + 1]), row[len(row) // 2 + 1 :])
        for token, row in zip(tokens, copied, strict=True)
    ]


def _record(token: int, value: float, places: Iterable[int], values: Iterable[float]) -> TokenLogprobs:
    best = zip(places, values, strict=True)
    return TokenLogprobs(token, value, tuple((place, log_p) for place, log_p in best if log_p > float("-inf")))
