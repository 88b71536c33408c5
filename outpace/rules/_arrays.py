"""Which rules take rows of scores as arrays. The others are given tensors, for which torch is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from outpace.core.carried import Noise
from outpace.core.scores import Scores, tensor_of
from outpace.core.types import Request, Row, Rule

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


def noise_of(request: Request) -> Noise | None:
    """By what this request's tokens are picked, where that is the best of all by scores or in a race; else None."""
    if _is_by_score(request, request.rule.reduce):
        return Noise()
    sampling, rule = request.sampling, type(request.rule)
    if getattr(rule, _BY_RACE, None) is not rule or sampling.is_greedy or _is_steered(request):
        return None
    return Noise(sampling.temperature, request.seed, request.choice % _WORD, *sampling.kernel_filters)


def offers_by_score(request: Request) -> bool:
    """Whether what is proposed for this request are the draft's best tokens, as a model may tell them."""
    return _is_by_score(request, request.rule.best)


def _is_by_score(request: Request, function: Callable[..., Any]) -> bool:
    return not _is_steered(request) and hasattr(function, _BY_SCORE)


def _is_steered(request: Request) -> bool:
    """Whether something beside the model decides which tokens are possible, or how likely."""
    return request.adjustments is not None or request.constraint is not None


def reduced(scores: Scores, rows: Sequence[Row]) -> list[Any]:
    """Rows of one rule as it reduces them. [rows, vocab] to one value a row"""
    rule = rows[0].request.rule
    reduce: Callable[..., list[Any]] = rule.reduce
    return reduce(scores if hasattr(reduce, _MARK) else tensor_of(scores), rows)
