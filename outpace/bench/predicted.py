"""What theory says of what was measured: tokens a round and the speedup, from the acceptance and the times of a run.

The formulas are those of `core.theory`. Where drafts differ in length, each length counts as often as it came.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from outpace.bench.store import Record
from outpace.core import stats, theory


def predicted(done: Sequence[Record], against: Sequence[tuple[Record, Record]]) -> dict[str, Any]:
    """`predicted_length`: tokens a round if each position had its measured acceptance, whatever the draft's length;
    `constant_length`: if all positions had the same, as Leviathan et al. assume. `predicted_speedup`: of the former, if
    a round were its drafting and its pass and nothing else; a draft beside the target counts as free. None where an
    engine does not tell. `against`: plain decoding's answers with those to the same prompts."""
    positions = stats.merge_positions(record.positions for record in done)
    lengths = [sum(column) for column in zip_longest(*(record.lengths for record in done), fillvalue=0)]
    if not positions or not sum(lengths):
        return {"predicted_length": None, "constant_length": None, "predicted_speedup": None}
    rates = stats.rates(positions)
    reached, kept = (sum(column) for column in zip(*positions, strict=True))
    by_position = _mean(lengths, [theory.expected_tokens_by_position(rates[:n]) for n in range(len(lengths))])
    constant = _mean(lengths, [theory.expected_tokens(kept / reached, n) for n in range(len(lengths))])
    return {
        "predicted_length": by_position,
        "constant_length": constant,
        "predicted_speedup": _speedup(by_position, against),
    }


def _mean(counts: Sequence[int], values: Sequence[float]) -> float:
    return sum(count * value for count, value in zip(counts, values, strict=True)) / sum(counts)


def _speedup(tokens: float, against: Sequence[tuple[Record, Record]]) -> float | None:
    plain = _seconds([base for base, _ in against])
    ours = _seconds([record for _, record in against])
    if plain is None or ours is None or not plain["target_seconds"]:
        return None
    unit = plain["target_seconds"]
    return theory.speedup(tokens, 1, ours["draft_seconds"] / unit, ours["target_seconds"] / unit)


def _seconds(records: Sequence[Record]) -> dict[str, Any] | None:
    """Of a round after the first, on average."""
    rounds = sum(len(record.counts) - 1 for record in records if record.counts)
    names = ("draft_seconds", "target_seconds")
    return {name: sum(getattr(record, name) for record in records) / rounds for name in names} if rounds else None
