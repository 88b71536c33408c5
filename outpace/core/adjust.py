"""Changes to single tokens' logits before temperature: bias, penalties, banned tokens, minimum length, constraints.

A drafted token counts as written for the nodes below it, so each path of a tree is treated as plain decoding would
treat it. The order is that of transformers and vLLM: bias, penalties, then forbidden tokens.
- repetition (Keskar et al., arXiv:1909.05858): a token of prompt or answer: l / r if l > 0, else l * r;
- presence and frequency (OpenAI's API): l - presence - frequency * count, for tokens of the answer;
- banned strings: a token is forbidden if it would complete one in the answer's text (`core.constraints`);
- min_tokens: stop tokens are forbidden before this many tokens are written;
- allowed tokens: all others are forbidden;
- n-grams: a token is forbidden if it would complete one that the text has, as in transformers;
- last: the answer ends with this token if it reaches `max_tokens`;
- a constraint: the tokens that it refuses are forbidden.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, groupby, islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from outpace.core.arrays import torch
from outpace.core.logits import host_rows, tensor_of
from outpace.core.types import Adjustments, Row

if TYPE_CHECKING:
    from torch import Tensor

L = TypeVar("L", bound="Tensor | np.ndarray")
_FORBIDDEN = float("-inf")


def adjust_logits(logits: L, rows: Sequence[Row]) -> L:
    """Return the logits as each row's request adjusts them, in float32 or better; the same object if none does.

    [rows, vocab] to [rows, vocab]. A row's result depends on that row only. Tokens outside the vocabulary (a draft
    model's may be smaller) are ignored. On the host numpy does the work: for so few tokens, torch would wake its
    threads, which then compete with the model's.
    """
    for row in rows:
        if row.request.adjustments is not None or (row.request.constraint is not None and not row.skips_mask):
            break
    else:
        return logits
    scores: Any
    if (host := host_rows(logits)) is not None:
        scores = host.copy()
    else:
        held = tensor_of(logits)
        scores = held.to(torch.promote_types(held.dtype, torch.float32), copy=True)
    _adjust_all(scores, rows, None)
    for number, row in enumerate(rows):
        apply_constraint(scores[number], row)
    adjusted: Any = scores if isinstance(logits, np.ndarray) else tensor_of(scores)
    return adjusted


def adjust_sparse(scores: np.ndarray, ids: np.ndarray | None, rows: Sequence[Row]) -> np.ndarray:
    """Return a drafter's scores of the tokens `ids` (None: all), ascending, adjusted except for constraints.

    float32 [rows, held]; the same array if nothing is adjusted.
    """
    if all(row.request.adjustments is None for row in rows):
        return scores
    scores = scores.copy()
    _adjust_all(scores, rows, ids)
    return scores


def apply_constraint(logits: Tensor | np.ndarray, row: Row, ids: np.ndarray | None = None) -> None:
    """Forbid, in place, what the row's constraint refuses of the tokens `ids` (None: all). [held]

    A complete or invalid text is left as it is.
    """
    constraint = row.request.constraint
    if constraint is None or row.skips_mask:
        return
    mask = constraint.mask(row.committed, row.path)
    if mask is None:
        return
    tokens = np.arange(len(logits)) if ids is None else ids
    refused = np.ones(len(logits), bool)
    known = tokens < len(mask)
    refused[known] = ~mask[tokens[known]]
    _forbid(logits, refused)


class _Columns(NamedTuple):
    """Where tokens are found in rows of scores: at their own index, or at their index in `ids`."""

    ids: np.ndarray | None
    size: int

    def find(self, tokens: Collection[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens that have a column, and the columns: int64 both."""
        asked = np.fromiter(tokens, np.int64, len(tokens))
        if self.ids is None:
            known = asked[(asked >= 0) & (asked < self.size)]
            return known, known
        places = np.minimum(np.searchsorted(self.ids, asked), self.size - 1)
        there = self.ids[places] == asked
        return asked[there], places[there]


def _like(scores: Any, values: Sequence[float]) -> Any:
    """Convert numbers to the type and device of these scores."""
    return np.asarray(values, scores.dtype) if isinstance(scores, np.ndarray) else scores.new_tensor(values)


