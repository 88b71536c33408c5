"""Finds tool calls in a streamed answer. The results do not depend on how the text is split."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from outpace.tools.definitions import PYTHON_TAG, CallFormat, Tool


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

    def __init__(self, arguments: tuple[str, ...]) -> None:
        """`arguments`: the accepted names of the arguments' field."""
        self._fields = arguments
        self.stage = Stage.READING
        self.name: str | None = None
        self._brackets: list[str] = []
        self._string: str | None = None  # the current string, from its quote on
        self._value = ""  # the top field's value so far
        self._field: str | None = None
        self._wants = "key"  # at the top level: key, colon, value or comma
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
        if self._string is not None:
            self._in_string(character)
        elif len(self._brackets) > 1:
            self._inside(character)
        elif not self._brackets:
            self._brackets.append("}")  # of the object itself
        else:
            self._at_top(character)

    def _in_string(self, character: str) -> None:
        assert self._string is not None
        is_escaped = self._string.endswith("\\") and (len(self._string) - len(self._string.rstrip("\\"))) % 2 == 1
        self._string += character
        is_over = character == '"' and not is_escaped
        if self._wants == "value":
            self._note(character)
        if is_over:
            text, self._string = self._string, None
            if len(self._brackets) == 1:
                self._end_string(text)

    def _end_string(self, text: str) -> None:
        """End a string at the top level: a field's name, or its value."""
        if self._wants == "value":
            self._end_value()
            return
        self._field, self._wants, self._value = _decoded(text), "colon", ""
        if self._field is None:
            self.stage = Stage.BROKEN

    def _at_top(self, character: str) -> None:
        if self._wants == "value" and self._value and character in ",} \n\t\r":
            self._end_value()
        if character in " \n\t\r":
            return
        if self._wants == "value":
            self._begin_value(character)
        elif self._wants == "key" and character == '"':
            self._string = character
        elif self._wants == "colon" and character == ":":
            self._wants = "value"
        elif self._wants == "comma" and character == ",":
            self._wants = "key"
        elif self._wants == "comma" and character == "}":
            self.stage = Stage.DONE if self.name is not None else Stage.BROKEN
        else:
            self.stage = Stage.BROKEN

    def _begin_value(self, character: str) -> None:
        if character in "{[":
            self._brackets.append("}" if character == "{" else "]")
        elif character == '"':
            self._string = character
        elif character in ":,}]":
            self.stage = Stage.BROKEN
            return
        self._note(character)

    def _inside(self, character: str) -> None:
        """Read a character of a value with brackets."""
        self._note(character)
        if character == '"':
            self._string = character
        elif character in "{[":
            self._brackets.append("}" if character == "{" else "]")
        elif character in "}]":
            if self._brackets.pop() != character:
                self.stage = Stage.BROKEN
            elif len(self._brackets) == 1:
                self._end_value()

    def _note(self, character: str) -> None:
        """Append a character to the top-level field's value; arguments that are an object are passed on at once."""
        self._value += character
        if self._field in self._fields and self._value[0] == "{":
            self._arguments += character
            self._has_arguments = True

    def _end_value(self) -> None:
        self._wants = "comma"
        if self._field == "name":
            self.name = _decoded(self._value)
            if self.name is None:
                self.stage = Stage.BROKEN
        elif self._field in self._fields and self._value[0] == '"':  # the arguments are an object in a string
            self._arguments, self._has_arguments = _decoded(self._value) or "", True


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


def held_back(text: str, mark: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)


def merge_deltas(deltas: Iterable[Delta]) -> list[Delta]:
    """Join neighbouring deltas of one kind."""
    result: list[Delta] = []
    for delta in deltas:
        last = result[-1] if result else None
        if isinstance(delta, TextDelta) and isinstance(last, TextDelta):
            result[-1] = TextDelta(last.text + delta.text)
        elif isinstance(delta, CallArguments) and isinstance(last, CallArguments) and last.number == delta.number:
            result[-1] = CallArguments(delta.number, last.text + delta.text)
        else:
            result.append(delta)
    return result


_FIELDS = ("arguments", "parameters")


