"""Single tokens' logits moved before temperature: bias, penalties, bans, min tokens, each node on its own prefix.

A drafted token counts as written for the nodes below it, so a tree is judged as plain decoding would judge each path.
The order is that of transformers and vLLM: bias, penalties, then what is forbidden.
- repetition (Keskar et al., arXiv:1909.05858): a token of prompt or answer: l / r where l > 0, else l * r;
- presence and frequency (OpenAI's API): l - presence - frequency * count, for tokens of the answer;
- banned strings: a token is forbidden where it would complete one in the answer's text (`core.banned_text`);
- min tokens: stop tokens are forbidden before so many tokens are written;
- allowed tokens: all others are forbidden;
- a constraint: what it refuses is forbidden.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, overload

import numpy as np

from outpace.core.lazy import torch
from outpace.core.scores import tensor_of
from outpace.core.types import Adjustments, Request, Row

if TYPE_CHECKING:
    from torch import Tensor

_FORBIDDEN = float("-inf")


@overload
def adjusted(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """A tensor stays one."""


@overload
def adjusted(logits: np.ndarray, rows: Sequence[Row]) -> Tensor | np.ndarray:
    """An array stays one unless a row is adjusted."""


def adjusted(logits: Tensor | np.ndarray, rows: Sequence[Row]) -> Tensor | np.ndarray:
    """The logits as each row's request adjusts them, in float32 or better; the same object where none does.

    [rows, vocab] to [rows, vocab]. A row's result depends on nothing but that row. Tokens outside the vocabulary (a
    draft's may be smaller) are left out.
    """
    for row in rows:
        if row.request.adjustments is not None or (row.request.constraint is not None and not row.is_open):
            break
    else:
        return logits
    scores = tensor_of(logits)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32), copy=True)
    place = 0
    for _, group in groupby(rows, key=lambda row: (id(row.request), id(row.committed))):
        shared = list(group)
        settings = shared[0].request.adjustments
        if settings is not None:
            _adjust(scores[place : place + len(shared)], shared, settings)
        for number, row in enumerate(shared, place):
            mask_refused(scores[number], row)
        place += len(shared)
    return scores


def mask_refused(logits: Tensor, row: Row) -> None:
    """What the row's constraint refuses, in place. A text that is over, or that cannot be, has no next token to choose.
    [vocab]"""
    constraint = row.request.constraint
    if constraint is None or row.is_open:
        return
    mask = constraint.mask(row.committed, row.path)
    if mask is None:
        return
    count = min(len(mask), len(logits))
    refused = torch.ones(len(logits), dtype=torch.bool)
    refused[:count] = torch.from_numpy(~mask[:count])
    logits[refused.to(logits.device)] = _FORBIDDEN


def _adjust(logits: Tensor, rows: Sequence[Row], settings: Adjustments) -> None:
    """Rows of one request, in place."""
    request, vocab = rows[0].request, logits.shape[-1]
    bias = {token: value for token, value in settings.logit_bias if token < vocab}
    if bias:
        logits[:, list(bias)] += logits.new_tensor(list(bias.values()))
    answer = Counter(rows[0].committed[len(request.prompt) :])
    seen = set(rows[0].committed)
    for logit, row in zip(logits, rows, strict=True):
        if settings.repetition_penalty != 1.0:
            _penalise_repetition(logit, seen.union(row.path), settings.repetition_penalty)
        if settings.presence_penalty or settings.frequency_penalty:
            counts = answer + Counter(row.path)
            index = [token for token in counts if token < vocab]
            weight = logit.new_tensor([counts[token] for token in index])
            logit[index] -= settings.presence_penalty + settings.frequency_penalty * weight
        forbidden = [token for token in _forbidden(request, row, settings) if token < vocab]
        if forbidden:
            logit[forbidden] = _FORBIDDEN
    if settings.banned is not None:
        always = settings.banned.always.to(logits.device)
        logits[:, always[always < vocab]] = _FORBIDDEN
    if settings.allowed is not None:
        _keep(logits, settings.allowed)


def _keep(logits: Tensor, allowed: Sequence[int]) -> None:
    """Forbids all other tokens, in place."""
    refused = torch.ones(logits.shape[-1], dtype=torch.bool)
    refused[[token for token in allowed if token < len(refused)]] = False
    logits[:, refused.to(logits.device)] = _FORBIDDEN


def _penalise_repetition(logit: Tensor, seen: set[int], penalty: float) -> None:
    index = [token for token in sorted(seen) if token < len(logit)]
    values = logit[index]
    logit[index] = torch.where(values > 0, values / penalty, values * penalty)


def _forbidden(request: Request, row: Row, settings: Adjustments) -> Iterator[int]:
    if row.position - len(request.prompt) < settings.min_tokens:
        yield from request.stop_ids
    if settings.banned is not None:
        yield from settings.banned.after(_answer_backwards(row))


def _answer_backwards(row: Row) -> Iterator[int]:
    """The answer's tokens before the row's, the last one first."""
    yield from reversed(row.path)
    for place in range(len(row.committed) - 1, len(row.request.prompt) - 1, -1):
        yield row.committed[place]
