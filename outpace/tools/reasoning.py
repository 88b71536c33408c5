"""Separates a thought before the answer, between <think> and </think>, from the streamed text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from outpace.models.text.tokenizer import Tokenizer
from outpace.tools.calls import TextDelta, held_back, merge_deltas

OPEN, CLOSE = "<think>", "</think>"


class ThoughtDelta(NamedTuple):
    """A piece of reasoning."""

    text: str


def has_thoughts(tokenizer: Tokenizer) -> bool:
    """Return whether the model writes thoughts: its template or its vocabulary contains the marks."""
    return CLOSE in tokenizer.template_text or tokenizer.id_of(CLOSE) is not None


def begins_open(prompt: str) -> bool:
    """Return whether a rendered prompt has already begun the thought."""
    return prompt.rstrip().endswith(OPEN)


def thought_tokens(spelled: Iterable[bytes], is_open: bool) -> int:
    """Count the first tokens of an answer, given as bytes, that belong to its thought, including the marks."""
    text, count = b"", 0
    for piece in spelled:
        text += piece
        begun = text.lstrip()[: len(OPEN)]
        if not is_open and not OPEN.encode().startswith(begun):
            return 0
        count += 1
        if CLOSE.encode() in text[-len(CLOSE) - len(piece) :]:
            return count
    return count if is_open or OPEN.encode() == text.lstrip()[: len(OPEN)] else 0


class ReasoningParser:
    """Splits a streamed text into thought and text, character by character."""

    def __init__(self, is_open: bool = False) -> None:
        """`is_open`: the text begins within a thought."""
        self._is_open, self._held = is_open, ""
        self._is_start = True  # at the beginning, or right after the thought: space there is dropped

    def push(self, text: str) -> list[ThoughtDelta | TextDelta]:
        """Return what is certain after this text."""
        return merge_deltas(delta for character in text for delta in self._step(character))

    def finish(self) -> list[ThoughtDelta | TextDelta]:
        """Return the rest at the end of the text."""
        rest, self._held = self._held, ""
        return self._emit(rest)

    def _step(self, character: str) -> list[ThoughtDelta | TextDelta]:
        self._held += character
        mark = CLOSE if self._is_open else OPEN
        if not (self._is_open or self._is_start):
            return self.finish()  # no mark can follow
        if self._held.endswith(mark):
            deltas = self._emit(self._held[: -len(mark)])
            self._held, self._is_open, self._is_start = "", not self._is_open, True
            return deltas
        free = len(self._held) - held_back(self._held, mark)
        before, self._held = self._held[:free], self._held[free:]
        return self._emit(before)

    def _emit(self, text: str) -> list[ThoughtDelta | TextDelta]:
        if self._is_start:
            text = text.lstrip()
        if not text:
            return []
        self._is_start = False
        return [ThoughtDelta(text) if self._is_open else TextDelta(text)]
