"""Reads files of prompts: one JSON object per line with the user's messages of a conversation in "turns"."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outpace.core.errors import UserError

FORM = 'a JSON object with "turns", a list of texts'


def read_prompt_file(file: Path) -> list[dict[str, Any]]:
    """Read all lines; UserError names a line that is torn, empty or of another form."""
    try:
        with file.open("rb") as stream:
            entries = [_parse_line(f"{file}, line {place}", line) for place, line in enumerate(stream, start=1)]
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror})") from error
    if not entries:
        raise UserError(f"{file} is empty; a file of prompts has {FORM} a line")
    return entries


def _parse_line(where: str, line: bytes) -> dict[str, Any]:
    if not line.strip():
        raise UserError(f"{where} is empty; it must be {FORM}")
    try:
        entry = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        torn = "" if line.endswith(b"\n") else "; the file seems torn"
        raise UserError(f"{where} is not JSON ({error}){torn}") from error
    turns = entry.get("turns") if isinstance(entry, dict) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise UserError(f"{where} must be {FORM}, none of them empty")
    return dict(entry)
