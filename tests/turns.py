"""Which cases of a promise the short tests take; all others are behind the mark `long`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def in_turn(*axes: Iterable[Any]) -> list[Any]:
    """All combinations. Without the mark are as few as have each value of each axis."""
    values = [list(axis) for axis in axes]
    places = [range(len(axis)) for axis in values]
    short = {tuple(turn % len(axis) for axis in values) for turn in range(max(map(len, values)))}
    return [
        case([axis[at] for axis, at in zip(values, chosen, strict=True)], chosen in short)
        for chosen in itertools.product(*places)
    ]


def one_of(every: int, cases: Iterable[Any]) -> list[Any]:
    """All cases. Without the mark are the first and each `every`-th after it."""
    return [case(values, number % every == 0) for number, values in enumerate(cases)]


def case(values: Any, short: bool) -> Any:
    """One case of a test, of one value or of several in a tuple or list; with the mark unless it is `short`."""
    marks = [] if short else [pytest.mark.long]
    return pytest.param(*(values if isinstance(values, tuple | list) else [values]), marks=marks)
