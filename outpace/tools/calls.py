"""Finds tool calls in a streamed answer. The results do not depend on how the text is split."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from outpace.tools.call_scanners import BEGIN_TAG, MAX_TAG, TAG_STARTS, CallScanner, Stage, TagScanner
from outpace.tools.definitions import HARMONY, MISTRAL, CallFormat, Tool

FENCES = ("```", "~~~")  # a Markdown fence begins with at least three of these
MAX_FENCE = 80  # characters of the line that begins a fence
MAX_DEPTH = 4  # marks before one call
MAX_SPACE = 256  # characters of white space that are held back
_FENCE_LINE = re.compile(r"(`{3,}(?=[^`]*$)|~{3,})([^\n]*)")
_LANGUAGE = re.compile(r"[\w.+#-]+[ \t]*")  # it must follow a fence that does not begin a line
_NAMED = (MISTRAL.start, *HARMONY.frames)  # marks after which a call's name may be written
_LIST = re.compile(r"\[\s*\{?")
# The name of a call before its arguments: Mistral's, and that of gpt-oss.
_NAME_MARK = re.compile(
    r"([\w./-]+)(?:(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?|(?:<\|channel\|>\w+)?\s*(?:<\|constrain\|>)?\w*<\|message\|>)\s*\{"
)
_NAME_BEGUN = re.compile(r"[\w./-]+(?:(?:\[[A-Z_]*\]?\w*){0,2}|(?:\s*<?\|?\w*\|?>?\w*){0,3})\s*")


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

    The parser is in one of four states: in free text, before a call, in a call, or after a call. Each has a method that
    reads the next character, and `_read` is the current one. Text that may still become a call is kept in `_raw`, and
    returned as text if it does not. A call must have the name of an offered tool; without marks around it, it must also
    have arguments, and no unknown fields before them. Calls in a Markdown fence are kept until the next text is known:
    if there is any besides other calls, they are an example.
    """

    def __init__(self, family: CallFormat, tools: Sequence[Tool]) -> None:
        self._family, self._frames, self._tools = family, family.frames, {tool.name: tool for tool in tools}
        self._read: Callable[[str], None] = self._in_text
        self._raw = ""
        self._part = 0  # index in `_raw` after the last mark
        self._retry = 0  # index in `_raw` up to which it is free text if no call follows
        self._closers: list[str] = []  # closing marks that are expected, the innermost last
        self._has_mark = False  # a mark other than a fence or the bracket of a list was read
        self._is_line_start = True
        self._fence = ""  # the mark of the Markdown fence in which the text is
        self._call: CallScanner | TagScanner = CallScanner()
        self._has_begun = False  # CallBegin was returned for the current call
        self._deltas: list[Delta] = []  # not returned yet
        self._fenced: list[Delta] | None = None  # calls that may be an example
        self._example = ""  # their text
        self._counts = (0, 0)  # of calls before them
        self.count = 0  # calls begun
        self.num_whole = 0  # calls that are complete

    def push(self, text: str) -> list[Delta]:
        """Return what is certain after this text."""
        for character in text:
            self._raw += character
            self._read(character)
        deltas, self._deltas = merge_deltas(self._deltas), []
        return deltas

    def finish(self) -> list[Delta]:
        """Return the rest at the end of the text. Space and marks next to calls are not part of the answer's text."""
        rest = self._raw
        is_mark = self.count > 0 and (not rest.strip() or self._is_closing(rest.strip()))
        if rest and not is_mark and not self._has_begun:
            self._emit(rest)
        self._take_fenced()
        deltas, self._deltas, self._raw = merge_deltas(self._deltas), [], ""
        return deltas

    def _in_text(self, character: str) -> None:
        begun = self._raw.lstrip()
        if not begun:  # space is kept until the next text is known
            if len(self._raw) > MAX_SPACE:
                self._emit(self._raw)
            return
        space = self._raw[: -len(begun)]
        if self._fence.startswith(begun) and self._starts_line(space):
            if begun == self._fence:
                self._fence = ""
                self._emit(self._raw)
        elif not self._open(begun, space):
            self._emit(space + begun[0])
            self._reread()

    def _starts_line(self, space: str) -> bool:
        return self._is_line_start or "\n" in space

    def _open(self, begun: str, space: str) -> bool:
        """Read the beginning of a mark or call; return False if `begun` cannot be one. `space` precedes it."""
        is_first, takes_unmarked = self._read == self._in_text, self._family.takes_unmarked
        may_be_bare = takes_unmarked and not self._fence and self._starts_line(space)
        may_be_bare = may_be_bare if is_first else takes_unmarked or self._has_mark
        is_named = not is_first and any(start in self._raw for start in _NAMED)
        if begun == "{" and may_be_bare:
            self._begin_call(CallScanner(is_strict=not self._has_mark))
        elif begun in self._frames:
            self._has_mark = True
            self._after_mark(self._frames[begun])
        elif any(mark.startswith(begun) for mark in self._frames):
            return True
        elif _LIST.fullmatch(begun) and may_be_bare and "]" not in self._closers:
            if begun[-1] == "{":
                self._closers.append("]")
                self._begin_call(CallScanner(is_strict=not self._has_mark))
        elif begun[0] in "`~":
            return not self._fence and self._open_fence(begun, self._starts_line(space))
        elif begun[0] == "<" and self._family.takes_tags:
            return self._open_tag(begun)
        elif is_named and (named := _NAME_MARK.fullmatch(begun)):
            self._begin_call(CallScanner(named[1]))
        else:
            return is_named and bool(_NAME_BEGUN.fullmatch(begun))
        return True

    def _open_fence(self, begun: str, is_line_start: bool) -> bool:
        """Read the first line of a Markdown fence; return False if the text cannot be one with calls."""
        line = _FENCE_LINE.fullmatch(begun.removesuffix("\n"))
        if line is None or not (is_line_start or _LANGUAGE.fullmatch(line[2])):
            return any(fence.startswith(begun) for fence in FENCES) or bool(line and begun == line[1])
        if begun[-1] != "\n" and len(begun) < MAX_FENCE:
            return True
        if begun[-1] == "\n":
            self._after_mark(line[1])
            return True
        self._fence = line[1]
        return False

    def _open_tag(self, begun: str) -> bool:
        """Read the tag of a function; return False if the text cannot be one."""
        found = BEGIN_TAG.fullmatch(begun)
        if found and found[1] in self._tools:
            self._has_mark = True
            self._begin_call(TagScanner(found[1], self._tools[found[1]].parameters))
            return True
        return len(begun) < MAX_TAG and not found and any(start.startswith(begun[: len(start)]) for start in TAG_STARTS)

    def _after_mark(self, closer: str) -> None:
        """Expect a call after an opening mark, to which `closer` belongs."""
        if self._read != self._before_call:
            self._retry = len(self._raw)
        self._closers += [closer] if closer else []
        self._part, self._read = len(self._raw), self._before_call

    def _before_call(self, character: str) -> None:
        """Read what is between a mark and a call."""
        begun = self._raw[self._part :].lstrip()
        is_long = len(self._closers) > MAX_DEPTH or len(self._raw) - self._part > MAX_SPACE
        if is_long or (begun and not self._open(begun, "\n")):
            self._give_up(self._retry)

    def _begin_call(self, call: CallScanner | TagScanner) -> None:
        self._call, self._has_begun, self._read = call, False, self._in_call
        self._in_call("{" if isinstance(call, CallScanner) else "")

    def _in_call(self, character: str) -> None:
        call = self._call
        call.push(character)
        is_other = call.name is not None and call.name not in self._tools
        if not self._has_begun and (call.stage is Stage.BROKEN or is_other):
            self._give_up(len(self._raw) - 1)
            return
        is_certain = call.has_arguments or call.stage is Stage.DONE or self._has_mark
        if call.name is not None and is_certain and not self._has_begun:
            if not self._fence and not _is_fence("".join(self._closers[:1])):
                self._take_fenced()
            elif self._fenced is None:
                self._fenced, self._example, self._counts = [], "", (self.count, self.num_whole)
            self._add(CallBegin(self.count, call.name))
            self._has_begun, self.count = True, self.count + 1
        if self._has_begun:
            self._pass()
            if arguments := call.take():
                self._add(CallArguments(self.count - 1, arguments))
        if call.stage is not Stage.READING:
            self.num_whole += call.is_whole
            self._has_begun, self._part, self._read = False, 0, self._after_call

    def _after_call(self, character: str) -> None:
        """Read what follows a call: closing marks, or the next call."""
        begun = self._raw.strip()
        if not begun:
            return
        if begun == "}" and self._call.may_double:
            self._pass()
            return
        is_next = begun[0] in "{<" and bool(self._closers or self._family.takes_unmarked) and "]" not in self._closers
        if begun in self._closers:
            while self._closers.pop() != begun:
                pass
            self._pass()
            if not self._closers:
                self._read, self._has_mark, self._is_line_start = self._in_text, False, True
        elif self._is_closing(begun):
            return
        elif begun in (",", ";") and ("]" in self._closers or not self._closers):
            self._part, self._retry, self._read = len(self._raw), 0, self._before_call
        elif not (is_next and self._open(begun, "")):
            self._give_up(0)

    def _is_closing(self, text: str) -> bool:
        """Return whether a text is the beginning of an expected closing mark."""
        return any(closer.startswith(text) for closer in self._closers)

    def _give_up(self, length: int) -> None:
        """Return the first `length` held-back characters as text, and read the others again as free text."""
        self._fence = self._fence or next(filter(_is_fence, self._closers), "")
        self._read, self._closers, self._has_mark = self._in_text, [], False
        self._emit(self._raw[:length])
        self._reread()

    def _reread(self) -> None:
        rest, self._raw = self._raw, ""
        for character in rest:
            self._raw += character
            self._read(character)

    def _pass(self) -> None:
        """Drop `_raw`, the text of a call, but keep it if it may be an example."""
        self._example += self._raw if self._fenced is not None else ""
        self._raw = ""

    def _add(self, delta: Delta) -> None:
        (self._deltas if self._fenced is None else self._fenced).append(delta)

    def _take_fenced(self) -> None:
        """Return what was fenced as calls."""
        fenced, self._fenced = self._fenced or [], None
        self._deltas += fenced

    def _emit(self, text: str) -> None:
        """Return `text`, the beginning of `_raw`, as free text. What was fenced before is an example then."""
        self._raw = self._raw[len(text) :]
        if not text:
            return
        last = text.rpartition("\n")[2]
        self._is_line_start = not last.strip() and (self._is_line_start or "\n" in text)
        if self._fenced is not None:
            self._example += text
            if not text.strip():
                return
            text, self._fenced = self._example, None
            self.count, self.num_whole = self._counts
        self._deltas.append(TextDelta(text))


def _is_fence(closer: str) -> bool:
    return closer.startswith(FENCES)
