"""Rows of logits on the host and on devices: types, conversions and the largest values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from outpace.core.arrays import to_device, torch

if TYPE_CHECKING:
    from torch import Tensor


_CHUNKS = 64  # rows of the table into which a row is reshaped


TopK = tuple[list[int], list[float]]  # tokens of a row and their values on a rule's scale, best first

Scores: TypeAlias = "Tensor | np.ndarray"  # an array if the kernels computed it


class TargetOutput(NamedTuple):
    """The output of one pass.

    `hidden` are the states of the nodes for which they were requested, after the requested layers, before the final
    norm. `best`: see `SparseLogits`.
    """

    logits: Scores  # [logit rows, vocab]
    hidden: Tensor | np.ndarray | None = None  # [layers, hidden rows, width]
    best: Sequence[TopK] = ()


class SparseLogits(NamedTuple):
    """Logits of the tokens for which a model's output layer has rows; all other tokens have -inf.

    `values` [rows, held]; `ids` int64 [held], ascending, are the tokens (None: all) out of `vocab`. `best`: for each
    row as many of the best tokens as its part requested, of equal ones the first, with log q if there are several;
    empty for a row with nan. Empty as a whole if the model does not compute it.
    """

    values: Scores
    ids: np.ndarray | None
    vocab: int
    best: Sequence[TopK] = ()

    def part(self, rows: slice) -> SparseLogits:
        """Return some of the rows."""
        return SparseLogits(self.values[rows], self.ids, self.vocab)

    def to_dense(self, rows: slice = slice(None)) -> Any:
        """Return the logits of all tokens, as an array or tensor like `values`. [rows, vocab]"""
        values: Any = self.values[rows]
        if self.ids is None:
            return values
        if isinstance(values, np.ndarray):
            wide_rows = np.full((len(values), self.vocab), -np.inf, values.dtype)
            wide_rows[:, self.ids] = values
            return wide_rows
        wide = values.new_full((len(values), self.vocab), -torch.inf)
        return wide.index_copy_(1, to_device(self.ids, np.int64, values.device), values)


def tensor_of(scores: Scores) -> Tensor:
    """Return the same memory as a tensor."""
    return torch.from_numpy(scores) if isinstance(scores, np.ndarray) else scores


def host_rows(scores: Scores) -> np.ndarray | None:
    """Return the same memory as an array [rows, vocab], or None if it is not float32 on the host."""
    if isinstance(scores, np.ndarray):
        return scores
    if scores.dtype is not torch.float32 or scores.device.type != "cpu":
        return None
    rows: np.ndarray = scores.detach().numpy()
    return rows


def host_array(scores: Scores) -> np.ndarray:
    """Return the rows as an array on the host, in float32 or better, without a copy if possible. [rows, vocab]"""
    if isinstance(scores, np.ndarray):
        return scores
    scores = scores.detach().to(torch.promote_types(scores.dtype, torch.float32)).cpu()
    rows: np.ndarray = scores.numpy()
    return rows


def best_tokens(scores: Scores, count: int) -> np.ndarray:
    """Return the `count` best tokens of each row, best first: int64 [rows, count]."""
    host = host_rows(scores)
    if host is None:
        return tensor_of(scores).topk(min(count, scores.shape[-1])).indices.cpu().numpy()
    return np.array([largest_indices(row, count) for row in host])


def select_rows(scores: Scores, places: Sequence[int]) -> Scores:
    """Return these rows, in this order: [rows, vocab] to [places, vocab]."""
    if isinstance(scores, np.ndarray):
        return scores[np.asarray(places, np.int64)]
    return scores[to_device(places, np.int64, scores.device)]


def token_scores(scores: np.ndarray, tokens: Sequence[int]) -> list[float]:
    """Return the score of one token of each row; -inf if the row has no such token. [rows, vocab]"""
    return [float(row[token]) if token < len(row) else -math.inf for row, token in zip(scores, tokens, strict=True)]


def log_softmax(values: np.ndarray) -> np.ndarray:
    """Return the log-softmax of each row, in the type of the values. [..., vocab]"""
    shifted = values - values.max(axis=-1, keepdims=True)
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def largest_indices(row: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of the `count` largest values, largest first, equal ones by index; no nan allowed. [count]

    The count-th largest of the column maxima is at most the count-th largest of all, so no searched value is below it.
    """
    width = len(row) // _CHUNKS
    if not count:
        return np.zeros(0, dtype=np.int64)
    if count > width:
        return np.argsort(-row, kind="stable")[:count]
    dealt = width * _CHUNKS
    maxima = np.maximum.reduce(row[:dealt].reshape(_CHUNKS, width), axis=0)  # [width]
    floor = np.partition(maxima, width - count)[width - count]
    places = np.flatnonzero(row >= floor)
    return places[np.argsort(-row[places], kind="stable")[:count]]


_BELOW_SIGN = 0x7FFFFFFF


def stable_top_k(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the indices and values of the `count` largest of each row, equal ones by index; a nan is largest.

    int64 and the values' type, [rows, count]. `torch.topk` leaves the choice among equal values open and so depends on
    the device; here each float32 is combined with its index into one integer first.
    """
    width = values.shape[-1]
    if values.dtype != torch.float32:
        top = values.sort(dim=-1, descending=True, stable=True)
        return top.indices[..., :count], top.values[..., :count]
    bits = (values + 0.0).view(torch.int32)  # -0.0 is 0.0
    rising = bits ^ ((bits >> 31) & _BELOW_SIGN)  # in the order of the values
    last = torch.arange(width - 1, -1, -1, device=values.device)
    keys = rising.long().mul_(width).add_(last)
    top_keys = keys.topk(count, dim=-1).values
    places = (width - 1) - top_keys.remainder(width)
    return places, values.gather(-1, places)
