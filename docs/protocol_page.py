"""Prints docs/protocol.md: the messages and comments of `outpace/card/protocol.proto`. Run: make protocol-page"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "outpace" / "card" / "protocol.proto"
NOTE = "Written by `make protocol-page` from the comments of `outpace/card/protocol.proto`."
BLOCK = re.compile(r"^(service|message) (\w+) \{")
CALL = re.compile(r"^rpc (.*);")
FIELD = re.compile(r"^(?:(optional|repeated) )?([\w.<>, ]+?) (\w+) = (\d+);(?:\s*// (.*))?$")


def page() -> str:
    """Return the page."""
    return "".join(f"{line}\n" for line in _lines(SOURCE.read_text()))


def _lines(text: str) -> Iterator[str]:
    comment: list[str] = []
    yield from ("# The protocol between machines", "", NOTE)
    for line in map(str.strip, text.splitlines()):
        if not line or line.startswith("//"):
            comment += [line[2:].strip()] if line else []
            continue
        if line.startswith("syntax"):
            yield from ("", *comment)
        elif found := BLOCK.match(line):
            yield from ("", f"## {found[2]}", *(("", *comment) if comment else ()), "")
        elif found := CALL.match(line):
            yield f"- `{found[1]}`: " + " ".join(comment)
        elif line.startswith("oneof"):
            yield from ("", "One of:", "")
        elif found := FIELD.match(line):
            count, kind, name, number, what = found.groups()
            kind = {"repeated": f"{kind}[]", "optional": f"{kind}?", None: kind}[count]
            yield f"{number}. `{name}: {kind}`" + (f": {what}" if what else "")
        comment = []


if __name__ == "__main__":
    sys.stdout.write(page())
