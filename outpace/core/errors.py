"""The one error that is shown to a user as a plain sentence; anything else is a bug and keeps its traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Bad input. The message is one sentence that names the value and what is allowed."""


def unknown(what: str, value: str, allowed: Iterable[str]) -> UserError:
    """An error for a name that is not in `allowed`, with the nearest one that is."""
    names = sorted(allowed)
    near = difflib.get_close_matches(value, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return UserError(f"unknown {what} {value!r}, allowed are {', '.join(names) or 'none'}{hint}")


def check_whole(name: str, value: int, low: int, high: float = float("inf")) -> None:
    """Raises UserError unless value is a whole number with low <= value <= high."""
    check_range(name, value, low, high)
    if not isinstance(value, int):
        raise UserError(f"{name} is {value!r}, it must be a whole number")


def check_range(name: str, value: float, low: float, high: float = float("inf")) -> None:
    """Raises UserError unless low <= value <= high (NaN never passes)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        allowed = f"at least {low:g}" if high == float("inf") else f"between {low:g} and {high:g}"
        raise UserError(f"{name} is {value!r}, it must be {allowed}")
