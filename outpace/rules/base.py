"""What rules share: the walk along one pick a node, and rows of several requests sent each to its own rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from outpace.core.adjust import adjust_sparse
from outpace.core.carried import Noise
from outpace.core.constraints import Constraint
from outpace.core.errors import UserError
from outpace.core.lazy import torch
from outpace.core.logits import Scores, SparseLogits, host_rows, largest_indices, stable_top_k, tensor_of
from outpace.core.sampling import Sampling
from outpace.core.tree import Siblings, TokenTree
from outpace.core.types import Request, Row, Rule, TopK, Verdict
from outpace.rules._ranking import log_chances, ranked

if TYPE_CHECKING:
    from torch import Tensor


F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R", bound=type[Rule])
_WORD = 1 << 64
_MARK, _BY_SCORE, _BY_RACE = "takes_arrays", "by_score", "by_race"


def takes_arrays(reduce: F) -> F:
    """Marks a `reduce` that takes float32 arrays [rows, vocab] beside tensors; one that overrides it is not marked."""
    setattr(reduce, _MARK, True)
    return reduce


def by_score(function: F) -> F:
    """Marks a `reduce` that gives each row's best token by its adjusted scores, of equal ones the first; or a `best`
    that gives the best tokens and log q of them."""
    setattr(function, _BY_SCORE, True)
    return function


def by_race(rule: R) -> R:
    """Marks a rule that picks each row's best token by log p plus the noise of the row's position. What is made from it
    may do otherwise, so it is not marked."""
    setattr(rule, _BY_RACE, rule)
    return rule


def native_noise(request: Request) -> Noise | None:
    """By what this request's tokens are picked, where that is the best of all by scores or in a race, of scores that
    are adjusted, if at all, for tokens which the request or its text names; else None."""
    moved = request.adjustments
    names = moved is None or (moved.banned is None and moved.allowed is None)
    if request.constraint is not None or not names:
        return None
    if hasattr(request.rule.reduce, _BY_SCORE):
        return Noise()
    sampling, rule = request.sampling, type(request.rule)
    if getattr(rule, _BY_RACE, None) is not rule or sampling.is_greedy:
        return None
    return Noise(sampling.temperature, request.seed, request.choice % _WORD, *sampling.kernel_filters)


def proposes_best_scores(request: Request) -> bool:
    """Whether what is proposed for this request are the draft's best tokens, as a model may tell them."""
    is_steered = request.adjustments is not None or request.constraint is not None
    return not is_steered and hasattr(request.rule.best, _BY_SCORE)


def reduced(scores: Scores, rows: Sequence[Row]) -> list[Any]:
    """Rows of one rule as it reduces them. [rows, vocab] to one value a row"""
    rule = rows[0].request.rule
    reduce: Callable[..., list[Any]] = rule.reduce
    return reduce(scores if hasattr(reduce, _MARK) else tensor_of(scores), rows)


def opened(rows: Sequence[Row]) -> Sequence[Row]:
    """The same rows; those whose picks can be checked afterwards are not masked."""
    for row in rows:
        if row.request.constraint is not None:
            break
    else:
        return rows
    return [row._replace(is_open=True) if _is_guarded(row) else row for row in rows]


def _is_guarded(row: Row) -> bool:
    request = row.request
    return request.constraint is not None and request.rule.picks_among_all(request.sampling)


def guard(logits: Scores, rows: Sequence[Row], picks: Sequence[Any]) -> list[Any]:
    """The picks of one request's open rows, put right on the way that they lead. [rows, vocab]"""
    row, mended = rows[0], list(picks)
    constraint = _constraint(row)
    places: dict[tuple[int, ...], list[int]] = {}  # a probe may stand beside an equal candidate
    for place, other in enumerate(rows):
        places.setdefault(other.path, []).append(place)
    path: tuple[int, ...] = ()
    while path in places and not constraint.is_over(row.committed, path):
        here = places[path]
        if constraint.allowed(row.committed, (*path, mended[here[0]])) <= len(path):
            for place in here:
                mended[place] = _picked_anew(logits[place : place + 1], rows[place])
        path = (*path, mended[here[0]])
    return mended


def _picked_anew(logits: Scores, row: Row) -> Any:
    return reduced(logits, [row._replace(is_open=False)])[0]


def allowed_of(offer: TopK, row: Row) -> TopK:
    """What a drafter offers below a row, without what the request's constraint refuses; as it is where that fails."""
    constraint, (tokens, values) = _constraint(row), offer
    try:
        kept = [constraint.allowed(row.committed, (*row.path, token)) > len(row.path) for token in tokens]
    except UserError:
        return offer
    if all(kept):
        return offer
    return [t for t, keep in zip(tokens, kept, strict=True) if keep], [
        v for v, keep in zip(values, kept, strict=True) if keep
    ]


def _constraint(row: Row) -> Constraint:
    constraint = row.request.constraint
    assert constraint is not None
    return constraint


class FailedRow(NamedTuple):
    """Stands for a row that its rule could not reduce."""

    error: Exception


def follow_picks(tree: TokenTree, picks: Sequence[int]) -> Verdict:
    """Walks from the root along the picks. Exact for picked siblings, and for them alone.

    `picks[i]` is what the target writes after node i; nodes from len(picks) on are late and have none: a path may end
    on one, and then the verdict has no next token.
    """
    path = [0]
    while path[-1] < len(picks):
        node = path[-1]
        if tree.siblings.get(node, Siblings.PICKED) is not Siblings.PICKED:
            raise ValueError(
                f"this rule is exact for picked siblings only, node {node} has {tree.siblings[node].value}"
            )
        child = tree.child(node, picks[node])
        if child is None:
            return Verdict(path, picks[node])
        path.append(child)
    return Verdict(path, None)


