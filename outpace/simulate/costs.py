"""Defines the times of passes on the simulated clock: a fixed ratio, or measured times by rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from outpace.core.errors import UserError, check_range
from outpace.core.theory import travel_time

Cost = Callable[[int], float]
"""Returns the time of a pass, in seconds or any other unit, from its number of rows."""


@dataclass(frozen=True)
class PassCosts:
    """The times of target and draft passes by rows, in one unit; `name` is for tables."""

    name: str
    target: Cost
    draft: Cost

    @property
    def ratio(self) -> float:
        """Time of a target pass of one row over that of a draft pass of one row."""
        return self.target(1) / self.draft(1)


def by_ratio(ratio: float) -> PassCosts:
    """Return costs where a target pass takes `ratio` draft forwards, whatever the rows, as on a memory-bound GPU."""
    check_range("ratio", ratio, 1e-6, 1e6)
    return PassCosts(f"{ratio:g}", lambda rows: ratio, lambda rows: 1.0)


def measured(target: str, draft: str) -> PassCosts:
    """Parse measured times of rows, as in `1:6.0,4:6.2,8:7.0`."""
    costs = PassCosts("measured", parse_curve("target-times", target), parse_curve("draft-times", draft))
    return PassCosts(f"{costs.ratio:.3g} measured", costs.target, costs.draft)


def in_pipeline(costs: PassCosts, stages: int, hop: float) -> PassCosts:
    """Add the travel time of a pipeline to each target pass; `hop`: in plain target passes."""
    travel = travel_time(stages, hop) * costs.target(1)
    return replace(costs, target=lambda rows: costs.target(rows) + travel) if travel else costs


def ratios(text: str) -> list[float]:
    """Parse a list of ratios as in `3.5,7,15`."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"ratio is {text!r}, it must be numbers such as 3.5,7,15") from None


def parse_curve(name: str, text: str) -> Cost:
    """Parse points and interpolate linearly; the first value holds before them, the last slope after them."""
    points: dict[int, float] = {}
    for part in text.split(","):
        rows, _, time = part.partition(":")
        try:
            points[int(rows)] = float(time)
        except ValueError:
            raise UserError(f"{name} has {part!r}, it must be rows and their time such as 1:6.0,4:6.2,8:7.0") from None
        check_range(f"rows of {name}", int(rows), 1)
        check_range(f"a time of {name}", points[int(rows)], 1e-12, 1e12)
    known, times = zip(*sorted(points.items()), strict=True)
    slope = (times[-1] - times[-2]) / (known[-1] - known[-2]) if len(known) > 1 else 0.0

    def cost(rows: int) -> float:
        return float(np.interp(rows, known, times)) + max(slope, 0.0) * max(rows - known[-1], 0)

    return cost
