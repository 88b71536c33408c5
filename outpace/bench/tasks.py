"""Loads a bench's prompts, from files, hub data sets and the built-in sets, and builds conversations from them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from outpace.api.prompt_file import load_data_set, read_prompt_file
from outpace.bench import scoring
from outpace.bench.scoring import Reference
from outpace.core.errors import UserError, unknown

HUB = "hub:"
BUILT_IN = "builtin"
SHIPPED = (BUILT_IN, "repetition", "summaries", "answers")  # files of the folder `prompts`
TEXT_FIELDS = ("turns", "prompt", "question", "instruction", "text")
REFERENCE_FIELDS = ("reference", "answer_number", "answer")
KNOWN = {  # name: hub data set, configuration, split
    "gsm8k": ("openai/gsm8k", "main", "test"),
    "humaneval": ("openai/openai_humaneval", None, "test"),
    "mgsm": ("juletxara/mgsm", "en", "test"),
    "mt_bench": ("HuggingFaceH4/mt_bench_prompts", None, "train"),
}


class TaskPrompt(NamedTuple):
    """A user message to answer, with the user's earlier messages of its conversation.

    `name` identifies it within its task; `reference` is None where no right answer is known.
    """

    task: str
    name: str
    text: str
    reference: Reference | None = None
    before: tuple[str, ...] = ()

    def task_of(self, turn: int) -> str:
        """Return the task that a turn of this conversation (0: the first) belongs to."""
        here = len(self.before)
        return _turn_task(self.task.removesuffix(f" {here + 1}") if here else self.task, turn)

    def at(self, turn: int) -> TaskPrompt:
        """Return an earlier turn of the conversation, without its reference."""
        return TaskPrompt(self.task_of(turn), self.name, self.before[turn], None, self.before[:turn])


def collect(sources: Sequence[str], count: int, turns: int = 1) -> list[TaskPrompt]:
    """Return the first `count` prompts of each task, alternating between tasks so that a stopped bench has all tasks.

    A source is a .jsonl file, the name of a known data set, `hub:NAME`, or one of `SHIPPED`; UserError for any other.
    Of a conversation the first `turns` user messages are taken; the second and later ones are tasks of their own
    ("NAME 2") and follow the message before them.
    """
    tasks: dict[str, dict[str, TaskPrompt]] = {}
    for source in sources:
        for prompt in _read_source(source, count, turns):
            found = tasks.setdefault(prompt.task, {})
            if prompt.name in found:
                raise UserError(f"{source}: the prompt {prompt.name!r} of the task {prompt.task} is there twice")
            if len(found) < count if not prompt.before else prompt.name in tasks[prompt.task_of(0)]:
                found[prompt.name] = prompt
    columns = [_column(task, tasks) for task in tasks.values() if task]
    return [prompt for row in itertools.zip_longest(*columns) for prompt in row if prompt is not None]


def _column(task: Mapping[str, TaskPrompt], tasks: Mapping[str, Mapping[str, TaskPrompt]]) -> list[TaskPrompt | None]:
    """Align a task's later turns with the first turns of their conversations."""
    names = list(tasks[next(iter(task.values())).task_of(0)])
    return [task.get(name) for name in (*names, *(name for name in task if name not in names))]


def _read_source(source: str, count: int, turns: int) -> Iterable[TaskPrompt]:
    path = Path(source).expanduser()
    if source in SHIPPED:
        return read_file(Path(__file__).with_name("prompts") / f"{source}.jsonl", turns)
    if source.startswith(HUB):
        name = source.removeprefix(HUB)
        return _from_hub(name, (name, None, None), count, turns)
    if path.suffix == ".jsonl" or path.is_file():
        return read_file(path, turns)
    if source in KNOWN:
        return _from_hub(source, KNOWN[source], count, turns)
    raise unknown("task", source, ["FILE.jsonl", "hub:NAME", *SHIPPED, *KNOWN])


def read_file(file: Path, turns: int = 1) -> list[TaskPrompt]:
    """Read the first turns of every line of a file of prompts, each named by its line number unless it has an id."""
    return [
        prompt
        for place, entry in enumerate(read_prompt_file(file), 1)
        for prompt in _prompts_of(entry, file.stem, str(place), f"{file}, line {place}", turns)
    ]