def _forbid(scores: Any, refused: np.ndarray) -> None:
    """Forbid tokens in all rows, in place. scores [..., tokens], refused bool [tokens]"""
    where: Any = refused if isinstance(scores, np.ndarray) else torch.from_numpy(refused).to(scores.device)
    scores[..., where] = _FORBIDDEN


def _adjust_all(scores: Any, rows: Sequence[Row], ids: np.ndarray | None) -> None:
    place, places = 0, _Columns(ids, scores.shape[-1])
    for _, group in groupby(rows, key=lambda row: (id(row.request), id(row.committed))):
        shared = list(group)
        settings = shared[0].request.adjustments
        if settings is not None:
            _adjust(scores[place : place + len(shared)], shared, settings, places)
        place += len(shared)


def _adjust(scores: Any, rows: Sequence[Row], settings: Adjustments, places: _Columns) -> None:
    request = rows[0].request
    bias = dict(settings.logit_bias)
    known, at = places.find(bias)
    if len(at):
        scores[:, at] += _like(scores, [*map(bias.__getitem__, known.tolist())])
    _penalise(scores, rows, settings, places)
    for number, row in enumerate(rows):
        forbidden = list(request.stop_ids) if row.position - len(request.prompt) < settings.min_tokens else []
        if settings.banned is not None:
            forbidden += settings.banned.after(_answer_backwards(row))
        if settings.no_repeat_ngram:
            forbidden += _repeating([*row.committed[settings.source :], *row.path], settings.no_repeat_ngram)
        if forbidden:
            scores[number, places.find(forbidden)[1]] = _FORBIDDEN
    if settings.banned is not None:
        scores[:, places.find(settings.banned.always.tolist())[1]] = _FORBIDDEN
    if settings.allowed is not None:
        refused = np.ones(places.size, bool)
        refused[places.find(settings.allowed)[1]] = False
        _forbid(scores, refused)
    if settings.last is not None:
        for number, row in enumerate(rows):
            if row.position - len(request.prompt) == request.max_tokens - 1:
                scores[number] = _FORBIDDEN
                scores[number, places.find([settings.last])[1]] = 0.0


def _penalise(scores: Any, rows: Sequence[Row], settings: Adjustments, places: _Columns) -> None:
    """Penalise the committed tokens in all rows and, in each row, its drafted tokens, in place."""
    is_counted = bool(settings.presence_penalty or settings.frequency_penalty)
    repeats = settings.repetition_penalty != 1.0
    if not (repeats or is_counted):
        return
    committed = rows[0].committed
    answer = Counter(committed[len(rows[0].request.prompt) :] if is_counted else ())
    drafted, columns = places.find({token for row in rows for token in row.path})
    before = scores[:, columns]
    known, at = places.find(set(committed[settings.source :]) if repeats else answer)
    if len(at):
        counts = [*map(answer.__getitem__, known.tolist())] if is_counted else None
        scores[:, at] = _penalised(scores[:, at], counts, settings)
    for number, row in enumerate(rows):
        own = Counter(row.path)
        if some := [place for place, token in enumerate(drafted.tolist()) if token in own]:
            counts = [answer[token] + own[token] for token in drafted[some].tolist()] if is_counted else None
            scores[number, columns[some]] = _penalised(before[number, some], counts, settings)


def _penalised(values: Any, counts: Sequence[int] | None, settings: Adjustments) -> Any:
    """Return the penalised scores of written tokens, given their counts in the answer if these matter. [..., tokens]"""
    if (repetition := settings.repetition_penalty) != 1.0:
        where = np.where if isinstance(values, np.ndarray) else torch.where
        values = where(values > 0, values / repetition, values * repetition)
    if counts is None:
        return values
    weight = _like(values, counts)
    amount = settings.presence_penalty + settings.frequency_penalty * weight
    return values - amount * (weight > 0)


def _repeating(text: Sequence[int], length: int) -> list[int]:
    """Return the tokens that would complete an n-gram of this length which the text has."""
    end = text[max(len(text) - length + 1, 0) :] if length > 1 else []
    starts = range(len(text) - length + 1)
    return [text[start + length - 1] for start in starts if text[start : start + length - 1] == end]


def _answer_backwards(row: Row) -> Iterator[int]:
    """Return the answer's tokens before the row's, last one first."""
    committed = islice(reversed(row.committed), len(row.committed) - len(row.request.prompt))
    return chain(reversed(row.path), committed)
