"""What is asked: files of prompts, data sets of the hub, or a few prompts of our own; a task has a name, and where its
answers are known each prompt has a reference."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from outpace.bench import scoring
from outpace.bench.scoring import Reference
from outpace.core.errors import UserError, unknown

HUB = "hub:"
BUILT_IN = "builtin"
REPETITION = "repetition"
SUMMARIES = "summaries"
ANSWERS = "answers"
OWN = (BUILT_IN, REPETITION, SUMMARIES, ANSWERS)
FORM = 'a JSON object with "turns", a list of texts'
TEXT_FIELDS = ("turns", "prompt", "question", "instruction", "text")
REFERENCE_FIELDS = ("reference", "answer_number", "answer")
KNOWN = {  # name: hub data set, configuration, split
    "gsm8k": ("openai/gsm8k", "main", "test"),
    "humaneval": ("openai/openai_humaneval", None, "test"),
    "mgsm": ("juletxara/mgsm", "en", "test"),
    "mt_bench": ("HuggingFaceH4/mt_bench_prompts", None, "train"),
}


class TaskPrompt(NamedTuple):
    """One prompt: its task, its name within the task, the user's message, what a right answer is, if that is known,
    and the user's messages before it in the conversation."""

    task: str
    name: str
    text: str
    reference: Reference | None = None
    before: tuple[str, ...] = ()

    def task_of(self, turn: int) -> str:
        """The task that this turn of the conversation (0: the first) belongs to."""
        here = len(self.before)
        return _task_of(self.task.removesuffix(f" {here + 1}") if here else self.task, turn)

    def at(self, turn: int) -> TaskPrompt:
        """An earlier turn of the conversation; what a right answer to it is, is not known any more."""
        return TaskPrompt(self.task_of(turn), self.name, self.before[turn], None, self.before[:turn])


def collect(sources: Sequence[str], count: int, turns: int = 1) -> list[TaskPrompt]:
    """The first `count` prompts of every task, the tasks in turn, so that a bench that is stopped has some of each. Of
    a conversation the first `turns` messages of the user; those behind the first are tasks of their own ("NAME 2"),
    and each stands behind the one before it.

    A source is a .jsonl file, the name of a known data set, `hub:NAME`, or one of `OWN`.
    UserError for one that is none.
    """
    tasks: dict[str, dict[str, TaskPrompt]] = {}
    for source in sources:
        for asked in _read(source, count, turns):
            found = tasks.setdefault(asked.task, {})
            if asked.name in found:
                raise UserError(f"{source}: the prompt {asked.name!r} of the task {asked.task} is there twice")
            if len(found) < count if not asked.before else asked.name in tasks[asked.task_of(0)]:
                found[asked.name] = asked
    columns = [_column(task, tasks) for task in tasks.values() if task]
    return [asked for row in itertools.zip_longest(*columns) for asked in row if asked is not None]


def _column(task: Mapping[str, TaskPrompt], tasks: Mapping[str, Mapping[str, TaskPrompt]]) -> list[TaskPrompt | None]:
    """A task's prompts; later turns stand beside the first turns of their conversations."""
    beside = list(tasks[next(iter(task.values())).task_of(0)])
    return [task.get(name) for name in (*beside, *(name for name in task if name not in beside))]


def _read(source: str, count: int, turns: int) -> Iterable[TaskPrompt]:
    path = Path(source).expanduser()
    if source in OWN:
        return [
            asked
            for task, entries in _own(source).items()
            for place, entry in enumerate(entries)
            for asked in _asked(entry, task, str(place), f"{source}, {task} {place}", turns)
        ]
    if source.startswith(HUB):
        name = source.removeprefix(HUB)
        return _from_hub(name, (name, None, None), count, turns)
    if path.suffix == ".jsonl" or path.is_file():
        return read_file(path, turns)
    if source in KNOWN:
        return _from_hub(source, KNOWN[source], count, turns)
    raise unknown("task", source, ["FILE.jsonl", "hub:NAME", *OWN, *KNOWN])


def _own(source: str) -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """The prompts that come with outpace, by task, as lines of a file have them."""
    from outpace.bench import answers, builtin, repetition, summaries

    if source == ANSWERS:
        return answers.TASKS
    texts = {BUILT_IN: builtin.PROMPTS, REPETITION: repetition.TASKS, SUMMARIES: summaries.TASKS}[source]
    return {task: [{"turns": [text]} for text in some] for task, some in texts.items()}


