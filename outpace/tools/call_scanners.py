"""Reads one tool call, character by character: a JSON object, or the tags of a function and its parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

from outpace.grammar.schema import ALL_TYPES, types_of
from outpace.grammar.structure import quoted
from outpace.models.text.text_stream import held_back

ARGUMENTS = ("arguments", "parameters")  # accepted names of the field with the arguments
FIELDS = ("name", "type", "id", *ARGUMENTS)  # allowed in a call without marks
SPACE = " \n\t\r"
TAG_STARTS = ("<function=", "<function name=", "<invoke name=")
MAX_TAG = 160  # characters of a tag
BEGIN_TAG = re.compile(r"""<(?:function|invoke)(?:=| name=)["']?([^"'>\s]+)["']?\s*>""")
_VALUE_TAG = re.compile(r"""<param(?:eter)?(?:=| name=)["']?([^"'<>\n]+?)["']?\s*>""")
_END_TAG = re.compile(r"</(?:function|invoke)>")
_VALUE_ENDS = ("\n</parameter>", "\n</param>", "</parameter>", "</param>")


class Stage(Enum):
    """The state of the scanner."""

    READING = "reading"
    DONE = "done"
    BROKEN = "broken"  # not a call


class CallScanner:
    """Reads the JSON object of a call, starting at its `{`, character by character.

    `name` is None until it is known; `take()` returns the new part of the arguments. While reading, only the fields at
    the top level, strings and brackets are checked; `is_whole` checks the arguments. Doubled braces, `{{"name": ...}}`,
    count once: the chat template of Qwen2.5-Coder has them by mistake, and the model copies them.
    """

    def __init__(self, name: str | None = None, is_strict: bool = False) -> None:
        """`name`: the call's name if the JSON object is its arguments. `is_strict`: refuse fields not in FIELDS."""
        self.stage = Stage.READING
        self.name = name
        self.has_arguments = False
        self.may_double = False  # whether a `}` that follows only doubles the last one
        self._is_strict = is_strict
        self._brackets: list[str] = []  # the closing brackets that must follow
        self._last = ""  # character outside of strings, without white space
        self._in_string = self._is_escaped = False
        self._wants = "key"  # at the top level: key, colon, value or comma
        self._field: str | None = None
        self._text = ""  # of the top level's key or value so far
        self._taken: list[str] = []  # arguments returned by `take`
        self._arguments = ""  # not taken yet
        self._is_bare = name is not None
        if self._is_bare:
            self._brackets, self._field, self._wants = ["}"], ARGUMENTS[0], "value"

    @property
    def is_whole(self) -> bool:
        """Whether the call is complete and its arguments, all of them taken, are a JSON object."""
        return self.stage is Stage.DONE and is_object("".join(self._taken))

    def take(self) -> str:
        """Return the arguments since the last call of `take`; an empty object for a call without arguments."""
        if self.stage is Stage.DONE and not self.has_arguments:
            self.has_arguments, self._arguments = True, "{}"
        text, self._arguments = self._arguments, ""
        self._taken.append(text)
        return text

    def push(self, character: str) -> None:
        if not self._in_string and character not in SPACE:
            last, self._last = self._last, character
            if (character == "{" and last == "{") or (character == "}" and self.may_double):
                self.may_double, self._last = False, ""
                self._brackets[-1] = "}}" if character == "{" else self._brackets[-1]
                return
            self.may_double = False
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
            case "comma", "}" if self.name is not None and (self.has_arguments or not self._is_strict):
                self.stage, self.may_double = Stage.DONE, self._brackets == ["}}"]
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
            closer = self._brackets.pop()
            self.may_double = closer == "}}"
            if closer[0] != character:
                self.stage = Stage.BROKEN
            elif len(self._brackets) == 1:
                self._end()

    def _add(self, character: str) -> None:
        """Append to the key or value. Arguments that are an object are passed on at once."""
        if self._wants == "value" and self._field in ARGUMENTS and (self._text or character)[0] == "{":
            self._text, self.has_arguments = "{", True
            self._arguments += character
        else:
            self._text += character

    def _end(self) -> None:
        """End a key or value at the top level."""
        text, self._text = self._text, ""
        if self._wants == "key":
            self._field, self._wants = _decoded(text), "colon"
            is_unknown = self._is_strict and not self.has_arguments and self._field not in FIELDS
            if self._field is None or is_unknown:
                self.stage = Stage.BROKEN
            return
        self._wants = "comma"
        if self._is_bare:
            self.stage = Stage.DONE
        elif self._field == "name":
            self.name = _decoded(text)
            if self.name is None:
                self.stage = Stage.BROKEN
        elif self._field in ARGUMENTS and text[0] == '"':  # the arguments are JSON encoded as a string
            self._arguments, self.has_arguments = _decoded(text) or "", True


