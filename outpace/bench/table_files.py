"""Makes the files of lookup drafters from a corpus of the user's own, for one tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from outpace.core import registry
from outpace.core.errors import UserError, unknown
from outpace.models.files import token_tables
from outpace.models.files.find import resolve
from outpace.models.files.reading import read_text
from outpace.models.load import Progress
from outpace.models.text.tokenizer import Tokenizer

SEARCHED = "layer_skip"  # a drafter without a file, whose options skip_search.py finds with a corpus


class TableFile(NamedTuple):
    """A file that was made, and the size of its corpus."""

    drafter: str
    path: Path
    texts: int
    tokens: int
    bytes: int


def make_table(
    drafter: str | None, corpus: Sequence[Path], target: str | None, to: Path | None, progress: Progress
) -> TableFile:
    """Tokenize a corpus and replace the drafter's file by one made from it.

    UserError for a drafter without a file, and for a corpus that cannot be read or is empty.
    """
    name, module = _find_maker(drafter)
    texts = texts_of(corpus)
    tokenizer = Tokenizer.from_folder(resolve(target, progress=progress))
    tokens = []
    for place, text in enumerate(texts):
        tokens.append(tokenizer.continuation(text))
        progress("corpus", (place + 1) / len(texts))
    path = to or token_tables.place_of(name, tokenizer.fingerprint)
    arrays = module.make(tokens, tokenizer.size, module.Options())
    token_tables.write(path, name, tokenizer.fingerprint, arrays)
    return TableFile(name, path, len(texts), sum(map(len, tokens)), path.stat().st_size)


def _find_maker(drafter: str | None) -> tuple[str, ModuleType]:
    """Return the drafter's name and its module, which has a function `make`."""
    drafters = registry.names("drafters")
    makers = [name for name in drafters if hasattr(registry.find("drafters", name), "make")]
    allowed = f"{', '.join(makers)} or {SEARCHED}"
    if drafter is None:
        raise UserError(f"--corpus is for one drafter: say which, by --drafter {allowed}")
    if drafter not in drafters:
        raise unknown("drafter", drafter, [*makers, SEARCHED])
    if drafter not in makers:
        raise UserError(f"--corpus is for --drafter {allowed}, not for {drafter}")
    return drafter, registry.find("drafters", drafter)


def texts_of(corpus: Sequence[Path]) -> list[str]:
    """Read the texts of a corpus: text files, and the lines of .jsonl files.

    UserError for a file that cannot be read or is empty.
    """
    texts = []
    for file in corpus:
        content = read_text(file.expanduser(), largest=None)
        if not content.strip():
            raise UserError(f"{file} is empty, a corpus needs text")
        if file.suffix == ".jsonl":
            lines = content.removesuffix("\n").split("\n")  # a text may hold other line breaks
            texts += [text for n, line in enumerate(lines, 1) for text in _line_texts(line, f"{file}, line {n}")]
        else:
            texts.append(content)
    return texts


def _line_texts(line: str, where: str) -> list[str]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({error})") from error
    fields = entry if isinstance(entry, dict) else {}
    texts = fields.get("turns", [fields["text"]] if "text" in fields else [])
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise UserError(f'{where} must be a JSON object with "text" or "turns" in each line')
    return texts
