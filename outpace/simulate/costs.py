"""What passes cost on the simulated clock: a plain ratio, or times that were measured for some numbers of rows."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from outpace.core.errors import UserError, check_range

Cost = Callable[[int], float]
"""Seconds (or any unit) of a pass over so many rows."""


@dataclass(frozen=True)
class PassCosts:
    """`target` and `draft` by rows, in one unit; `name` is what tables call them."""

    name: str
    target: Cost
    draft: Cost

    @property
    def ratio(self) -> float:
        """One row of the target over one of the draft."""
        return self.target(1) / self.draft(1)


def by_ratio(ratio: float) -> PassCosts:
    """The target takes `ratio` draft forwards; rows cost nothing more, as on a GPU that reads weights most of the
    time."""
    check_range("ratio", ratio, 1e-6, 1e6)
    return PassCosts(f"{ratio:g}", lambda rows: ratio, lambda rows: 1.0)


def measured(target: str, draft: str) -> PassCosts:
    """Measured times, as in `1:6.0,4:6.2,8:7.0`: rows and their time."""
    costs = PassCosts("measured", parse_curve("target-times", target), parse_curve("draft-times", draft))
    return PassCosts(f"{costs.ratio:.3g} measured", costs.target, costs.draft)


def ratios(text: str) -> list[float]:
    """The numbers of `3.5,7,15`."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"ratio is {text!r}, it must be numbers such as 3.5,7,15") from None
    for ratio in found:
        check_range("ratio", ratio, 1e-6, 1e6)
    return found


def parse_curve(name: str, text: str) -> Cost:
    """Straight lines between the points that are given, and on behind the last; level before the first."""
    points: dict[int, float] = {}
    for part in text.split(","):
        rows, _, time = part.partition(":")
        try:
            points[int(rows)] = float(time)
        except ValueError:
            raise UserError(f"{name} has {part!r}, it must be rows and their time such as 1:6.0,4:6.2,8:7.0") from None
        check_range(f"rows of {name}", int(rows), 1)
        check_range(f"a time of {name}", points[int(rows)], 1e-12, 1e12)
    return _lines(points)


def _lines(points: Mapping[int, float]) -> Cost:
    rows = sorted(points)

    def cost(asked: int) -> float:
        if asked <= rows[0] or len(rows) == 1:
            return points[rows[0]]
        upper = min(bisect.bisect_left(rows, asked), len(rows) - 1)
        low, high = rows[upper - 1], rows[upper]
        slope = (points[high] - points[low]) / (high - low)
        if asked > high:  # more rows are never the cheaper ones
            slope = max(slope, 0.0)
        return points[high] + slope * (asked - high)

    return cost