def reduce_rows(logits: Tensor | np.ndarray, rows: Sequence[Row]) -> list[Any]:
    """Every row reduced by its own request's rule; rows of one rule go together. [rows, vocab] to one value a row"""
    asked, rows = rows, opened(rows)
    picks: list[Any] = []
    for start, run in _runs(rows):
        picks += reduced(logits if len(run) == len(rows) else logits[start : start + len(run)], run)
    if rows is not asked:
        for start, some in _by_request(rows):
            mine = slice(start, start + len(some))
            picks[mine] = guard(logits[mine], some, picks[mine]) if some[0].is_open else picks[mine]
    return picks


def reduce_isolated(logits: Tensor | np.ndarray, rows: Sequence[Row]) -> list[Any]:
    """As `reduce_rows`, where a rule that raises spoils its own request's rows alone: each of them is the FailedRow."""
    try:
        return reduce_rows(logits, rows)
    except Exception:
        return [
            value for start, some in _by_request(rows) for value in _reduced(logits[start : start + len(some)], some)
        ]


def _reduced(logits: Tensor | np.ndarray, rows: Sequence[Row]) -> list[Any]:
    try:
        return reduce_rows(logits, rows)
    except Exception as error:
        return [FailedRow(error)] * len(rows)


def _ranked(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    rule = rows[0].request.rule
    try:
        return rule.rank(logits, rows)
    except UserError:  # a constraint that failed: its request ends where the target asks it
        return rule.rank(logits, [row._replace(is_open=True) for row in rows])


def top_k_rows(held: SparseLogits, rows: Sequence[Row], count: int) -> list[TopK]:
    """The best `count` tokens of each row of a drafter's scores, without what the request's options filter out."""
    offers: list[TopK] = []
    for start, run in _runs(rows):
        part = held if len(run) == len(rows) else held.part(slice(start, start + len(run)))
        offers += _best_of_run(part, run, count)
    return offers


def _best_of_run(held: SparseLogits, rows: Sequence[Row], count: int) -> list[TopK]:
    """By the rule's `best` for rows on the host; by its `rank` for those left empty."""
    rule, host = rows[0].request.rule, host_rows(held.values)
    if host is None and (together := _best_on_device(held, rows, count)) is not None:
        return together
    offers = None if host is None else rule.best(adjust_sparse(host, held.ids, rows), held, rows, count)
    if offers is None:
        return [_best_by_rank(held, number, row, count) for number, row in enumerate(rows)]
    for number, row in enumerate(rows):
        if row.request.constraint:
            offers[number] = allowed_of(offers[number], row)
        if not offers[number][0]:
            offers[number] = _best_by_rank(held, number, row, count)
    return offers


def _best_on_device(held: SparseLogits, rows: Sequence[Row], count: int) -> list[TopK] | None:
    """By the rule's `rank` of all rows at once: the host waits for the device once. None where a row's constraint
    failed, which must not spoil the others."""
    try:
        ranks = rows[0].request.rule.rank(held.wide(), rows)
    except UserError:
        return None
    places, best = stable_top_k(ranks, min(count, ranks.shape[-1]))
    values, tokens = torch.stack([best.double(), places.double()]).tolist()  # in one copy, exactly
    return [offer_of([int(token) for token in some], its) for some, its in zip(tokens, values, strict=True)]


def _best_by_rank(held: SparseLogits, number: int, row: Row, count: int) -> TopK:
    ranks = _ranked(held.wide(slice(number, number + 1)), [row])[0]
    places, best = stable_top_k(ranks, min(count, len(ranks)))
    return offer_of(places.tolist(), best.tolist())


def offer_of(tokens: list[int], values: list[float]) -> TopK:
    """The best tokens, without those that are filtered out: they stand last."""
    possible = sum(value > -math.inf for value in values)
    return tokens[:possible], values[:possible]


def most_likely(scores: np.ndarray, held: SparseLogits, samplings: Sequence[Sampling], count: int) -> list[TopK]:
    """`best` of a rule whose scale is log q. [rows, held]"""
    offers = ranked(scores, samplings, count, ids=held.ids)
    if offers is None:
        offers = [_likeliest(log_q, held, count) for log_q in log_chances(scores, samplings)]
    return offers


def _likeliest(log_q: np.ndarray, held: SparseLogits, count: int) -> TopK:
    places = largest_indices(log_q, min(count, len(log_q)))
    return offer_at(places, log_q[places], held)


def offer_at(places: np.ndarray, values: np.ndarray, held: SparseLogits) -> TopK:
    """The offer of these places of a row, best first. [count] both"""
    tokens = places if held.ids is None else held.ids[places]
    return offer_of(tokens.tolist(), values.tolist())


def _runs(rows: Sequence[Row]) -> list[tuple[int, Sequence[Row]]]:
    """Neighbouring rows of one rule, with the number of the first."""
    rule = rows[0].request.rule if rows else None
    for row in rows:
        if row.request.rule is not rule:
            return _neighbours(rows, lambda row: row.request.rule)
    return [(0, rows)] if rows else []


def _by_request(rows: Sequence[Row]) -> list[tuple[int, Sequence[Row]]]:
    """Neighbouring rows of one request, with the number of the first."""
    return _neighbours(rows, lambda row: row.request)


def _neighbours(rows: Sequence[Row], owner: Callable[[Row], object]) -> list[tuple[int, Sequence[Row]]]:
    starts = [place for place, row in enumerate(rows) if not place or owner(row) is not owner(rows[place - 1])]
    return [(start, rows[start:end]) for start, end in zip(starts, [*starts[1:], len(rows)], strict=True)]