def _prompts_of(entry: Mapping[str, Any], task: str, name: str, where: str, max_turns: int) -> list[TaskPrompt]:
    """Return an entry's first turns; its own task and id override `task` and `name`, its reference is of turn 1."""
    turns = tuple(entry["turns"][:max_turns])
    task, name = (
        str(value) if isinstance(value, str | int) and str(value) else default
        for value, default in ((entry.get("task"), task), (entry.get("id"), name))
    )
    first = TaskPrompt(task, name, turns[0], scoring.read(entry, turns[0], where))
    return [first, *(TaskPrompt(_turn_task(task, n), name, turns[n], None, turns[:n]) for n in range(1, len(turns)))]


def _turn_task(task: str, turn: int) -> str:
    return f"{task} {turn + 1}" if turn else task


def _from_hub(task: str, data_set: tuple[str, str | None, str | None], count: int, turns: int) -> list[TaskPrompt]:
    """Read a data set's first rows, of its test split, else of its first split, unless a split is named."""
    name, configuration, split = data_set
    loaded = load_data_set(f"the data set {name}", name, configuration, split)
    rows = loaded if split else loaded["test" if "test" in loaded else next(iter(loaded))]
    chosen = itertools.islice(rows, count)
    return [
        prompt
        for number, row in enumerate(chosen)
        for prompt in _prompts_of(
            _hub_entry(name, number, row), task, str(number), f"the data set {name}, row {number}", turns
        )
    ]


def _hub_entry(name: str, number: int, row: Any) -> dict[str, Any]:
    """Convert a data set's row to the form of a file's line."""
    entry = {field: row.get(field) for field in ("test", "entry_point") if row.get("entry_point")}
    references = (row.get(field) for field in REFERENCE_FIELDS)
    usable = (value for value in references if isinstance(value, str | int | float) and str(value).strip())
    for field in TEXT_FIELDS:
        value = row.get(field)
        texts = value if isinstance(value, list) else [value]
        if texts and all(isinstance(text, str) and text.strip() for text in texts):
            return {"turns": texts, "reference": next(usable, None), **entry}
    raise UserError(f"the data set {name}, row {number}: none of the fields {', '.join(TEXT_FIELDS)} holds a text")


PlainAnswer = Callable[[TaskPrompt, int], Sequence[int]]
"""Returns the tokens that plain decoding wrote in a turn (0: the first) of a prompt's conversation."""


def check_turns(prompts: Sequence[TaskPrompt], tokenizer: Any) -> None:
    """Raise UserError if conversations are to be measured with a model that has no chat template."""
    if any(prompt.before for prompt in prompts) and not tokenizer.has_template:
        raise UserError("--turns needs a model with a chat template, this one has none")


def prompt_of(prompt: TaskPrompt, tokenizer: Any, plain_answer: PlainAnswer) -> tuple[int, ...]:
    """Return a prompt's token ids, including the earlier turns with plain decoding's answers."""
    if not prompt.before:
        return tuple(tokenizer.encode_prompt(prompt.text))
    messages: list[dict[str, str]] = []
    for turn, text in enumerate(prompt.before):
        messages.append({"role": "user", "content": text})
        written = [token for token in plain_answer(prompt, turn) if token not in tokenizer.stop_ids]
        messages.append({"role": "assistant", "content": tokenizer.decode(written)})
    return tuple(tokenizer.chat([*messages, {"role": "user", "content": prompt.text}]))


class Conversations:
    """Builds prompts of conversations outside a measurement: each earlier turn is answered once, when needed."""

    def __init__(self, tokenizer: Any, answer: Callable[[Sequence[int]], Sequence[int]]) -> None:
        """`answer` returns plain decoding's tokens after a prompt."""
        self._tokenizer, self._answer = tokenizer, answer
        self._answers: dict[tuple[str, str, int], Sequence[int]] = {}

    def prompt(self, prompt: TaskPrompt) -> tuple[int, ...]:
        """Return a prompt's token ids, including the earlier turns."""
        return prompt_of(prompt, self._tokenizer, self._plain_answer)

    def _plain_answer(self, prompt: TaskPrompt, turn: int) -> Sequence[int]:
        key = prompt.task_of(0), prompt.name, turn
        if key not in self._answers:
            self._answers[key] = self._answer(self.prompt(prompt.at(turn)))
        return self._answers[key]
