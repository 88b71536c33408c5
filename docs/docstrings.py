"""Shows docstrings on the site: indented lines of the form "name: what it is", below a line with a colon, as a list."""

from __future__ import annotations

import re
from typing import Any

import griffe

GROUP = re.compile(r"^(\S.*:)\n((?: {4}.*\n?)+)", re.MULTILINE)
ENTRY = re.compile(r"^ {4}(\w[\w, ]*): ", re.MULTILINE)


class Lists(griffe.Extension):
    """Runs over every class when the package is read."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        if cls.docstring is not None:
            cls.docstring.value = GROUP.sub(listed, cls.docstring.value)


def listed(found: re.Match[str]) -> str:
    """The group as markdown; left alone where its lines name nothing."""
    if not ENTRY.search(found[2]):
        return found[0]
    return f"**{found[1]}**\n\n" + ENTRY.sub(r"- `\1`: ", found[2])