def read_file(file: Path, turns: int = 1) -> list[TaskPrompt]:
    """The first turns of every line; UserError names the line that is torn, empty or of another form."""
    try:
        with file.open("rb") as stream:
            found = [asked for place, line in enumerate(stream, 1) for asked in _prompts(file, place, line, turns)]
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror})") from error
    if not found:
        raise UserError(f"{file} is empty; a file of prompts has {FORM} a line")
    return found


def _prompts(file: Path, place: int, line: bytes, most: int) -> list[TaskPrompt]:
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
    return _asked(entry, file.stem, str(place), where, most)


def _asked(entry: Mapping[str, Any], task: str, name: str, where: str, most: int) -> list[TaskPrompt]:
    """The first turns; the task and the name are the entry's own, if it has them. A reference is the first turn's."""
    turns = tuple(entry["turns"][:most])
    task, name = _name(entry.get("task"), task), _name(entry.get("id"), name)
    first = TaskPrompt(task, name, turns[0], scoring.read(entry, turns[0], where))
    later = [TaskPrompt(_task_of(task, n), name, turns[n], None, turns[:n]) for n in range(1, len(turns))]
    return [first, *later]


def _task_of(task: str, turn: int) -> str:
    return f"{task} {turn + 1}" if turn else task


def _name(value: Any, other: str) -> str:
    return str(value) if isinstance(value, str | int) and str(value) else other


def _from_hub(task: str, place: tuple[str, str | None, str | None], count: int, turns: int) -> list[TaskPrompt]:
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
    return [
        asked
        for number, row in enumerate(chosen)
        for asked in _asked(
            _hub_entry(name, number, row), task, str(number), f"the data set {name}, row {number}", turns
        )
    ]


def _hub_entry(name: str, number: int, row: Any) -> dict[str, Any]:
    """As a line of a file has it; what its answer is said to be, where that is a text or a number."""
    entry = {field: row.get(field) for field in ("test", "entry_point") if row.get("entry_point")}
    known = (row.get(field) for field in REFERENCE_FIELDS)
    usable = (value for value in known if isinstance(value, str | int | float) and str(value).strip())
    return {"turns": _hub_turns(name, number, row), "reference": next(usable, None), **entry}


def _hub_turns(name: str, number: int, row: Any) -> list[str]:
    for field in TEXT_FIELDS:
        value = row.get(field)
        texts = value if isinstance(value, list) else [value]
        if texts and all(isinstance(text, str) and text.strip() for text in texts):
            return texts
    raise UserError(f"the data set {name}, row {number}: none of the fields {', '.join(TEXT_FIELDS)} holds a text")


Said = Callable[[TaskPrompt, int], Sequence[int]]
"""The tokens that plain decoding wrote in a turn (0: the first) of a prompt's conversation."""


def check_turns(asked: Sequence[TaskPrompt], tokenizer: Any) -> None:
    """UserError where a conversation is to be measured and the model has no form for one."""
    if any(one.before for one in asked) and not tokenizer.has_template:
        raise UserError("--turns needs a model with a chat template, this one has none")


def prompt_of(asked: TaskPrompt, tokenizer: Any, said: Said) -> tuple[int, ...]:
    """The tokens of a prompt, those of the turns before it included."""
    if not asked.before:
        return tuple(tokenizer.encode_prompt(asked.text))
    messages: list[dict[str, str]] = []
    for turn, text in enumerate(asked.before):
        messages.append({"role": "user", "content": text})
        written = [token for token in said(asked, turn) if token not in tokenizer.stop_ids]
        messages.append({"role": "assistant", "content": tokenizer.decode(written)})
    return tuple(tokenizer.chat([*messages, {"role": "user", "content": asked.text}]))


def bare_length(asked: TaskPrompt, tokenizer: Any) -> int:
    """Tokens of a prompt whose answers before it are empty."""
    return len(prompt_of(asked, tokenizer, lambda *_: ()))


class Conversations:
    """The prompts of conversations where nothing is measured: an answer is written when its turn is first asked for,
    and then known."""

    def __init__(self, tokenizer: Any, answer: Callable[[Sequence[int]], Sequence[int]]) -> None:
        """`answer`: what plain decoding writes behind a prompt."""
        self._tokenizer, self._answer = tokenizer, answer
        self._known: dict[tuple[str, str, int], Sequence[int]] = {}

    def prompt(self, asked: TaskPrompt) -> tuple[int, ...]:
        """The tokens of a prompt, behind those of the turns before it."""
        return prompt_of(asked, self._tokenizer, self._said)

    def _said(self, asked: TaskPrompt, turn: int) -> Sequence[int]:
        key = asked.task_of(0), asked.name, turn
        if key not in self._known:
            self._known[key] = self._answer(self.prompt(asked.at(turn)))
        return self._known[key]
