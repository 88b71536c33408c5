"""What the target is asked: files of prompts, a hub data set, or the built-in set."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from outpace.core.errors import UserError
from outpace.distill import builtin
from outpace.distill.numbering import is_held_out, number

HUB = "hub:"
BUILT_IN = "builtin"
TEXT_FIELDS = ("prompt", "instruction", "question", "text")  # of a hub data set that has no turns
FORM = 'a JSON object with "turns", a list of texts'


def collect(sources: Sequence[str]) -> list[str]:
    """The opening messages of all sources, each once. A source is a .jsonl file, `hub:NAME` or `builtin`."""
    texts: dict[str, None] = {}
    for source in sources:
        if source == BUILT_IN:
            texts.update(dict.fromkeys(builtin.prompts()))
        elif source.startswith(HUB):
            texts.update(dict.fromkeys(_from_hub(source.removeprefix(HUB))))
        else:
            texts.update(dict.fromkeys(read_prompts(Path(source).expanduser())))
    return list(texts)


def to_judge(files: Sequence[str], sources: Sequence[str]) -> dict[str, list[str]]:
    """Prompts by task: one a file, or those of the sources that are held out."""
    if files:
        return {Path(file).stem: read_prompts(Path(file)) for file in files}
    held_out = [text for text in collect(sources) if is_held_out(text)]
    if not held_out:
        raise UserError("none of the prompts is held out, so there is nothing to judge on: name files with --tasks")
    return {"held out": sorted(held_out, key=number)}


def read_prompts(file: Path) -> list[str]:
    """The first turn of every line; UserError names the line that is torn, empty or of another form."""
    try:
        with file.open("rb") as stream:
            texts = [_turn(file, place, line) for place, line in enumerate(stream, start=1)]
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror})") from error
    if not texts:
        raise UserError(f"{file} is empty; a file of prompts has {FORM} a line")
    return texts


def _turn(file: Path, place: int, line: bytes) -> str:
    where = f"{file}, line {place}"
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
    return str(turns[0])


def _from_hub(name: str) -> Iterator[str]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(f"{HUB}{name} needs `pip install datasets`; or give a .jsonl file or {BUILT_IN}") from None
    try:
        rows: Iterable[Any] = load_dataset(name, split="train")
    except Exception as error:  # connection, names, formats and scripts fail in classes of their own
        raise UserError(f"{HUB}{name} cannot be loaded ({type(error).__name__}: {error})") from error
    for place, row in enumerate(rows):
        yield _hub_text(name, place, row)


def _hub_text(name: str, place: int, row: Any) -> str:
    for field in ("messages", "conversations", "turns"):
        if row.get(field):
            first = row[field][0]
            return str(first.get("content", first.get("value"))) if isinstance(first, dict) else str(first)
    for field in TEXT_FIELDS:
        if isinstance(row.get(field), str) and row[field].strip():
            return str(row[field])
    allowed = ", ".join(("messages", "conversations", "turns", *TEXT_FIELDS))
    raise UserError(f"{HUB}{name}, row {place}: none of the fields {allowed} holds a text")
