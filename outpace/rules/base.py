"""Applies rules: reduces the target's rows under constraints, and ranks a drafter's rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from outpace.core.adjust import adjust_logits, adjust_sparse, apply_constraint
from outpace.core.arrays import kernels, torch
from outpace.core.errors import UserError
from outpace.core.logits import Scores, SparseLogits, host_rows, stable_top_k, tensor_of
from outpace.core.noise import gumbel
from outpace.core.sampling import GREEDY, Sampling, log_probs
from outpace.core.types import Pick, Ranks, Request, Row, Rule, TopK

if TYPE_CHECKING:
    from torch import Tensor

    from outpace.core.constraints import Constraint


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
    is_adjusted = request.adjustments is not None or request.constraint is not None
    return not is_adjusted and request.rule.traits.pick is Pick.BEST_SCORE


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

    If not `whole`, which rows with filters need, by x / T: that is log q up to a constant and needs no sum. The result
    is empty for a row with a nan or without a finite maximum. `ids` int64 [held] are the tokens of the columns; None:
    0, 1, ...
    """
    temperatures = [sampling.temperature or 1.0 for sampling in samplings]
    filters = [[sampling.kernel_filters for sampling in samplings]] if any(s.filters for s in samplings) else []
    best: list[TopK] = kernels.rank(scores, count, temperatures, keys, ids, whole, *filters)
    return best


def top_k_rows(held: SparseLogits, rows: Sequence[Row], count: int) -> list[TopK]:
    """Return the best `count` tokens of each row of a drafter's logits, without those that the request excludes."""
    best: list[TopK] = []
    for start, run in _neighbours(rows, lambda row: row.request.rule):
        part = held if len(run) == len(rows) else held.part(slice(start, start + len(run)))
        best += _top_k(part, run, count)
    return best


def _top_k(held: SparseLogits, rows: Sequence[Row], count: int) -> list[TopK]:
    """Rank rows of one rule, on the host by the kernels where they can, else by its `rank`."""
    host, ranks = host_rows(held.values), rows[0].request.rule.traits.ranks
    if host is None or ranks is None:
        return _top_k_by_rank(held, rows, count)
    scores = adjust_sparse(host, held.ids, rows)
    best = _top_k_on_host(scores, held.ids, rows, count, ranks)
    for number, row in enumerate(rows):
        if row.request.constraint and best[number][0]:
            best[number] = _allowed(best[number], scores[number], held.ids, row, ranks)
    return best


def _top_k_on_host(
    scores: np.ndarray, ids: np.ndarray | None, rows: Sequence[Row], count: int, ranks: Ranks
) -> list[TopK]:
    """Rank rows [rows, held] by the kernels."""
    if ranks is Ranks.SCORES:
        return ranked(scores, [GREEDY] * len(rows), count, ids=ids, whole=False)
    keys = [row.noise_key for row in rows] if ranks is Ranks.RACE else ()
    return ranked(scores, [row.request.sampling for row in rows], count, ids=ids, keys=keys)


def _top_k_by_rank(held: SparseLogits, rows: Sequence[Row], count: int) -> list[TopK]:
    """Rank all rows at once, so that the host waits for a device once."""
    rank, logits = rows[0].request.rule.rank, tensor_of(held.to_dense())
    try:
        ranks = rank(logits, rows)
    except UserError:  # a constraint failed; its request ends when the target's rows are masked
        ranks = rank(logits, [row._replace(skips_mask=True) for row in rows])
    ids, best = stable_top_k(ranks, min(count, ranks.shape[-1]))
    values, tokens = torch.stack([best.double(), ids.double()]).tolist()  # one copy; float64 holds both exactly
    return [without_excluded([int(token) for token in some], own) for some, own in zip(tokens, values, strict=True)]


def without_excluded(tokens: list[int], values: list[float]) -> TopK:
    """Drop the tokens of value -inf, which are the last ones."""
    possible = sum(value > -math.inf for value in values)
    return tokens[:possible], values[:possible]


def _allowed(best: TopK, scores: np.ndarray, ids: np.ndarray | None, row: Row, ranks: Ranks) -> TopK:
    """Drop the best tokens of a row [held] that the request's constraint refuses.

    If it refuses all of them, rank those that it allows; if it fails, drop none.
    """
    constraint, (tokens, values) = _constraint(row), best
    try:
        kept = [constraint.allowed(row.committed, (*row.path, token)) > len(row.path) for token in tokens]
        if not any(kept):
            masked = scores[None].copy()
            apply_constraint(masked[0], row, ids)
            return _top_k_on_host(masked, ids, [row], len(tokens), ranks)[0]
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
