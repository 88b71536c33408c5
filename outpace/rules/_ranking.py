"""Ranks rows of scores on the host in one call of the native kernels, if they are installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from outpace.core.sampling import Sampling
from outpace.core.types import TopK


@cache
def native_rank() -> Callable[..., list[TopK]] | None:
    """Return the kernels' `rank`; None if they are not installed."""
    try:
        from outpace_kernels import rank
    except ImportError:
        return None
    function: Callable[..., list[TopK]] = rank
    return function


def ranked(
    scores: np.ndarray,
    samplings: Sequence[Sampling],
    count: int,
    *,
    ids: np.ndarray | None = None,
    keys: Sequence[int] = (),
    whole: bool = True,
) -> list[TopK] | None:
    """Return the `count` best of each row [rows, held] by log q, plus the noise of the row's key if there are `keys`.

    If not `whole`, by x / T, which is log q up to a constant and needs no sum. The result is empty for a row with a nan
    or without a finite maximum and, if not `whole`, where rounding may decide what a filter leaves out. `ids` int64
    [held] are the tokens of the columns; None: 0, 1, ... None without the kernels.
    """
    rank = native_rank()
    if rank is None:
        return None
    temperatures = [sampling.temperature or 1.0 for sampling in samplings]
    filters = [[sampling.kernel_filters for sampling in samplings]] if any(s.filters for s in samplings) else []
    return rank(scores, count, temperatures, keys, ids, whole, *filters)


def clear_winner(tokens: Sequence[int], values: Sequence[float]) -> int | None:
    """Return the better of a row's two best tokens by x / T + g, or None if rounding may decide between them.

    The exact race computes l = x / T - m + g in float32, where m is the largest x / T; the winner's l is at least that
    of the likeliest token, whose E is at most 16, so |m| <= |l + m| + 22.2. With u = 2^-24: x / T, minus m and the log
    of the sum (at most 12 for 2^17 tokens), minus the largest of that, errs by 9 u (|m| + d) + 44 u, d = m - x / T; exp
    errs by 2^-22, E by 1e-6, the quotient by u. Tokens with d > 40 lose, because g <= 22.2. So two tokens that differ
    by more than 1e-4 + 2e-6 |m| are in the same order in float32.
    """
    if not tokens:
        return None
    margin = 1e-4 + 2e-6 * (abs(values[0]) + 22.2)
    is_clear = margin < 1.0 and (len(tokens) == 1 or values[0] > values[1] + margin)
    return tokens[0] if is_clear else None
