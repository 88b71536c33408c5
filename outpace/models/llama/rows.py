"""The rows of a forest by number, counted over the nodes of all its parts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from outpace.models.base import Part


def row_numbers(forest: Sequence[Part]) -> list[int]:
    """Those that are wanted."""
    starts = itertools.accumulate((len(part.tokens) for part in forest), initial=0)
    return [start + node for part, start in zip(forest, starts, strict=False) for node in part.wanted]


def shown_numbers(forest: Sequence[Part]) -> list[int]:
    """Those whose hidden states are shown."""
    starts = itertools.accumulate((len(part.tokens) for part in forest), initial=0)
    return [start + node for part, start in zip(forest, starts, strict=False) for node in part.shown]
