"""Translates regexes of Python, JavaScript and other engines to those of llguidance (Rust)."""

from __future__ import annotations

import re
from collections.abc import Iterator

_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_", "s": r"\x20\t\n\r\f\v"}  # in ASCII
_UNIT = re.compile(r"\\.|\[:\^?[a-z]+:\]|&&|~~|.", re.DOTALL)  # one item of a regex, in a class or outside
_LOOKAROUND = re.compile(r"\(\?<?[=!]")


def in_ascii(regex: str) -> str:
    r"""Return a regex, or a Lark grammar, whose \d, \w and \s match ASCII only, as in JavaScript.

    In llguidance they match all of Unicode.
    """
    return re.sub(r"\\(.)", _escape_in_ascii, regex, flags=re.DOTALL)


def _escape_in_ascii(escape: re.Match[str]) -> str:
    letter = escape[1]
    characters = _CLASSES.get(letter.lower())
    return f"[{'^' if letter.isupper() else ''}{characters}]" if characters else escape[0]


def with_plain_classes(regex: str) -> str:
    """Escape `[`, `&&` and `~~` in character classes, where llguidance reads them as set operations."""
    written, in_class = "", False
    for unit in _UNIT.findall(regex):
        if not in_class:
            in_class = unit == "["
        elif unit == "]" and not written.endswith(("[", "[^")):
            in_class = False
        elif unit in ("[", "&&", "~~"):
            unit = "".join(f"\\{character}" for character in unit)
        written += unit
    return written


def has_lookaround(regex: str) -> bool:
    """Return whether a regex has a lookahead or lookbehind, which llguidance cannot enforce."""
    return _LOOKAROUND.search(re.sub(r"\\.", "", regex, flags=re.DOTALL)) is not None


def without_lookaheads(regex: str) -> list[str]:
    """Split off the positive lookaheads at a regex's beginning; return regexes that all have to match instead of it."""
    found = []
    while regex.startswith("^(?="):
        ends = [end for end, depth, unit in _nested(regex) if depth == 0 and unit == ")"]
        if not ends or any(depth == 0 and unit == "|" for _, depth, unit in _nested(regex)):
            break
        found.append(f"^(?:{regex[4 : ends[0] - 1]})")
        regex = "^" + regex[ends[0] :]
    return [*found, regex]


def _nested(regex: str) -> Iterator[tuple[int, int, str]]:
    """Yield (end, depth of groups, character) for each character outside of classes."""
    depth, in_class = 0, False
    for match in _UNIT.finditer(regex):
        unit = match[0]
        if in_class or unit == "[":
            in_class = unit != "]"
            continue
        depth += {"(": 1, ")": -1}.get(unit, 0)
        yield match.end(), depth, unit
