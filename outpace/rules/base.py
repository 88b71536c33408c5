"""What the engine and drafters do by rules: reducing rows under constraints, and ranking a drafter's rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from outpace.core.adjust import adjust_logits, adjust_sparse
from outpace.core.constraints import Constraint
from outpace.core.errors import UserError
from outpace.core.kernels import kernels
from outpace.core.lazy import torch
from outpace.core.logits import Scores, SparseLogits, host_rows, stable_top_k, tensor_of
from outpace.core.noise import gumbel
from outpace.core.sampling import GREEDY, Sampling, log_probs
from outpace.core.types import Pick, Ranks, Request, Row, Rule, TopK

if TYPE_CHECKING:
    from torch import Tensor


class FailedRow(NamedTuple):
    """Replaces the value of a row that its rule could not reduce."""

    error: Exception


class LogProbRule(Rule):
    """A rule whose drafters rank tokens as `traits.ranks` says, after the request's adjustments and sampling options;
    usually by log q."""

    def rank(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        if self.traits.ranks is Ranks.SCORES:
            return logits
        log_q = log_probs(adjust_logits(logits, rows), [row.request.sampling for row in rows])
        if self.traits.ranks is not Ranks.RACE:
            return log_q
        return log_q + gumbel([row.noise_key for row in rows], logits.shape[-1], logits.device)


def picks_best_scores(request: Request) -> bool:
    """Return whether this request's picks, and the proposals for it, are the models' best scores, which a model may
    return itself."""
    is_steered = request.adjustments is not None or request.constraint is not None
    return not is_steered and request.rule.traits.pick is Pick.BEST_SCORE


# Reducing the target's rows. A rule that picks before masking reduces its rows without the constraint. Then the picks
# on the path that the target walks are checked, and only a row whose pick is refused is masked and picked again. The
# text is the same as if every row were masked, and usually no row is.


def reduce_rows(logits: Scores, rows: Sequence[Row]) -> list[Any]:
    """Reduce each row by its request's rule, neighbours of one rule together: [rows, vocab] to one value per row."""
    is_constrained = any(row.request.constraint is not None for row in rows)
    if is_constrained:
        rows = [row._replace(skips_mask=_checks_later(row.request)) for row in rows]
    picks: list[Any] = []
    for start, run in _neighbours(rows, lambda row: row.request.rule):
        picks += _reduce(logits if len(run) == len(rows) else logits[start : start + len(run)], run)
    if is_constrained:
        for start, some in _neighbours(rows, lambda row: row.request):
            if some[0].skips_mask:
                own = slice(start, start + len(some))
                picks[own] = _check_picks(logits[own], some, picks[own])
    return picks


def reduce_isolated(logits: Scores, rows: Sequence[Row]) -> list[Any]:
    """Do as `reduce_rows`, but if a rule raises, only its own request's rows fail: each becomes a FailedRow."""
    try:
        return reduce_rows(logits, rows)
    except Exception:
        values: list[Any] = []
        for start, some in _neighbours(rows, lambda row: row.request):
            try:
                values += reduce_rows(logits[start : start + len(some)], some)
            except Exception as error:
                values += [FailedRow(error)] * len(some)
        return values


def _reduce(logits: Scores, rows: Sequence[Row]) -> list[Any]:
    rule: Any = rows[0].request.rule
    picks: list[Any] = rule.reduce(logits if rule.traits.takes_arrays else tensor_of(logits), rows)
    return picks


def _checks_later(request: Request) -> bool:
    return request.constraint is not None and request.rule.traits.picks_before_masking(request.sampling)


def _check_picks(logits: Scores, rows: Sequence[Row], picks: Sequence[Any]) -> list[Any]:
    """Return one request's picks, with those that the constraint refuses on the walked path replaced. [rows, vocab]"""
    row, checked = rows[0], list(picks)
    constraint = _constraint(row)
    by_path: dict[tuple[int, ...], list[int]] = {}  # a probe may have an equal candidate as its sibling
    for number, other in enumerate(rows):
        by_path.setdefault(other.path, []).append(number)
    path: tuple[int, ...] = ()
    while path in by_path and not constraint.is_over(row.committed, path):
        same = by_path[path]
        if constraint.allowed(row.committed, (*path, checked[same[0]])) <= len(path):
            for number in same:
                checked[number] = _reduce(logits[number : number + 1], [rows[number]._replace(skips_mask=False)])[0]
        path = (*path, checked[same[0]])
    return checked


def _constraint(row: Row) -> Constraint:
    constraint = row.request.constraint
    assert constraint is not None
    return constraint


# Ranking a drafter's rows.


