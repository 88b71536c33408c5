"""Which rules take rows of scores as arrays. The others are given tensors, for which torch is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from outpace.core.carried import Noise
from outpace.core.logits import Scores, tensor_of
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


def offers_by_score(request: Request) -> bool:
    """Whether what is proposed for this request are the draft's best tokens, as a model may tell them."""
    is_steered = request.adjustments is not None or request.constraint is not None
    return not is_steered and hasattr(request.rule.best, _BY_SCORE)


def reduced(scores: Scores, rows: Sequence[Row]) -> list[Any]:
    """Rows of one rule as it reduces them. [rows, vocab] to one value a row"""
    rule = rows[0].request.rule
    reduce: Callable[..., list[Any]] = rule.reduce
    return reduce(scores if hasattr(reduce, _MARK) else tensor_of(scores), rows)
