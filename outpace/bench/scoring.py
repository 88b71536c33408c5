"""Whether an answer is right: the one scorer for numbers, choices, exact texts, and programs that have tests.

A line of a task file says how it is scored by what it has beside its prompt:
- `test` and `entry_point`, as HumanEval has them: the answer's program has to pass the tests;
- `choices`, a list of words or letters, and `reference`, one of them: the answer has to choose it;
- `reference` that is a number, or ends with one behind `####` as GSM8K's do: the answer's last number has to be it;
- any other `reference`: the answer has to be that text, but for case, spaces, quotes and a last full stop.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from outpace.bench import sandbox
from outpace.core.errors import UserError

NUMBER, CHOICE, TEXT, PROGRAM = "number", "choice", "text", "program"
_SIGNED = re.compile(r"(?<![\w.])-?\$?\d[\d,]*(?:\.\d+)?")
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_SAYS = re.compile(r"answer(?:\s+is|\s*:)", re.IGNORECASE)
_BLOCK = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
_LETTER = r"(?<![\w]){}(?=[).:\]]|\s*$)"  # a letter that stands for a choice: not the article
_AROUND = "\"'`*“”‘’ \n\t"


class Reference(NamedTuple):
    """What an answer is held against. `value`: the number, the choice, the text or the tests; `head`: what a program is
    to go on from."""

    kind: str
    value: str
    choices: tuple[str, ...] = ()
    entry_point: str = ""
    head: str = ""


def read(entry: Mapping[str, Any], prompt: str, where: str) -> Reference | None:
    """The reference of a line of a task file, None where it has none; UserError for one that cannot be."""
    if entry.get("test") is not None:
        return _tested(entry, prompt, where)
    value = entry.get("reference")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
        raise UserError(f"{where}: the reference is {value!r}, it must be a text or a number")
    text = str(value).strip()
    if entry.get("choices") is not None:
        return _chosen(text, entry["choices"], where)
    behind = text.rpartition("####")[2].strip() if "####" in text else text
    if _SIGNED.fullmatch(behind):
        return Reference(NUMBER, behind)
    if behind is not text:
        raise UserError(f"{where}: the reference ends with {behind!r} behind ####, it must be a number")
    return Reference(TEXT, text)


def _tested(entry: Mapping[str, Any], prompt: str, where: str) -> Reference:
    test, name = entry["test"], entry.get("entry_point")
    if not isinstance(test, str) or not isinstance(name, str) or not name.isidentifier():
        raise UserError(f"{where}: test must be a program and entry_point ({name!r}) the name of what it tests")
    return Reference(PROGRAM, test, entry_point=name, head=prompt)


def _chosen(value: str, choices: Any, where: str) -> Reference:
    if not isinstance(choices, list) or not all(isinstance(one, str) and one.strip() for one in choices):
        raise UserError(f"{where}: choices must be a list of texts, it is {choices!r}")
    if value not in choices or len(set(choices)) < max(2, len(choices)):
        raise UserError(f"{where}: the reference {value!r} must be one of at least two different choices, {choices}")
    return Reference(CHOICE, value, tuple(choices))


def is_right(reference: Reference, answer: str, runs_tests: bool = False) -> bool | None:
    """Whether the answer is right; None for a program where no tests are to be run."""
    if reference.kind == NUMBER:
        return number_in(answer) == _value(reference.value)
    if reference.kind == CHOICE:
        return choice_in(answer, reference.choices) == reference.value
    if reference.kind == TEXT:
        return _plain(answer) == _plain(reference.value)
    return sandbox.passes(program_of(reference, answer)) if runs_tests else None


def number_in(answer: str) -> Fraction | None:
    """The number behind the last `####`, else in the last box, else the last one behind "the answer is", else the last
    one of all; None where there is none."""
    boxes = _BOXED.findall(answer)
    behind = list(_SAYS.finditer(answer))
    places = [answer.rpartition("####")[2]] if "####" in answer else []
    places += [*boxes[-1:], *([answer[behind[-1].end() :]] if behind else []), answer]
    for place in places:
        found = _SIGNED.findall(place)
        if found:
            return _value(found[0] if place is not answer else found[-1])
    return None


def _value(text: str) -> Fraction:
    return Fraction(text.replace("$", "").replace(",", ""))


def choice_in(answer: str, choices: Sequence[str]) -> str | None:
    """The first choice that is named behind "the answer is", else the first that is named at all; None for none."""
    behind = list(_SAYS.finditer(answer))
    for place in ([answer[behind[-1].end() :]] if behind else []) + [answer]:
        found = [(match.start(), one) for one in choices if (match := _naming(one).search(place))]
        if found:
            return min(found)[1]
    return None


def _naming(choice: str) -> re.Pattern[str]:
    if len(choice) == 1 and choice.isalpha():
        return re.compile(_LETTER.format(choice))
    return re.compile(rf"(?<!\w){re.escape(choice)}(?!\w)", re.IGNORECASE)


def _plain(text: str) -> str:
    return " ".join(text.casefold().strip(_AROUND).rstrip(".").strip(_AROUND).split())


def program_of(reference: Reference, answer: str) -> str:
    """The answer's program with its tests: the first block of code that defines the entry point, else the first block,
    else the whole answer. One that does not define it goes on where the prompt ends."""
    defines = re.compile(rf"^def {reference.entry_point}\b", re.MULTILINE)
    blocks = [*_BLOCK.findall(answer), answer]
    code = next((block for block in blocks[:-1] if defines.search(block)), blocks[0])
    found = defines.search(reference.head)
    head = reference.head[: found.start()] if found and defines.search(code) else reference.head
    return f"{head}\n{code}\n{reference.value}\ncheck({reference.entry_point})\n"
