"""Reads prompts from hub data sets and from files, with a conversation's user messages as "turns" in each JSON line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outpace.core.errors import UserError

TURN_FIELDS = ("turns", "messages", "conversations", "prompt", "question", "instruction", "text")  # of data sets
USER = ("user", "human")  # names of the user's role in data sets
FORM = 'a JSON object with "turns", a list of strings'


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


def user_turns(where: str, row: Mapping[str, Any]) -> list[str]:
    """Return the user's messages in a row of a hub data set; UserError if no known field holds a text."""
    for name in TURN_FIELDS:
        value: Any = row.get(name)
        entries: list[Any] = value if isinstance(value, list) else [value]
        if isinstance(entries[0] if entries else None, dict):
            entries = [entry for entry in entries if entry.get("role", entry.get("from", USER[0])) in USER]
            entries = [entry.get("content", entry.get("value")) for entry in entries]
        if entries and all(isinstance(text, str) and text.strip() for text in entries):
            return entries
    raise UserError(f"{where}: none of the fields {', '.join(TURN_FIELDS)} holds a text")


def load_data_set(label: str, name: str, configuration: str | None = None, split: str | None = None) -> Any:
    """Load a data set of the Hugging Face hub; UserErrors begin with `label`."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(f"{label} needs `pip install datasets`; or give a .jsonl file or builtin") from None
    try:
        return load_dataset(name, configuration, split=split)
    except Exception as error:  # connection, names, formats and scripts fail in classes of their own
        raise UserError(f"{label} cannot be loaded ({type(error).__name__}: {error})") from error