def ranked(
    scores: np.ndarray,
    samplings: Sequence[Sampling],
    count: int,
    *,
    ids: np.ndarray | None = None,
    keys: Sequence[int] = (),
    whole: bool = True,
) -> list[TopK]:
    """Return the `count` best of each row [rows, held] by log q, plus the noise of the row's key if there are `keys`.

    If not `whole`, by x / T, which is log q up to a constant and needs no sum. The result is empty for a row with a nan
    or without a finite maximum and, if not `whole`, where rounding may decide what a filter leaves out. `ids` int64
    [held] are the tokens of the columns; None: 0, 1, ...
    """
    temperatures = [sampling.temperature or 1.0 for sampling in samplings]
    filters = [[sampling.kernel_filters for sampling in samplings]] if any(s.filters for s in samplings) else []
    best: list[TopK] = kernels.rank(scores, count, temperatures, keys, ids, whole, *filters)
    return best


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


def top_k_rows(held: SparseLogits, rows: Sequence[Row], count: int) -> list[TopK]:
    """Return the best `count` tokens of each row of a drafter's logits, without those that the request excludes."""
    best: list[TopK] = []
    for start, run in _neighbours(rows, lambda row: row.request.rule):
        part = held if len(run) == len(rows) else held.part(slice(start, start + len(run)))
        best += _top_k(part, run, count)
    return best


def _top_k(held: SparseLogits, rows: Sequence[Row], count: int) -> list[TopK]:
    """Rank rows of one rule, on the host by the kernels where they can, else by its `rank`."""
    host = host_rows(held.values)
    if host is None and (together := _top_k_on_device(held, rows, count)) is not None:
        return together
    rule = rows[0].request.rule
    if host is None or rule.traits.ranks is None:
        return [_top_k_by_rank(held, number, row, count) for number, row in enumerate(rows)]
    best = _top_k_on_host(adjust_sparse(host, held.ids, rows), held.ids, rows, count, rule.traits.ranks)
    for number, row in enumerate(rows):
        if row.request.constraint:
            best[number] = _without_refused(best[number], row)
        if not best[number][0]:
            best[number] = _top_k_by_rank(held, number, row, count)
    return best


def _top_k_on_host(
    scores: np.ndarray, ids: np.ndarray | None, rows: Sequence[Row], count: int, ranks: Ranks
) -> list[TopK]:
    """Rank rows [rows, held] by the kernels."""
    if ranks is Ranks.SCORES:
        return ranked(scores, [GREEDY] * len(rows), count, ids=ids, whole=False)
    keys = [row.noise_key for row in rows] if ranks is Ranks.RACE else ()
    return ranked(scores, [row.request.sampling for row in rows], count, ids=ids, keys=keys)


def _top_k_on_device(held: SparseLogits, rows: Sequence[Row], count: int) -> list[TopK] | None:
    """Rank all rows at once, so that the host waits for the device once; None if a row's constraint failed."""
    try:
        ranks = rows[0].request.rule.rank(held.wide(), rows)
    except UserError:
        return None
    ids, best = stable_top_k(ranks, min(count, ranks.shape[-1]))
    values, tokens = torch.stack([best.double(), ids.double()]).tolist()  # one copy; float64 holds both exactly
    return [without_excluded([int(token) for token in some], own) for some, own in zip(tokens, values, strict=True)]


def _top_k_by_rank(held: SparseLogits, number: int, row: Row, count: int) -> TopK:
    logits, rule = held.wide(slice(number, number + 1)), row.request.rule
    try:
        ranks = rule.rank(logits, [row])[0]
    except UserError:  # the constraint failed; the request ends when the target's rows are masked
        ranks = rule.rank(logits, [row._replace(skips_mask=True)])[0]
    ids, best = stable_top_k(ranks, min(count, len(ranks)))
    return without_excluded(ids.tolist(), best.tolist())


def without_excluded(tokens: list[int], values: list[float]) -> TopK:
    """Drop the tokens of value -inf, which are the last ones."""
    possible = sum(value > -math.inf for value in values)
    return tokens[:possible], values[:possible]


def _without_refused(best: TopK, row: Row) -> TopK:
    """Drop the tokens that the request's constraint refuses; if it fails, drop none."""
    constraint, (tokens, values) = _constraint(row), best
    try:
        kept = [constraint.allowed(row.committed, (*row.path, token)) > len(row.path) for token in tokens]
    except UserError:
        return best
    pairs = [pair for pair, keep in zip(zip(tokens, values, strict=True), kept, strict=True) if keep]
    return [token for token, _ in pairs], [value for _, value in pairs]


def _neighbours(rows: Sequence[Row], owner: Callable[[Row], object]) -> list[tuple[int, Sequence[Row]]]:
    """Split rows into runs of one owner, each with the number of its first row."""
    first = owner(rows[0]) if rows else None
    if all(owner(row) is first for row in rows):
        return [(0, rows)] if rows else []
    starts = [place for place, row in enumerate(rows) if not place or owner(row) is not owner(rows[place - 1])]
    return [(start, rows[start:end]) for start, end in zip(starts, [*starts[1:], len(rows)], strict=True)]
