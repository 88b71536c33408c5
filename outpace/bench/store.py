"""Stores a bench's answers as they are measured, one JSON line each, so that a stopped bench can continue."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from outpace.bench.peer import TimedAnswer
from outpace.core.errors import UserError
from outpace.models.files.reading import read_optional_json, write_json

ANSWERS = "answers.jsonl"
SETTINGS = "settings.json"
ROWS = "rows.json"
PLOT = "bench.png"


class RecordKey(NamedTuple):
    """Identifies an answer. For a batch of several prompts, `prompt` names the group and `task` is "all"."""

    label: str
    task: str
    prompt: str
    round: int
    batch: int


@dataclass(frozen=True, kw_only=True)
class Record(TimedAnswer):
    """One measured answer, or batch of answers, or the reason of its failure (`failed`).

    A batch has its prompts' (task, name) in `prompts` and their tokens in `texts`. Judging adds `surprise`, -log p of
    the text in nats by the target, and `correct`, None where the right answer is not known.
    """

    label: str
    task: str
    prompt: str
    round: int
    batch: int = 1
    is_peer: bool = False
    precision: str = ""
    failed: str | None = None
    surprise: float | None = None
    correct: bool | None = None
    prompts: tuple[tuple[str, str], ...] = ()
    texts: tuple[tuple[int, ...], ...] = ()

    @property
    def key(self) -> RecordKey:
        return RecordKey(self.label, self.task, self.prompt, self.round, self.batch)

    @property
    def decode_seconds(self) -> float:
        """Time from the first round's tokens to the last round's; of a batch, from the call to the last token."""
        if self.batch > 1:
            return self.seconds
        return self.arrivals[-1] - self.arrivals[0] if len(self.arrivals) > 1 else 0.0

    @property
    def decoded(self) -> int:
        """Number of tokens that arrived during `decode_seconds`."""
        return sum(map(len, self.texts)) if self.batch > 1 else sum(self.counts[1:])

    @property
    def speed(self) -> float | None:
        """Decoding speed in tokens/s; None for an answer of one round."""
        return self.decoded / self.decode_seconds if self.decoded and self.decode_seconds > 0 else None

    @property
    def written(self) -> list[tuple[tuple[str, str], tuple[int, ...]]]:
        """Each prompt's (task, name) with its tokens."""
        if self.batch > 1:
            return list(zip(self.prompts, self.texts, strict=True))
        return [((self.task, self.prompt), self.tokens)]


class Store:
    """Holds records by key; with a folder, it reads them at the start and appends each new one.

    Failed records of earlier runs are not read, so that their answers are measured again.
    """

    def __init__(self, folder: Path | None, settings: Mapping[str, Any]) -> None:
        """Open a folder. UserError if it holds a bench with other settings, or lines that are not records."""
        self.folder = folder
        self.records: dict[RecordKey, Record] = {}
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder} cannot be made ({error.strerror})") from error
        if not (folder / SETTINGS).exists():
            write_json(folder / SETTINGS, settings)
        found = read_settings(folder)
        for name, value in settings.items():
            if found.get(name) != value:
                difference = f"was made with {name} {found.get(name)!r}, now it is {value!r}"
                raise UserError(f"{folder} {difference}; name another folder with --out")
        if (folder / ANSWERS).exists():
            _cut_torn_line(folder / ANSWERS)
            self.records = {record.key: record for record in read_records(folder) if record.failed is None}

    def add(self, record: Record) -> None:
        """Store a record, on disk first."""
        if self.folder is not None:
            with (self.folder / ANSWERS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(record.key._asdict() | asdict(record), separators=(",", ":")) + "\n")
                file.flush()
                os.fsync(file.fileno())
        self.records[record.key] = record


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of the bench in a folder; {} if there are none."""
    return read_optional_json(folder / SETTINGS)


def read_records(folder: Path) -> Iterator[Record]:
    """Read the records of a folder; UserError for a line that is not one."""
    file = folder / ANSWERS
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror})") from error
    for place, line in enumerate(lines, start=1):
        if line.endswith("\n"):  # else it is being written, or was torn
            yield _record(file, place, line)


def _record(file: Path, place: int, line: str) -> Record:
    try:
        found = json.loads(line)
        known = {field.name for field in fields(Record)}
        made = Record(**{name: _frozen(value) for name, value in found.items() if name in known})
        numbers = (made.seconds, made.first_token, *made.arrivals, *made.counts, *made.tokens, made.round, made.batch)
        if not all(isinstance(number, int | float) for number in numbers) or len(made.arrivals) != len(made.counts):
            raise ValueError("numbers are missing")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{file}, line {place} is no finished answer ({error}); take it out or start anew") from error
    return made


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def _cut_torn_line(file: Path) -> None:
    """Remove a last line that was torn while it was being written."""
    data = file.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with file.open("r+b") as stream:
            stream.truncate(whole)
