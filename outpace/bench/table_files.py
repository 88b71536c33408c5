"""Files for drafters that look things up: made from a corpus of the user's own, for one tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from outpace.core import registry
from outpace.core.errors import UserError, unknown
from outpace.models.files import token_tables
from outpace.models.files.find import resolve
from outpace.models.load import Progress
from outpace.models.text.tokenizer import Tokenizer

FORM = 'a JSON object with "text" or "turns" in each line'

SEARCHED = "layer_skip"  # a drafter that has no file, whose options are found by a corpus (skip_search.py)


class Made(NamedTuple):
    """A file that was made, and of what."""

    drafter: str
    path: Path
    texts: int
    tokens: int
    bytes: int


def make_table(
    drafter: str | None, corpus: Sequence[Path], target: str | None, to: Path | None, progress: Progress
) -> Made:
    """Reads a corpus, cuts it into tokens, and replaces the drafter's file by what it makes of them. UserError for a
    drafter without a file, and for a corpus that cannot be read or is empty."""
    module = _maker(drafter)
    texts = texts_of(corpus)
    tokenizer = Tokenizer.from_folder(resolve(target, progress=progress))
    tokens = []
    for place, text in enumerate(texts):
        tokens.append(tokenizer.continuation(text))
        progress("corpus", (place + 1) / len(texts))
    path = to or token_tables.place_of(drafter or "", tokenizer.fingerprint)
    arrays = module.make(tokens, tokenizer.size, module.Options())
    _make_folder(path.parent)
    token_tables.write(path, drafter or "", tokenizer.fingerprint, arrays)
    return Made(drafter or "", path, len(texts), sum(map(len, tokens)), path.stat().st_size)


def makers() -> list[str]:
    """The drafters that have a file."""
    return [name for name in registry.names("drafters") if hasattr(registry.find("drafters", name), "make")]


def _maker(drafter: str | None) -> ModuleType:
    taken = [*makers(), SEARCHED]
    named = f"{', '.join(taken[:-1])} or {taken[-1]}"
    if drafter is None:
        raise UserError(f"--corpus is for one drafter: say which, by --drafter {named}")
    if drafter not in registry.names("drafters"):
        raise unknown("drafter", drafter, taken)
    if drafter not in makers():
        raise UserError(f"--corpus is for --drafter {named}, not for {drafter}")
    return registry.find("drafters", drafter)


def texts_of(corpus: Sequence[Path]) -> list[str]:
    """The texts of all files of a corpus; UserError for one that cannot be read or is empty."""
    return [text for file in corpus for text in _texts(file)]


def _texts(file: Path) -> Iterator[str]:
    """A text file is one text, a .jsonl file has one in each line."""
    try:
        content = file.expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text ({error.reason})") from error
    if not content.strip():
        raise UserError(f"{file} is empty, a corpus needs text")
    if file.suffix != ".jsonl":
        yield content
        return
    for place, line in enumerate(content.removesuffix("\n").split("\n"), start=1):  # a text may hold other breaks
        yield from _entry(line, f"{file}, line {place}")


def _entry(line: str, where: str) -> list[str]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({error})") from error
    found = [entry.get("text")] if isinstance(entry, dict) and "text" in entry else []
    found = entry.get("turns", found) if isinstance(entry, dict) else found
    if not isinstance(found, list) or not found or not all(isinstance(text, str) for text in found):
        raise UserError(f"{where} must be {FORM}")
    return found


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the folder {folder} cannot be made ({error.strerror})") from error
