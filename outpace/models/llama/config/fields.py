"""Reads fields of a config.json; errors name a field that is missing, invalid or unsupported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outpace.core.errors import UserError
from outpace.models.base import UnsupportedModel

LARGEST_SIZE = 2**31 - 1
FULL, SLIDING = "full_attention", "sliding_attention"  # layer types: full attention, and a sliding window


def unsupported_field(what: str) -> UnsupportedModel:
    """Make the error for something that this runtime does not support, although others do."""
    return UnsupportedModel(f"{what} is not supported by the runtime llama; --runtime transformers runs it")


def size(fields: Mapping[str, Any], name: str, default: int | None = None, smallest: int = 1) -> int:
    """Read an integer; a missing or null field gives `default`, or UserError without one."""
    value = fields.get(name)
    if value is None:
        if default is None:
            raise UserError(f"{name} is missing")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not smallest <= value <= LARGEST_SIZE:
        raise UserError(f"{name} is {value!r:.80}, it must be a whole number of at least {smallest}")
    return value


def number(fields: Mapping[str, Any], name: str, default: float | None, largest: float) -> float:
    """Read a positive number; a missing or null field gives `default`, or UserError without one."""
    value = fields.get(name)
    if value is None:
        if default is None:
            raise UserError(f"{name} is missing")
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= largest:
        raise UserError(f"{name} is {value!r:.80}, it must be above 0 and at most {largest:g}")
    return float(value)


def flag(fields: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Read a boolean; a missing or null field gives `default`."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise UserError(f"{name} is {value!r:.80}, it must be true or false")
    return value
