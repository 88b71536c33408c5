"""Which rules take rows of scores as arrays. The others are given tensors, for which torch is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from outpace.core.scores import Scores, tensor_of
from outpace.core.types import Row

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "takes_arrays"


def takes_arrays(reduce: F) -> F:
    """Marks a `reduce` that takes float32 arrays [rows, vocab] beside tensors; one that overrides it is not marked."""
    setattr(reduce, _MARK, True)
    return reduce


def reduced(scores: Scores, rows: Sequence[Row]) -> list[Any]:
    """Rows of one rule as it reduces them. [rows, vocab] to one value a row"""
    rule = rows[0].request.rule
    reduce: Callable[..., list[Any]] = rule.reduce
    return reduce(scores if hasattr(reduce, _MARK) else tensor_of(scores), rows)