class CallParser:
    """Finds the calls of offered tools, character by character.

    It is in free text, before a call's object (`open`), in it (`call`) or after it (`after`). Text that may still turn
    out to be a call is kept in `_raw`, and returned as text if it is none. A call needs the name of an offered tool.
    """

    def __init__(self, family: CallFormat, tools: Sequence[Tool]) -> None:
        self._family, self._names = family, {tool.name for tool in tools}
        self._start, self._end = family.start.strip(), family.end.strip()
        self._state = "text" if self._start else "open"
        self._raw = ""
        self._is_listed = False
        self._call = CallScanner(_FIELDS)
        self._has_begun = False  # CallBegin was returned for the current call
        self.count = 0  # calls begun

    def push(self, text: str) -> list[Delta]:
        """Return what is certain after this text."""
        deltas: list[Delta] = []
        for character in text:
            self._step(character, deltas)
        return merge_deltas(deltas)

    def finish(self) -> list[Delta]:
        """Return the rest at the end of the text. Space next to calls is not part of the answer's text."""
        rest, self._raw = self._raw, ""
        is_space = not rest.strip() and self.count > 0
        return [TextDelta(rest)] if rest and not is_space and not self._has_begun else []

    def _step(self, character: str, deltas: list[Delta]) -> None:
        {"text": self._in_text, "open": self._before, "call": self._in_call, "after": self._behind}[self._state](
            character, deltas
        )

    def _in_text(self, character: str, deltas: list[Delta]) -> None:
        self._raw += character
        if self._start and self._raw.endswith(self._start):
            before = self._raw[: -len(self._start)].rstrip()
            self._emit(before, deltas)
            self._raw, self._state, self._is_listed = self._raw[len(before) :], "open", False
            return
        keep = held_back(self._raw, self._start)
        free = self._raw[: len(self._raw) - keep]
        free = free.rstrip()  # space is kept until the next text is known
        self._emit(free, deltas)
        self._raw = self._raw[len(free) :]

    def _before(self, character: str, deltas: list[Delta]) -> None:
        """Read between a mark, or the beginning of the answer, and the object."""
        self._raw += character
        if character == "{":
            self._call, self._has_begun, self._state = CallScanner(_FIELDS), False, "call"
            self._call.push(character)
        elif character == "[" and not self._is_listed and (self._family.is_list or not self._start):
            self._is_listed = True
        elif not character.isspace() and not self._is_tag():
            self._give_up(deltas)

    def _is_tag(self) -> bool:
        """Return whether the text before a call without marks may be Llama's tag."""
        begun = self._raw.strip()
        if begun == PYTHON_TAG and not self._start:
            self._raw = ""
        return not self._start and PYTHON_TAG.startswith(begun)

    def _in_call(self, character: str, deltas: list[Delta]) -> None:
        self._raw += character
        call = self._call
        call.push(character)
        is_other = call.name is not None and call.name not in self._names
        if not self._has_begun and (call.stage is Stage.BROKEN or is_other):
            self._give_up(deltas)
            return
        if call.name is not None and not self._has_begun:
            deltas.append(CallBegin(self.count, call.name))
            self._has_begun, self.count = True, self.count + 1
        if self._has_begun:
            self._raw = ""
            arguments = call.take()
            if arguments:
                deltas.append(CallArguments(self.count - 1, arguments))
        if call.stage is not Stage.READING:
            self._has_begun, self._state = False, "after"

    def _behind(self, character: str, deltas: list[Delta]) -> None:
        """Read between an object and its end mark, or the next object."""
        self._raw += character
        begun = self._raw.strip()
        if self._end and self._end.startswith(begun):
            if begun == self._end:
                self._raw, self._state = "", "text"
        elif self._is_listed and begun in ("", ",", "]"):
            self._state = {"": "after", ",": "open", "]": "text"}[begun]
            self._raw = "" if begun else self._raw
        elif not self._start and begun in ("", ";", ","):
            self._raw = "" if begun else self._raw
        elif not self._start and begun == "{" and not self._is_listed:
            self._raw, self._state = self._raw[:-1], "open"
            self._before(character, deltas)
        else:
            self._give_up(deltas)

    def _give_up(self, deltas: list[Delta]) -> None:
        """Return what is held back as text, and continue in free text up to the next mark."""
        self._state, raw = "text", self._raw
        self._emit(raw, deltas)
        self._raw = ""

    def _emit(self, text: str, deltas: list[Delta]) -> None:
        if text:
            deltas.append(TextDelta(text))
