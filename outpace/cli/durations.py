"""Times as people write them on a command line."""

from __future__ import annotations

import re

from outpace.core.errors import UserError

UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(text: str) -> float:
    """A time such as 90s, 30m or 1.5h, in seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", text.strip())
    if match is None:
        raise UserError(f"budget is {text!r}, it must be a time such as 90s, 30m or 2h")
    return float(match[1]) * UNITS[match[2]]
