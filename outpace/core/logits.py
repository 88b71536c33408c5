"""Rows of scores on the host, one at a time: torch's threads cost more than such a row does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from outpace.core.arrays import to_device
from outpace.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


_CHUNKS = 64  # a row is dealt into columns of so many values


TopK = tuple[list[int], list[float]]  # tokens of a row and their values on a rule's scale, best first

Scores: TypeAlias = "Tensor | np.ndarray"  # an array where no tensor was computed


class TargetOutput(NamedTuple):
    """What a pass gives: scores of the wanted nodes, and hidden states of those that are shown, after the layers that
    were asked for, before the final norm. `best`: see `SparseLogits`."""

    logits: Scores  # [wanted rows, vocab]
    hidden: Tensor | None = None  # [layers, shown rows, width]
    best: Sequence[TopK] = ()


class SparseLogits(NamedTuple):
    """Scores of the tokens that a model's output layer has rows for; all others score -inf.

    `values` [rows, held]; `ids` int64 [held], rising, says which tokens they are (None: all), of `vocab`. `best`: of
    each row so many tokens of the highest scores as every part asked for, of equal ones the first, and log q of them
    where they are several; empty for a row that has no order. None at all where the model does not tell them.
    """

    values: Scores
    ids: np.ndarray | None
    vocab: int
    best: Sequence[TopK] = ()

    def part(self, rows: slice) -> SparseLogits:
        """Some of the rows."""
        return SparseLogits(self.values[rows], self.ids, self.vocab)

    def wide(self, rows: slice = slice(None)) -> Tensor:
        """Scores of all tokens. [rows, vocab]"""
        values = tensor_of(self.values[rows])
        if self.ids is None:
            return values
        wide = values.new_full((len(values), self.vocab), -torch.inf)
        return wide.index_copy_(1, to_device(self.ids, np.int64, values.device), values)


def tensor_of(scores: Scores) -> Tensor:
    """The same memory as a tensor."""
    return torch.from_numpy(scores) if isinstance(scores, np.ndarray) else scores


def host_rows(scores: Scores) -> np.ndarray | None:
    """The same memory as an array [rows, vocab], or None where it is not float32 on the host."""
    if isinstance(scores, np.ndarray):
        return scores
    if scores.dtype is not torch.float32 or scores.device.type != "cpu":
        return None
    rows: np.ndarray = scores.detach().numpy()
    return rows


def host_array(scores: Scores) -> np.ndarray:
    """Rows of scores as an array on the host, in float32 or better: the same memory where that can be. [rows, vocab]"""
    if isinstance(scores, np.ndarray):
        return scores
    scores = scores.detach().to(torch.promote_types(scores.dtype, torch.float32)).cpu()
    rows: np.ndarray = scores.numpy()
    return rows


def best_tokens(scores: Scores, count: int) -> np.ndarray:
    """The `count` tokens of the largest scores of each row, best first: int64 [rows, count]"""
    host = host_rows(scores)
    if host is None:
        return tensor_of(scores).topk(min(count, scores.shape[-1])).indices.cpu().numpy()
    return np.array([largest_indices(row, count) for row in host])


def select_rows(scores: Scores, places: Sequence[int]) -> Scores:
    """These rows, in this order: [rows, vocab] to [places, vocab]"""
    if isinstance(scores, np.ndarray):
        return scores[np.asarray(places, np.int64)]
    return scores[to_device(places, np.int64, scores.device)]


def token_scores(scores: Tensor, tokens: Sequence[int]) -> list[float]:
    """The score of one token of each row, -inf where the row has no such token, in one copy. [rows, vocab]"""
    last = scores.shape[-1] - 1
    places = to_device([[min(token, last)] for token in tokens], np.int64, scores.device)
    found = scores.gather(-1, places)[:, 0].tolist()
    return [score if token <= last else -math.inf for token, score in zip(tokens, found, strict=True)]


def log_softmax(row: np.ndarray) -> np.ndarray:
    """torch's own, bit by bit as it gives it for a row among others. float32 [vocab] to [vocab]"""
    result: np.ndarray = torch.log_softmax(torch.from_numpy(row)[None], dim=-1)[0].numpy()
    return result


def largest_indices(row: np.ndarray, count: int) -> np.ndarray:
    """Places of the `count` largest of a row, largest first, equal ones by place; for rows without a nan. [count]

    The count-th largest of the columns' maxima is at most the count-th largest of all, so nothing that is looked for
    lies below it.
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
    """Places and values of the `count` largest of each row: int64 and as they are [rows, count]. A nan is largest."""
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
