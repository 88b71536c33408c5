"""Tool calls in an answer's text, found while it comes: every split of the text gives the same deltas."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.tools.call_scanner import CallScanner, Stage
from outpace.tools.families import PYTHON_TAG, Family
from outpace.tools.offered import Tool
from outpace.tools.pieces import CallArguments, CallBegin, Delta, Text, held, merged

_FIELDS = ("arguments", "parameters")


class CallParser:
    """Reads character by character, so that nothing depends on where the text is split.

    It stands in free text, before a call's object (`open`), in it (`call`) or behind it (`after`). What may still turn
    out to be no call is kept in `_raw`, and told as text if so. A call is one only with the name of an offered tool.
    """

    def __init__(self, family: Family, tools: Sequence[Tool]) -> None:
        self._family, self._names = family, {tool.name for tool in tools}
        self._start, self._end = family.start.strip(), family.end.strip()
        self._state = "text" if self._start else "open"
        self._raw = ""
        self._is_listed = False
        self._call = CallScanner(_FIELDS)
        self._is_told = False  # the call under way
        self.count = 0  # calls begun

    def push(self, text: str) -> list[Delta]:
        """What is certain with this text."""
        told: list[Delta] = []
        for character in text:
            self._step(character, told)
        return merged(told)

    def finish(self) -> list[Delta]:
        """What was held back, at the end of the text. Space beside calls is none of the answer's."""
        rest, self._raw = self._raw, ""
        is_space = not rest.strip() and self.count > 0
        return [Text(rest)] if rest and not is_space and not self._is_told else []

    def _step(self, character: str, told: list[Delta]) -> None:
        {"text": self._in_text, "open": self._before, "call": self._in_call, "after": self._behind}[self._state](
            character, told
        )

    def _in_text(self, character: str, told: list[Delta]) -> None:
        self._raw += character
        if self._start and self._raw.endswith(self._start):
            before = self._raw[: -len(self._start)].rstrip()
            self._tell(before, told)
            self._raw, self._state, self._is_listed = self._raw[len(before) :], "open", False
            return
        keep = held(self._raw, self._start)
        free = self._raw[: len(self._raw) - keep]
        free = free.rstrip()  # space is kept until it is known what follows it
        self._tell(free, told)
        self._raw = self._raw[len(free) :]

    def _before(self, character: str, told: list[Delta]) -> None:
        """Between a mark, or the answer's beginning, and the object."""
        self._raw += character
        if character == "{":
            self._call, self._is_told, self._state = CallScanner(_FIELDS), False, "call"
            self._call.push(character)
        elif character == "[" and not self._is_listed and (self._family.is_list or not self._start):
            self._is_listed = True
        elif not character.isspace() and not self._is_tag():
            self._give_up(told)

    def _is_tag(self) -> bool:
        """Whether what stands before a call without marks may be Llama's tag."""
        begun = self._raw.strip()
        if begun == PYTHON_TAG and not self._start:
            self._raw = ""
        return not self._start and PYTHON_TAG.startswith(begun)

    def _in_call(self, character: str, told: list[Delta]) -> None:
        self._raw += character
        call = self._call
        call.push(character)
        is_other = call.name is not None and call.name not in self._names
        if not self._is_told and (call.stage is Stage.BROKEN or is_other):
            self._give_up(told)
            return
        if call.name is not None and not self._is_told:
            told.append(CallBegin(self.count, call.name))
            self._is_told, self.count = True, self.count + 1
        if self._is_told:
            self._raw = ""
            arguments = call.take()
            if arguments:
                told.append(CallArguments(self.count - 1, arguments))
        if call.stage is not Stage.READING:
            self._is_told, self._state = False, "after"

    def _behind(self, character: str, told: list[Delta]) -> None:
        """Between an object and the mark that ends it, or the next object."""
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
            self._before(character, told)
        else:
            self._give_up(told)

    def _give_up(self, told: list[Delta]) -> None:
        """What is held is no call: it is text, and so is what follows, up to the next mark."""
        self._state, raw = "text", self._raw
        self._tell(raw, told)
        self._raw = ""

    def _tell(self, text: str, told: list[Delta]) -> None:
        if text:
            told.append(Text(text))
