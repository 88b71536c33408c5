"""Picks under a constraint: the walk is guarded, not the rows.

A rule that picks the same token among those that are allowed as among all, wherever that is allowed, reduces as ever.
Then the picks on the way that the target walks are checked, and only a row whose pick is refused is masked and picked
anew. So the text is that of masking every row, and mostly no row is masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outpace.core.constraint import Constraint
from outpace.core.errors import UserError
from outpace.core.logits import Scores
from outpace.core.types import Offer, Row
from outpace.rules._arrays import reduced


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


def allowed_of(offer: Offer, row: Row) -> Offer:
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
