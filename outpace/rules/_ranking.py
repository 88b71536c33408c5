"""Rows of scores on the host, ranked in one call of the native kernels: None where these are not installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from outpace.core.lazy import torch
from outpace.core.logits import log_softmax
from outpace.core.sampling import Sampling, filtered
from outpace.core.types import Offer

"""Tokens on the scale by which a rule's target will choose, best first, and their values there."""


@cache
def native_rank() -> Callable[..., list[Offer]] | None:
    """The kernels' `rank`; None where they are not installed, or older than it."""
    try:
        from outpace_kernels import rank
    except ImportError:
        return None
    function: Callable[..., list[Offer]] = rank
    return function


@cache
def filters_natively() -> bool:
    """Whether the kernels' `rank` leaves out what filters do; older ones do not."""
    import outpace_kernels

    return hasattr(outpace_kernels, "Noise")


def ranked(
    scores: np.ndarray,
    samplings: Sequence[Sampling],
    count: int,
    *,
    ids: np.ndarray | None = None,
    keys: Sequence[int] = (),
    whole: bool = True,
) -> list[Offer] | None:
    """The `count` best of each row [rows, held] by log q, plus the noise of the row's key where there are `keys`.

    Not `whole`: by x / T, which is log q up to a constant and needs no sum. Nothing is offered for a row that has a nan
    or no finite top, nor, not `whole`, where filters in other arithmetic may leave out the best. `ids` int64 [held] are
    the tokens that the columns stand for; None: 0, 1, ...
    """
    rank = native_rank()
    if rank is None:
        return None
    if filters_natively() and any(sampling.filters for sampling in samplings):
        temperatures = [sampling.temperature or 1.0 for sampling in samplings]
        return rank(scores, count, temperatures, keys, ids, whole, [sampling.kernel_filters for sampling in samplings])
    scores, temperatures = prepared(scores, samplings)
    return rank(scores, count, temperatures, keys, ids, whole)


def prepared(scores: np.ndarray, samplings: Sequence[Sampling]) -> tuple[np.ndarray, list[float]]:
    """The rows with -inf where filtered out, and the temperatures that they are still to be divided by. [rows, held]"""
    if any(sampling.filters for sampling in samplings):
        rows = [filtered(torch.from_numpy(row)[None], [s]).numpy() for row, s in zip(scores, samplings, strict=True)]
        return np.concatenate(rows), [1.0] * len(rows)
    return scores, [sampling.temperature or 1.0 for sampling in samplings]


def log_chances(scores: np.ndarray, samplings: Sequence[Sampling]) -> list[np.ndarray]:
    """log q of rows [rows, held], one by one in numpy; an empty array for a row without a finite top."""
    rows, temperatures = prepared(scores, samplings)
    return [
        log_softmax(row / np.float32(temperature)) if np.isfinite(row.max()) else row[:0]
        for row, temperature in zip(rows, temperatures, strict=True)
    ]
