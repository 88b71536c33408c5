"""A thought before the answer, between <think> and </think>, told apart while the text comes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from outpace.models.text.tokenizer import Tokenizer
from outpace.tools.calls import TextDelta, held_back

OPEN, CLOSE = "<think>", "</think>"


class ThoughtDelta(NamedTuple):
    """A bit of reasoning."""

    text: str


def has_thoughts(tokenizer: Tokenizer) -> bool:
    """Whether the model writes thoughts between these marks: its template or its vocabulary names them."""
    return CLOSE in tokenizer.template_text or tokenizer.id_of(CLOSE) is not None


def begins_open(prompt: str) -> bool:
    """Whether a rendered prompt has begun the thought already."""
    return prompt.rstrip().endswith(OPEN)


def thought_tokens(spelled: Iterable[bytes], is_open: bool) -> int:
    """How many of an answer's first tokens, of these bytes each, belong to its thought, the marks included."""
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
    """Cuts a growing text into thoughts and text, character by character: how it is split does not matter."""

    def __init__(self, is_open: bool = False) -> None:
        """`is_open`: the text begins within a thought."""
        self._is_open, self._held = is_open, ""
        self._is_start = True  # no text was told since the beginning, or since the thought: space there is left out

    def push(self, text: str) -> list[ThoughtDelta | TextDelta]:
        """What is certain with this text."""
        told: list[ThoughtDelta | TextDelta] = []
        for character in text:
            self._step(character, told)
        return told

    def finish(self) -> list[ThoughtDelta | TextDelta]:
        """What was held back."""
        told: list[ThoughtDelta | TextDelta] = []
        rest, self._held = self._held, ""
        self._tell(rest, told)
        return told

    def _step(self, character: str, told: list[ThoughtDelta | TextDelta]) -> None:
        self._held += character
        mark = CLOSE if self._is_open else OPEN
        if self._held.endswith(mark) and (self._is_open or self._is_start):
            self._tell(self._held[: -len(mark)], told)
            self._held, self._is_open, self._is_start = "", not self._is_open, True
            return
        keep = held_back(self._held, mark) if self._is_open or self._is_start else 0
        before, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self._tell(before, told)

    def _tell(self, text: str, told: list[ThoughtDelta | TextDelta]) -> None:
        if self._is_start:
            text = text.lstrip()
        if not text:
            return
        self._is_start = False
        kind = ThoughtDelta if self._is_open else TextDelta
        if told and isinstance(told[-1], kind):
            told[-1] = kind(told[-1].text + text)
        else:
            told.append(kind(text))
