"""The error for bad input, which users see as a plain sentence, and checks of values."""

from __future__ import annotations

import difflib
import math
import re
import reprlib
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from shlex import quote

_KEY = re.compile(r"(?<=grpc://)[^\s,'\"]*@|(?<=grpcs://)[^\s,'\"]*@")


class UserError(Exception):
    """Raised for bad input. The message is one sentence that names the value and what is allowed."""

    def __init__(self, message: str = "") -> None:
        super().__init__(without_keys(message))


def without_keys(text: str) -> str:
    """Return a text without the API keys of the addresses grpc://KEY@HOST:PORT in it."""
    return _KEY.sub("", text)


class LostProcess(UserError):
    """Raised when a process that this one depends on has ended; commands exit with status 1."""


def unknown(what: str, value: str, allowed: Iterable[str], of: str = "") -> UserError:
    """Build the error for a name that is not in `allowed`, with the nearest allowed one; `of` names what was chosen."""
    names = sorted(allowed)
    near = difflib.get_close_matches(value, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    whose = f" of {of}" if of else ""
    return UserError(f"unknown {what} {value!r}{whose}, allowed are {', '.join(names) or 'none'}{hint}")


def check_whole(name: str, value: int, low: int, high: float = math.inf) -> None:
    """Raise UserError unless value is a whole number with low <= value <= high."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"{name} is {_shown(value)}, it must be a whole number, {_allowed(low, high)}")
    check_range(name, value, low, high)


def check_range(name: str, value: float, low: float, high: float = math.inf) -> None:
    """Raise UserError unless value is a number with low <= value <= high (NaN never is)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UserError(f"{name} is {_shown(value)}, it must be a number, {_allowed(low, high)}")
    if not low <= value <= high:
        raise UserError(f"{name} is {value!r}, it must be {_allowed(low, high)}")


def check_share(name: str, value: float) -> None:
    """Raise UserError unless value is a number with 0 < value <= 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value <= 1.0:
        raise UserError(f"{name} is {_shown(value)}, it must be a number above 0 and at most 1")


def _allowed(low: float, high: float) -> str:
    bounds = [str(bound) if isinstance(bound, int) else f"{bound:g}" for bound in (low, high)]
    return f"at least {bounds[0]}" if high == math.inf else f"between {bounds[0]} and {bounds[1]}"


def _shown(value: object) -> str:
    """Shorten a value of a wrong type, which may be long."""
    return reprlib.repr(value)


_CHECKOUT = Path(__file__).parents[2]


def require(what: str, extra: str, *packages: str) -> None:
    """Raise UserError, with the command that installs an extra, if `what` needs it and a package is missing.

    `packages` are those of the extra to look for; by default the one of the same name.
    """
    if any(find_spec(package) is None for package in packages or (extra,)):
        raise UserError(f"{what} needs the extra {extra}: `{install_command(extra)}`")


def install_command(extra: str, checkout: Path = _CHECKOUT) -> str:
    """Return the command that installs an extra of this package, as in pip install 'outpace[server]'."""
    if (checkout / "pyproject.toml").is_file():
        return f"pip install -e {quote(f'{checkout}[{extra}]')}"
    return f"pip install 'outpace[{extra}]'"
