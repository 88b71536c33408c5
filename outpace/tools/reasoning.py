"""Separates a thought before the answer, between <think> and </think>, from the streamed text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from outpace.models.text.tokenizer import Tokenizer
from outpace.tools.calls import TextDelta, held_back

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
        deltas: list[ThoughtDelta | TextDelta] = []
        for character in text:
            self._step(character, deltas)
        return deltas

    def finish(self) -> list[ThoughtDelta | TextDelta]:
        """Return the rest at the end of the text."""
        deltas: list[ThoughtDelta | TextDelta] = []
        rest, self._held = self._held, ""
        self._emit(rest, deltas)
        return deltas

    def _step(self, character: str, deltas: list[ThoughtDelta | TextDelta]) -> None:
        self._held += character
        mark = CLOSE if self._is_open else OPEN
        if self._held.endswith(mark) and (self._is_open or self._is_start):
            self._emit(self._held[: -len(mark)], deltas)
            self._held, self._is_open, self._is_start = "", not self._is_open, True
            return
        keep = held_back(self._held, mark) if self._is_open or self._is_start else 0
        before, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self._emit(before, deltas)

    def _emit(self, text: str, deltas: list[ThoughtDelta | TextDelta]) -> None:
        if self._is_start:
            text = text.lstrip()
        if not text:
            return
        self._is_start = False
        kind = ThoughtDelta if self._is_open else TextDelta
        if deltas and isinstance(deltas[-1], kind):
            deltas[-1] = kind(deltas[-1].text + text)
        else:
            deltas.append(kind(text))