def _decoded(text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def is_object(text: str) -> bool:
    """Return whether a text is a JSON object."""
    try:
        return isinstance(json.loads(text, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        return False


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


class TagScanner:
    """Reads a call in tags, after the tag of its function: its parameters in tags, or a JSON object.

    A value is text, or JSON if the parameter's schema allows other types than strings. Text is passed on immediately,
    JSON when it is complete. Malformed tags are ignored.
    """

    has_arguments, may_double = True, False

    def __init__(self, name: str, schema: Mapping[str, Any]) -> None:
        """`schema`: the JSON schema of the function's parameters."""
        self.stage = Stage.READING
        self.name = name
        self._schema = schema
        self._text = ""  # between tags, or of the value
        self._field: str | None = None  # the parameter whose value is being read
        self._types = ALL_TYPES  # the value's, by its schema
        self._has_passed = False  # a part of the value was passed on
        self._object: CallScanner | None = None  # reads a JSON object
        self._fields: list[str] = []  # read so far
        self._arguments = ""  # not taken yet

    @property
    def is_whole(self) -> bool:
        return self.stage is Stage.DONE and (self._object is None or self._object.is_whole)

    def take(self) -> str:
        text, self._arguments = self._arguments, ""
        return text

    def push(self, character: str) -> None:
        self._text += character
        if self._object is not None and self._object.stage is Stage.READING:
            self._in_object(character)
        elif self._field is not None:
            self._in_value(character)
        else:
            self._between()

    def _between(self) -> None:
        """Read what is between two values."""
        begun = self._text.strip()
        if not begun:
            return
        if begun == "}" and self._object is not None and self._object.may_double:
            self._text = ""
        elif begun == "{" and not self._fields and self._object is None:
            self._object = CallScanner(self.name)
            self._in_object("{")
        elif _END_TAG.fullmatch(begun):
            self._arguments += "" if self._object else "}" if self._fields else "{}"
            self.stage = Stage.DONE
        elif begun[0] == "<" and (found := _VALUE_TAG.fullmatch(begun)) and self._object is None:
            self._begin_value(found[1])
        elif begun[0] != "<" or len(begun) > MAX_TAG:
            self.stage = Stage.BROKEN
        elif begun[-1] == ">":
            self._text = ""

    def _in_object(self, character: str) -> None:
        assert self._object is not None
        self._object.push(character)
        self._arguments += self._object.take()
        self._text = ""
        if self._object.stage is Stage.BROKEN:
            self.stage = Stage.BROKEN

    @property
    def _is_text(self) -> bool:
        """Whether the value is a string even if it looks like other JSON."""
        return self._types == {"string"}

    def _begin_value(self, field: str) -> None:
        if field in self._fields:  # JSON objects have each field once
            self.stage = Stage.BROKEN
            return
        fields = self._schema.get("properties")
        self._types = types_of(fields.get(field, {}) if isinstance(fields, Mapping) else {}, self._schema)
        begin = ", " if self._fields else "{"
        self._arguments += f"{begin}{quoted(field)}: " + ('"' if self._is_text else "")
        self._fields.append(field)
        self._field, self._text = field, ""

    def _in_value(self, character: str) -> None:
        """Read a character of a value. One line break at each end is not part of the value."""
        end = next(filter(self._text.endswith, _VALUE_ENDS), None) if character == ">" else None
        if end is None and not self._is_text:
            return
        held = len(end) if end else max(held_back(self._text, mark) for mark in _VALUE_ENDS)
        free = self._text[: len(self._text) - held]
        self._text = self._text[len(free) :]
        if free and not self._has_passed:
            free, self._has_passed = free.removeprefix("\n"), True
        if end is None:
            self._arguments += quoted(free)[1:-1]
            return
        self._arguments += quoted(free)[1:] if self._is_text else _as_json(free, self._types)
        self._field, self._text, self._has_passed = None, "", False


def _as_json(text: str, types: frozenset[str]) -> str:
    """Convert a value that was written between tags to JSON; `types` are those that its schema allows."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text.lower() if text in ("True", "False") and "boolean" in types else quoted(text)
    may_be_text = types != ALL_TYPES and "string" in types
    return quoted(text) if may_be_text and value is not None else text.strip()
