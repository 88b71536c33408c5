"""Finds tool calls in a streamed answer. The results do not depend on how the text is split."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from outpace.tools.definitions import PYTHON_TAG, CallFormat, Tool

ARGUMENTS = ("arguments", "parameters")  # accepted names of the arguments' field
SPACE = " \n\t\r"


class Stage(Enum):
    """The state of the scanner."""

    READING = "reading"
    DONE = "done"
    BROKEN = "broken"  # not a call


class CallScanner:
    """Reads a call's JSON object from its `{` on, character by character.

    `name` is None until it is known; `take()` returns the new part of the arguments. Only what a call consists of is
    checked: fields at the top level, strings, and matching brackets.
    """

    def __init__(self) -> None:
        self.stage = Stage.READING
        self.name: str | None = None
        self._brackets: list[str] = []  # closing ones that are expected
        self._in_string = self._is_escaped = False
        self._wants = "key"  # at the top level: key, colon, value or comma
        self._field: str | None = None
        self._text = ""  # of the top level's key or value so far
        self._arguments = ""  # not taken yet
        self._has_arguments = False

    def take(self) -> str:
        """Return the arguments since the last call of `take`; an empty object for a call without arguments."""
        if self.stage is Stage.DONE and not self._has_arguments:
            self._has_arguments, self._arguments = True, "{}"
        text, self._arguments = self._arguments, ""
        return text

    def push(self, character: str) -> None:
        """Read one character."""
        if not self._brackets:
            self._brackets.append("}")  # of the object itself
        elif self._in_string:
            self._add(character)
            self._in_string = self._is_escaped or character != '"'
            self._is_escaped = character == "\\" and not self._is_escaped
            if not self._in_string and len(self._brackets) == 1:
                self._end()
        elif len(self._brackets) > 1:
            self._in_value(character)
        else:
            self._at_top(character)

    def _at_top(self, character: str) -> None:
        if self._wants == "value" and self._text and character in (*SPACE, ",", "}"):
            self._end()
        if character in SPACE:
            return
        match self._wants, character:
            case "value", _:
                self._in_value(character)
            case "key", '"':
                self._add(character)
                self._in_string = True
            case "colon", ":":
                self._wants = "value"
            case "comma", ",":
                self._wants = "key"
            case "comma", "}" if self.name is not None:
                self.stage = Stage.DONE
            case _:
                self.stage = Stage.BROKEN

    def _in_value(self, character: str) -> None:
        """Read a character of a value outside of its strings."""
        if len(self._brackets) == 1 and character in ":,}]":
            self.stage = Stage.BROKEN
            return
        self._add(character)
        self._in_string = character == '"'
        if character in "{[":
            self._brackets.append("}" if character == "{" else "]")
        elif character in "}]":
            if self._brackets.pop() != character:
                self.stage = Stage.BROKEN
            elif len(self._brackets) == 1:
                self._end()

    def _add(self, character: str) -> None:
        """Append to the key or value. Arguments that are an object are passed on at once."""
        self._text += character
        if self._wants == "value" and self._field in ARGUMENTS and self._text[0] == "{":
            self._arguments += character
            self._has_arguments = True

    def _end(self) -> None:
        """End a key or value at the top level."""
        text, self._text = self._text, ""
        if self._wants == "key":
            self._field, self._wants = _decoded(text), "colon"
            if self._field is None:
                self.stage = Stage.BROKEN
            return
        self._wants = "comma"
        if self._field == "name":
            self.name = _decoded(text)
            if self.name is None:
                self.stage = Stage.BROKEN
        elif self._field in ARGUMENTS and text[0] == '"':  # the arguments are an object in a string
            self._arguments, self._has_arguments = _decoded(text) or "", True


def _decoded(text: str) -> str | None:
    """Return a JSON string's text, None for anything else."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


class TextDelta(NamedTuple):
    """A piece of the answer's own text."""

    text: str


class CallBegin(NamedTuple):
    """The beginning of a tool call; calls are numbered from 0."""

    number: int
    name: str


class CallArguments(NamedTuple):
    """A piece of a call's arguments, the text of a JSON object."""

    number: int
    text: str


Delta = TextDelta | CallBegin | CallArguments
D = TypeVar("D", bound=tuple[Any, ...])


def held_back(text: str, mark: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)


