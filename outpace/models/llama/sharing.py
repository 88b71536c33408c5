"""Which parts of a forest share a captured forward: all of its sessions get as many rows as the longest part has."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.core.arrays import next_power_of_two

_FREE = 64  # rows: a pass over so many costs what one costs, for it is bound by memory


def shared(counts: Sequence[int]) -> list[list[int]]:
    """The places of parts with so many nodes, by forward: all in one, unless two of them save more than half of the
    rows. A piece of a prompt beside many short trees would make each of them as long as itself."""
    buckets = [next_power_of_two(count) for count in counts]
    every = list(range(len(counts)))
    if _rows(buckets) <= _FREE:
        return [every] if counts else []
    best, least = [every], _rows(buckets) / 2
    for limit in set(buckets):
        short = [place for place in every if buckets[place] < limit]
        long = [place for place in every if buckets[place] >= limit]
        rows = sum(max(_FREE, _rows([buckets[place] for place in some])) for some in (short, long))
        if short and rows < least:
            best, least = [short, long], rows
    return best


def _rows(buckets: Sequence[int]) -> int:
    """Those of one forward over parts of these buckets."""
    return next_power_of_two(len(buckets)) * max(buckets, default=0)
