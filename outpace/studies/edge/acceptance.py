"""Read the acceptance rate at each draft position: numbers, or a judgement.json that `outpace distill` wrote."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

from outpace.core.errors import UserError, check_range
from outpace.models.files.reading import read_json

SHIPPED = Path(__file__).parents[2] / "drafts" / "smollm2-135m-instruct" / "judgement.json"


def read_acceptance(text: str) -> tuple[float, ...]:
    """Parse comma-separated rates or read a judgement.json; an empty text means the rates of the shipped pair."""
    if not text:
        return judged(SHIPPED)
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        if Path(text).suffix != ".json":
            says = "it must be rates with commas between them, as in 0.8,0.7, or a judgement.json of outpace distill"
            raise UserError(f"acceptance is {text!r}, {says}") from None
        return judged(Path(text))
    for rate in rates:
        check_range("acceptance", rate, 0.0, 1.0)
    return rates


def judged(file: Path) -> tuple[float, ...]:
    """Return the acceptance rate at each draft position at temperature 0, averaged over tasks."""
    rows = read_json(file).get("rows")
    columns = [_positions(row, file) for row in rows if _is_greedy(row)] if isinstance(rows, list) else []
    if not any(columns):
        raise UserError(f"{file} has no row of temperature 0 with `by_position`, the acceptance of each draft position")
    return tuple(fmean(rate for rate in column if rate is not None) for column in zip_longest(*columns))


def _is_greedy(row: Any) -> bool:
    return isinstance(row, dict) and row.get("temperature") == 0


def _positions(row: dict[str, Any], file: Path) -> list[float]:
    rates = row.get("by_position") or []
    for rate in rates if isinstance(rates, list) else [rates]:
        check_range(f"by_position in {file}", rate, 0.0, 1.0)
    return list(rates)
