"""Separates a thought before the answer from the streamed text, by the marks that the model writes around it."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from outpace.models.files.tokenizer_folder import THINK, Thought, ThoughtMarks
from outpace.models.text.text_stream import held_back
from outpace.models.text.tokenizer import Tokenizer
from outpace.tools.calls import TextDelta, merge_deltas

TAIL_TOKENS = 32  # at a prompt's end, in which its template may begin a thought


class ThoughtDelta(NamedTuple):
    """A piece of reasoning."""

    text: str


def thought_of(tokenizer: Tokenizer, prompt: Sequence[int], continued: str = "") -> Thought:
    """Return whether the answer to a rendered conversation begins within a thought; see `thought_after`."""
    marks, tail = tokenizer.thought_marks, tokenizer.decode(prompt[-TAIL_TOKENS:], skip_special=False)
    return thought_after(tail, marks is not None, continued, marks or THINK)


def thought_after(prompt: str, thinks: bool, continued: str = "", marks: ThoughtMarks = THINK) -> Thought:
    """Return whether the answer to a prompt begins within a thought.

    `prompt`: the text of the prompt, or its end. `thinks`: the model may write thoughts. `continued`: the text of the
    last message, if the answer continues it.
    """
    if continued.rfind(marks.start) > continued.rfind(marks.end):
        return Thought.CONTINUED
    if has_begun_text(continued, marks):
        return Thought.NONE
    text = prompt.rstrip()
    if text.endswith(marks.start):
        return Thought.BEGUN
    for begin in reversed(marks.begins):
        text = text.removesuffix(begin).rstrip()
    # Templates turn reasoning off by an empty thought, or by its end alone unless this ends all messages.
    is_empty = text.removesuffix(marks.end).rstrip().endswith(marks.start)
    is_closed = text.endswith(marks.end) and (is_empty or marks.end not in marks.ends)
    return Thought.OPTIONAL if thinks and not is_closed else Thought.NONE


def has_begun_text(continued: str, marks: ThoughtMarks = THINK) -> bool:
    """Return whether a message to be continued has any text outside of thoughts."""
    text = continued.rpartition(marks.end)[2]
    return bool(text.strip()) and marks.start not in text


def thought_tokens(spelled: Iterable[bytes], is_open: bool, marks: ThoughtMarks = THINK) -> int:
    """Count the first tokens of an answer, given as bytes, that belong to its thoughts, including the marks."""
    parser = ReasoningParser(Thought.BEGUN if is_open else Thought.OPTIONAL, marks)
    utf8, count = codecs.getincrementaldecoder("utf-8")("replace"), 0
    for number, piece in enumerate(spelled, 1):
        was_open = parser.is_open
        deltas = parser.push(utf8.decode(piece))
        if was_open or parser.is_open or any(isinstance(delta, ThoughtDelta) for delta in deltas):
            count = number
        elif parser.is_over:
            break
    return count


class ReasoningParser:
    """Splits a streamed text into thought and text, character by character."""

    def __init__(self, thought: Thought = Thought.OPTIONAL, marks: ThoughtMarks = THINK) -> None:
        """`thought`: whether the text begins within a thought."""
        self._marks, self._held = marks, ""
        self.is_open = thought.is_open  # within a thought
        self._is_between = not self.is_open  # before a thought or a part of the answer
        self._ends: tuple[str, ...] = ()  # marks that may end this part of the answer
        # At the beginning, or right after the thought: white space there is dropped.
        self._is_start = thought is not Thought.CONTINUED
        self._written: set[type] = set()  # kinds of pieces so far

    @property
    def is_over(self) -> bool:
        """Whether the rest of the text belongs to the answer, without marks."""
        return not (self.is_open or self._is_between or self._ends)

    def push(self, text: str) -> list[ThoughtDelta | TextDelta]:
        deltas: list[ThoughtDelta | TextDelta] = []
        for place, character in enumerate(text):
            if self.is_over and not self._held:
                deltas.append(TextDelta(text[place:]))
                break
            deltas += self._step(character)
        return merge_deltas(deltas)

    def finish(self) -> list[ThoughtDelta | TextDelta]:
        rest, self._held = self._held, ""
        is_cut = self._is_between and rest.lstrip().startswith(self._marks.heads or ("\0",))
        return [] if is_cut else self._emit(rest)

    def _step(self, character: str) -> list[ThoughtDelta | TextDelta]:
        self._held += character
        begun = self._held.lstrip()
        if self._is_between and self._may_begin(begun):
            return []
        if self.is_open and self._is_start and self._marks.start.startswith(begun):
            self._held = "" if begun == self._marks.start else self._held  # some models repeat the mark of the prompt
            return []
        ends = (self._marks.end,) if self.is_open else self._ends
        if mark := next(filter(self._held.endswith, ends), None):
            deltas = self._emit(self._held[: -len(mark)])
            self._held, self.is_open, self._is_between, self._is_start, self._ends = "", False, True, True, ()
            return deltas
        free = len(self._held) - max((held_back(self._held, mark) for mark in ends), default=0)
        before, self._held = self._held[:free], self._held[free:]
        return self._emit(before)

    def _may_begin(self, begun: str) -> bool:
        """Read the beginning of a thought or of the answer; return False if the answer's text has begun."""
        marks = self._marks
        if begun == marks.start:
            self._held, self.is_open, self._is_between = "", True, False
        elif begun in marks.begins:
            self._held, self._ends = "", marks.ends
        else:
            self._is_between = any(mark.startswith(begun) for mark in (marks.start, *marks.begins))
            return self._is_between
        return True

    def _emit(self, text: str) -> list[ThoughtDelta | TextDelta]:
        if self._is_start:
            text = text.lstrip()
        if not text:
            return []
        kind = ThoughtDelta if self.is_open else TextDelta
        if self._is_start and kind in self._written:  # another thought, or another part of the answer
            text = f"\n{text}"
        self._is_start = False
        self._written.add(kind)
        return [kind(text)]
