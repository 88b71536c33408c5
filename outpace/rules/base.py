"""What rules share: the walk along one pick a node, and rows of several requests sent each to its own rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from outpace.core.adjust import adjusted_held
from outpace.core.errors import UserError
from outpace.core.lazy import torch
from outpace.core.logits import Held, best_of, host_rows, largest
from outpace.core.sampling import Sampling
from outpace.core.tree import Siblings, TokenTree
from outpace.core.types import Offer, Row, Verdict
from outpace.rules._arrays import noise_of as noise_of
from outpace.rules._arrays import offers_by_score as offers_by_score
from outpace.rules._arrays import reduced
from outpace.rules._guard import allowed_of, guard, opened
from outpace.rules._ranking import log_chances, ranked

if TYPE_CHECKING:
    from torch import Tensor


class Fault(NamedTuple):
    """Stands for a row that its rule could not reduce."""

    error: Exception


def follow(tree: TokenTree, picks: Sequence[int]) -> Verdict:
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


def reduce_apart(logits: Tensor | np.ndarray, rows: Sequence[Row]) -> list[Any]:
    """As `reduce_rows`, where a rule that raises spoils its own request's rows alone: each of them is the Fault."""
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
        return [Fault(error)] * len(rows)


def _ranked(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    rule = rows[0].request.rule
    try:
        return rule.rank(logits, rows)
    except UserError:  # a constraint that failed: its request ends where the target asks it
        return rule.rank(logits, [row._replace(is_open=True) for row in rows])


def best_rows(held: Held, rows: Sequence[Row], count: int) -> list[Offer]:
    """The best `count` tokens of each row of a drafter's scores, without what the request's options filter out."""
    offers: list[Offer] = []
    for start, run in _runs(rows):
        part = held if len(run) == len(rows) else held.part(slice(start, start + len(run)))
        offers += _best_of_run(part, run, count)
    return offers


def _best_of_run(held: Held, rows: Sequence[Row], count: int) -> list[Offer]:
    """By the rule's `best` for rows on the host; by its `rank` for those left empty."""
    rule, host = rows[0].request.rule, host_rows(held.values)
    if host is None and (together := _best_on_device(held, rows, count)) is not None:
        return together
    offers = None if host is None else rule.best(adjusted_held(host, held.ids, rows), held, rows, count)
    if offers is None:
        return [_best_by_rank(held, number, row, count) for number, row in enumerate(rows)]
    for number, row in enumerate(rows):
        if row.request.constraint:
            offers[number] = allowed_of(offers[number], row)
        if not offers[number][0]:
            offers[number] = _best_by_rank(held, number, row, count)
    return offers


def _best_on_device(held: Held, rows: Sequence[Row], count: int) -> list[Offer] | None:
    """By the rule's `rank` of all rows at once: the host waits for the device once. None where a row's constraint
    failed, which must not spoil the others."""
    try:
        ranks = rows[0].request.rule.rank(held.wide(), rows)
    except UserError:
        return None
    places, best = best_of(ranks, min(count, ranks.shape[-1]))
    values, tokens = torch.stack([best.double(), places.double()]).tolist()  # in one copy, exactly
    return [offer_of([int(token) for token in some], its) for some, its in zip(tokens, values, strict=True)]


def _best_by_rank(held: Held, number: int, row: Row, count: int) -> Offer:
    ranks = _ranked(held.wide(slice(number, number + 1)), [row])[0]
    places, best = best_of(ranks, min(count, len(ranks)))
    return offer_of(places.tolist(), best.tolist())


def offer_of(tokens: list[int], values: list[float]) -> Offer:
    """The best tokens, without those that are filtered out: they stand last."""
    possible = sum(value > -math.inf for value in values)
    return tokens[:possible], values[:possible]


def likeliest(scores: np.ndarray, held: Held, samplings: Sequence[Sampling], count: int) -> list[Offer]:
    """`best` of a rule whose scale is log q. [rows, held]"""
    offers = ranked(scores, samplings, count, ids=held.ids)
    if offers is None:
        offers = [_likeliest(log_q, held, count) for log_q in log_chances(scores, samplings)]
    return offers


def _likeliest(log_q: np.ndarray, held: Held, count: int) -> Offer:
    places = largest(log_q, min(count, len(log_q)))
    return offer_at(places, log_q[places], held)


def offer_at(places: np.ndarray, values: np.ndarray, held: Held) -> Offer:
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
