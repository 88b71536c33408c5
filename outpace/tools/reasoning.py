"""Separates a thought before the answer, between <think> and </think>, from the streamed text."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from outpace.models.files.special_tokens import THOUGHT_BEGIN as OPEN
from outpace.models.files.special_tokens import THOUGHT_END as CLOSE
from outpace.models.text.tokenizer import Tokenizer
from outpace.tools.call_scanners import held_back
from outpace.tools.calls import TextDelta, merge_deltas


class Thought(Enum):
    """Whether an answer begins within a thought."""

    NONE = "none"  # no, and it will have none
    OPTIONAL = "optional"  # no, but the model may begin one
    BEGUN = "begun"  # the chat template has begun one
    CONTINUED = "continued"  # the last message, which the answer continues, has begun one

    @property
    def is_open(self) -> bool:
        return self in (Thought.BEGUN, Thought.CONTINUED)


class ThoughtDelta(NamedTuple):
    """A piece of reasoning."""

    text: str


def has_thoughts(tokenizer: Tokenizer) -> bool:
    """Return whether the model may write thoughts, which its chat template shows.

    Tokens for the marks do not show it: models that do not think share vocabularies with models that do.
    """
    return CLOSE in tokenizer.template_text


def hides_thoughts(tokenizer: Tokenizer) -> bool:
    """Return whether the marks are special tokens, which decoded text omits by default."""
    return not tokenizer.special_ids.isdisjoint({tokenizer.id_of(OPEN), tokenizer.id_of(CLOSE)})


def thought_after(prompt: str, thinks: bool, continued: str = "") -> Thought:
    """Return whether the answer to a prompt begins within a thought.

    `prompt`: the text of the prompt, or its end. `thinks`: the model may write thoughts. `continued`: the text of the
    last message, if the answer continues it.
    """
    if continued.rfind(OPEN) > continued.rfind(CLOSE):
        return Thought.CONTINUED
    if has_begun_text(continued):
        return Thought.NONE
    if prompt.rstrip().endswith(OPEN):
        return Thought.BEGUN
    is_closed = prompt.rstrip().endswith(CLOSE)  # templates turn reasoning off by an empty thought
    return Thought.OPTIONAL if thinks and not is_closed else Thought.NONE


def has_begun_text(continued: str) -> bool:
    """Return whether a message to be continued has any text outside of thoughts."""
    text = continued.rpartition(CLOSE)[2]
    return bool(text.strip()) and OPEN not in text


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

    def __init__(self, thought: Thought = Thought.OPTIONAL) -> None:
        """`thought`: whether the text begins within a thought."""
        self._is_open, self._held = thought.is_open, ""
        # At the beginning, or right after the thought: white space there is dropped.
        self._is_start = thought is not Thought.CONTINUED

    def push(self, text: str) -> list[ThoughtDelta | TextDelta]:
        return merge_deltas(delta for character in text for delta in self._step(character))

    def finish(self) -> list[ThoughtDelta | TextDelta]:
        rest, self._held = self._held, ""
        return self._emit(rest)

    def _step(self, character: str) -> list[ThoughtDelta | TextDelta]:
        self._held += character
        if self._is_open and self._is_start and OPEN.startswith(begun := self._held.lstrip()):
            self._held = "" if begun == OPEN else self._held  # some models repeat the mark of the prompt
            return []
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
