"""One call's JSON object, read character by character: its name, and its arguments as they come."""

from __future__ import annotations

import json
from enum import Enum


class Stage(Enum):
    """Where the scanner stands."""

    READING = "reading"
    DONE = "done"
    BROKEN = "broken"  # no such object


class CallScanner:
    """Reads from the object's `{` on. `name` is None until it is known; `take()` hands out what came of the arguments.

    Only what a call is made of is judged: fields at the top, strings, and brackets that match.
    """

    def __init__(self, arguments: tuple[str, ...]) -> None:
        """`arguments`: the names that the arguments' field may have."""
        self._fields = arguments
        self.stage = Stage.READING
        self.name: str | None = None
        self._brackets: list[str] = []
        self._string: str | None = None  # the string under way, from its quote on
        self._value = ""  # the top field's value so far
        self._field: str | None = None
        self._wants = "key"  # at the top: key, colon, value or comma
        self._arguments = ""  # not handed out yet
        self._has_arguments = False

    def take(self) -> str:
        """The arguments that came since the last time; of a call that has none, an empty object."""
        if self.stage is Stage.DONE and not self._has_arguments:
            self._has_arguments, self._arguments = True, "{}"
        text, self._arguments = self._arguments, ""
        return text

    def push(self, character: str) -> None:
        """One more character."""
        if self._string is not None:
            self._in_string(character)
        elif len(self._brackets) > 1:
            self._inside(character)
        elif not self._brackets:
            self._brackets.append("}")  # the object's own
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
        """A string at the top ended: a field's name, or its value."""
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
        """Within a value that has brackets."""
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
        """A character of the top field's value; an object of arguments is handed out as it comes."""
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
        elif self._field in self._fields and self._value[0] == '"':  # arguments that are the text of an object
            self._arguments, self._has_arguments = _decoded(self._value) or "", True


def _decoded(text: str) -> str | None:
    """A JSON string's text, None for anything else."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
