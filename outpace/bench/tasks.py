"""What is asked: files of prompts, data sets of the hub, or a few prompts of our own; a task has a name."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from outpace.core.errors import UserError, unknown

HUB = "hub:"
BUILT_IN = "builtin"
REPETITION = "repetition"
SUMMARIES = "summaries"
FORM = 'a JSON object with "turns", a list of texts'
TEXT_FIELDS = ("turns", "prompt", "question", "instruction", "text")
KNOWN = {  # name: hub data set, configuration, split
    "gsm8k": ("openai/gsm8k", "main", "test"),
    "humaneval": ("openai/openai_humaneval", None, "test"),
    "mgsm": ("juletxara/mgsm", "en", "test"),
    "mt_bench": ("HuggingFaceH4/mt_bench_prompts", None, "train"),
}


class Asked(NamedTuple):
    """One prompt: its task, its name within the task, and the user's message."""

    task: str
    name: str
    text: str


def collect(sources: Sequence[str], count: int) -> list[Asked]:
    """The first `count` prompts of every task, the tasks in turn, so that a bench that is stopped has some of each.

    A source is a .jsonl file, the name of a known data set, `hub:NAME`, `builtin`, `repetition` or `summaries`.
    UserError for one that is none.
    """
    tasks: dict[str, dict[str, Asked]] = {}
    for source in sources:
        for asked in _read(source, count):
            found = tasks.setdefault(asked.task, {})
            if asked.name in found:
                raise UserError(f"{source}: the prompt {asked.name!r} of the task {asked.task} is there twice")
            if len(found) < count:
                found[asked.name] = asked
    columns = [list(task.values()) for task in tasks.values()]
    return [asked for row in itertools.zip_longest(*columns) for asked in row if asked is not None]


def _read(source: str, count: int) -> Iterable[Asked]:
    path = Path(source).expanduser()
    if source in (BUILT_IN, REPETITION, SUMMARIES):
        return [
            Asked(task, str(place), text) for task, texts in _own(source).items() for place, text in enumerate(texts)
        ]
    if source.startswith(HUB):
        name = source.removeprefix(HUB)
        return _from_hub(name, (name, None, None), count)
    if path.suffix == ".jsonl" or path.is_file():
        return read_file(path)
    if source in KNOWN:
        return _from_hub(source, KNOWN[source], count)
    raise unknown("task", source, ["FILE.jsonl", "hub:NAME", BUILT_IN, REPETITION, SUMMARIES, *KNOWN])


def _own(source: str) -> Mapping[str, Sequence[str]]:
    """The prompts that come with outpace, by task."""
    from outpace.bench import builtin, repetition, summaries

    own = {BUILT_IN: builtin.PROMPTS, REPETITION: repetition.TASKS, SUMMARIES: summaries.TASKS}
    return own[source]


def read_file(file: Path) -> list[Asked]:
    """The first turn of every line; UserError names the line that is torn, empty or of another form."""
    try:
        with file.open("rb") as stream:
            found = [_prompt(file, place, line) for place, line in enumerate(stream, start=1)]
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror})") from error
    if not found:
        raise UserError(f"{file} is empty; a file of prompts has {FORM} a line")
    return found


def _prompt(file: Path, place: int, line: bytes) -> Asked:
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
    return Asked(_name(entry.get("task"), file.stem), _name(entry.get("id"), str(place)), turns[0])


def _name(value: Any, other: str) -> str:
    return str(value) if isinstance(value, str | int) and str(value) else other


def _from_hub(task: str, place: tuple[str, str | None, str | None], count: int) -> list[Asked]:
    """The first rows of a data set; without a named split, of its test split or else its first."""
    name, configuration, split = place
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(f"the task {task} needs `pip install datasets`; or give a .jsonl file or {BUILT_IN}") from None
    try:
        loaded: Any = load_dataset(name, configuration, split=split)
        rows = loaded if split else loaded["test" if "test" in loaded else next(iter(loaded))]
        chosen = list(itertools.islice(rows, count))
    except Exception as error:  # connection, names, formats and scripts fail in classes of their own
        raise UserError(f"the data set {name} cannot be loaded ({type(error).__name__}: {error})") from error
    return [Asked(task, str(number), _hub_text(name, number, row)) for number, row in enumerate(chosen)]


def _hub_text(name: str, number: int, row: Any) -> str:
    for field in TEXT_FIELDS:
        value = row.get(field)
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, str) and first.strip():
            return first
    raise UserError(f"the data set {name}, row {number}: none of the fields {', '.join(TEXT_FIELDS)} holds a text")
