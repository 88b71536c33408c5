"""Options: dataclasses whose fields state their defaults and bounds together."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from outpace.core.errors import check_range, check_whole


def whole(default: int | None, low: int, high: float = math.inf) -> Any:
    """Declare an option that is a whole number from `low` to `high`; with default None it may be None too."""
    return field(default=default, metadata={"check": check_whole, "bounds": (low, high)})


def number(default: float | None, low: float, high: float = math.inf) -> Any:
    """Declare an option that is a number from `low` to `high`; with default None it may be None too."""
    return field(default=default, metadata={"check": check_range, "bounds": (low, high)})


def parsed(default: str, parse: Callable[[str], object]) -> Any:
    """Declare an option that is a text which `parse` accepts; for others it raises UserError."""
    return field(default=default, metadata={"check": lambda name, value: parse(value), "bounds": ()})


@dataclass(frozen=True)
class CheckedOptions:
    """Checks the fields that are declared by one of the functions above when an instance is created."""

    def __post_init__(self) -> None:
        """Raise UserError for a value out of bounds."""
        for one in fields(self):
            value = getattr(self, one.name)
            if "check" in one.metadata and not (value is None and one.default is None):
                one.metadata["check"](one.name, value, *one.metadata["bounds"])


@dataclass(frozen=True)
class MethodOptions(CheckedOptions):
    """The options of a method; without fields: no options."""
