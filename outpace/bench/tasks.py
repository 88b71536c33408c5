"""Loads a bench's prompts, from files, hub data sets and the built-in sets, and builds conversations from them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from outpace.api import scoring
from outpace.api.prompt_file import load_data_set, read_prompt_file, user_turns
from outpace.api.scoring import Reference
from outpace.core.errors import UserError, unknown

HUB = "hub:"
BUILT_IN = "builtin"
SHIPPED = (BUILT_IN, "repetition", "summaries", "answers")  # files of the folder `prompts`
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

    def earlier_turn(self, turn: int) -> TaskPrompt:
        """Return an earlier turn of the conversation (0: the first), without its reference."""
        task = self.task.removesuffix(f" {len(self.before) + 1}") if self.before else self.task
        return TaskPrompt(_turn_task(task, turn), self.name, self.before[turn], None, self.before[:turn])


Conversation = Sequence[TaskPrompt]  # the turns of one, in order


def collect(sources: Sequence[str], count: int, turns: int = 1) -> list[TaskPrompt]:
    """Return the first `count` prompts of each task, alternating between tasks so that a stopped bench has all tasks.

    A source is a .jsonl file, the name of a known data set, `hub:NAME`, or one of `SHIPPED`; UserError for any other.
    Of a conversation the first `turns` user messages are taken; the second and later ones are tasks of their own
    ("NAME 2") and follow the message before them.
    """
    tasks: dict[str, dict[str, Conversation]] = {}
    for source in sources:
        for conversation in _read_source(source, count, turns):
            first = conversation[0]
            found = tasks.setdefault(first.task, {})
            if first.name in found:
                raise UserError(f"{source}: the prompt {first.name!r} of the task {first.task} is there twice")
            if len(found) < count:
                found[first.name] = conversation
    rows = itertools.zip_longest(*(found.values() for found in tasks.values()), fillvalue=())
    return [prompt for row in rows for conversation in row for prompt in conversation]


def _read_source(source: str, count: int, turns: int) -> Iterator[Conversation]:
    path = Path(source).expanduser()
    if source in SHIPPED:
        path = Path(__file__).with_name("prompts") / f"{source}.jsonl"
    if source.startswith(HUB):
        name = source.removeprefix(HUB)
        yield from _from_hub(name, (name, None, None), count, turns)
    elif path.suffix == ".jsonl" or path.is_file():
        for place, entry in enumerate(read_prompt_file(path), 1):
            yield _turns_of(entry, path.stem, str(place), f"{path}, line {place}", turns)
    elif source in KNOWN:
        yield from _from_hub(source, KNOWN[source], count, turns)
    else:
        raise unknown("task", source, ["FILE.jsonl", "hub:NAME", *SHIPPED, *KNOWN])


def _turns_of(entry: Mapping[str, Any], task: str, name: str, where: str, max_turns: int) -> Conversation:
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


def _from_hub(
    task: str, data_set: tuple[str, str | None, str | None], count: int, max_turns: int
) -> Iterator[Conversation]:
    """Read a data set's first rows, of its test split, else of its first split, unless a split is named."""
    name, configuration, split = data_set
    loaded = load_data_set(f"the data set {name}", name, configuration, split)
    rows = loaded if split else loaded["test" if "test" in loaded else next(iter(loaded))]
    for number, row in enumerate(itertools.islice(rows, count)):
        where = f"the data set {name}, row {number}"
        yield _turns_of(_hub_entry(where, row), task, str(number), where, max_turns)


def _hub_entry(where: str, row: Any) -> dict[str, Any]:
    """Convert a data set's row to the form of a file's line."""
    entry = {field: row.get(field) for field in ("test", "entry_point") if row.get("entry_point")}
    references = (row.get(field) for field in REFERENCE_FIELDS)
    usable = (value for value in references if isinstance(value, str | int | float) and str(value).strip())
    return {"turns": user_turns(where, row), "reference": next(usable, None), **entry}


def check_turns(prompts: Sequence[TaskPrompt], tokenizer: Any) -> None:
    """Raise UserError if conversations are to be measured with a model that has no chat template."""
    if any(prompt.before for prompt in prompts) and not tokenizer.has_template:
        raise UserError("--turns needs a model with a chat template, this one has none")


def prompt_of(
    prompt: TaskPrompt, tokenizer: Any, plain_answer: Callable[[TaskPrompt], Sequence[int]]
) -> tuple[int, ...]:
    """Return a prompt's token ids, including the earlier turns.

    `plain_answer` returns the tokens that plain decoding wrote in an earlier turn.
    """
    if not prompt.before:
        return tuple(tokenizer.encode_prompt(prompt.text))
    messages: list[dict[str, str]] = []
    for turn, text in enumerate(prompt.before):
        messages.append({"role": "user", "content": text})
        written = [token for token in plain_answer(prompt.earlier_turn(turn)) if token not in tokenizer.stop_ids]
        messages.append({"role": "assistant", "content": tokenizer.decode(written)})
    return tuple(tokenizer.chat([*messages, {"role": "user", "content": prompt.text}]))


def encode_all(
    prompts: Sequence[TaskPrompt], tokenizer: Any, answer: Callable[[tuple[int, ...]], Sequence[int]]
) -> list[tuple[int, ...]]:
    """Return the token ids of all prompts; `answer` writes plain decoding's answer in each earlier turn, once."""

    @cache
    def plain_answer(prompt: TaskPrompt) -> Sequence[int]:
        return answer(prompt_of(prompt, tokenizer, plain_answer))

    return [prompt_of(prompt, tokenizer, plain_answer) for prompt in prompts]