def merge_deltas(deltas: Iterable[D]) -> list[D]:
    """Join neighbouring deltas that differ only in their last field, a text."""
    result: list[Any] = []
    for delta in deltas:
        kind: Any = type(delta)
        last = result[-1] if result else None
        if isinstance(last, kind) and delta[:-1] == last[:-1]:
            result[-1] = kind(*last[:-1], last[-1] + delta[-1])
        else:
            result.append(delta)
    return result


class CallParser:
    """Finds the calls of offered tools, character by character.

    It is in free text, before a call's object, in it, or after it; each has a method that reads the next character.
    Text that may still turn out to be a call is kept in `_raw`, and returned as text if it is none. A call needs the
    name of an offered tool.
    """

    def __init__(self, family: CallFormat, tools: Sequence[Tool]) -> None:
        self._family, self._names = family, {tool.name for tool in tools}
        self._start, self._end = family.start.strip(), family.end.strip()
        self._read = self._in_text if self._start else self._before_call
        self._raw = ""
        self._is_listed = False
        self._call = CallScanner()
        self._has_begun = False  # CallBegin was returned for the current call
        self._deltas: list[Delta] = []  # not returned yet
        self.count = 0  # calls begun

    def push(self, text: str) -> list[Delta]:
        """Return what is certain after this text."""
        for character in text:
            self._raw += character
            self._read(character)
        deltas, self._deltas = merge_deltas(self._deltas), []
        return deltas

    def finish(self) -> list[Delta]:
        """Return the rest at the end of the text. Space next to calls is not part of the answer's text."""
        rest, self._raw = self._raw, ""
        is_space = not rest.strip() and self.count > 0
        return [TextDelta(rest)] if rest and not is_space and not self._has_begun else []

    def _in_text(self, character: str) -> None:
        if self._start and self._raw.endswith(self._start):
            self._emit(self._raw[: -len(self._start)].rstrip())
            self._read, self._is_listed = self._before_call, False
        else:
            free = self._raw[: len(self._raw) - held_back(self._raw, self._start)]
            self._emit(free.rstrip())  # space is kept until the next text is known

    def _before_call(self, character: str) -> None:
        """Read between a mark, or the beginning of the answer, and the object."""
        if character == "{":
            self._call, self._has_begun, self._read = CallScanner(), False, self._in_call
            self._call.push(character)
        elif character == "[" and not self._is_listed and (self._family.is_list or not self._start):
            self._is_listed = True
        elif not character.isspace() and not self._is_tag():
            self._give_up()

    def _is_tag(self) -> bool:
        """Return whether the text before a call without marks may be Llama's tag."""
        begun = self._raw.strip()
        if begun == PYTHON_TAG and not self._start:
            self._raw = ""
        return not self._start and PYTHON_TAG.startswith(begun)

    def _in_call(self, character: str) -> None:
        call = self._call
        call.push(character)
        is_other = call.name is not None and call.name not in self._names
        if not self._has_begun and (call.stage is Stage.BROKEN or is_other):
            self._give_up()
            return
        if call.name is not None and not self._has_begun:
            self._deltas.append(CallBegin(self.count, call.name))
            self._has_begun, self.count = True, self.count + 1
        if self._has_begun:
            self._raw = ""
            if arguments := call.take():
                self._deltas.append(CallArguments(self.count - 1, arguments))
        if call.stage is not Stage.READING:
            self._has_begun, self._read = False, self._after_call

    def _after_call(self, character: str) -> None:
        """Read between an object and its end mark, or the next object."""
        begun = self._raw.strip()
        if self._end and self._end.startswith(begun):
            if begun == self._end:
                self._raw, self._read = "", self._in_text
        elif self._is_listed and begun in ("", ",", "]"):
            self._read = {"": self._after_call, ",": self._before_call, "]": self._in_text}[begun]
            self._raw = "" if begun else self._raw
        elif not self._start and begun in ("", ";", ","):
            self._raw = "" if begun else self._raw
        elif not self._start and begun == "{" and not self._is_listed:
            self._before_call(character)
        else:
            self._give_up()

    def _give_up(self) -> None:
        """Return what is held back as text, and continue in free text up to the next mark."""
        self._read = self._in_text
        self._emit(self._raw)

    def _emit(self, text: str) -> None:
        """Return the beginning of `_raw` as text."""
        self._raw = self._raw[len(text) :]
        if text:
            self._deltas.append(TextDelta(text))
