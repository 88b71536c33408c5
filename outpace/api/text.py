"""The text of one answer while it is written: pieces in order, cut at the first stop string."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outpace.api.params import SamplingParams
from outpace.api.prompts import ChatPrompt, Prompt, chat_prompt_of
from outpace.core.types import TokenLogprobs
from outpace.models.files.tokenizer_folder import THINK, Thought
from outpace.models.text.text_stream import TextStream, held_back
from outpace.models.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from outpace.tools.reasoning import ReasoningParser


@dataclass(frozen=True)
class Piece:
    """A piece of text as it is streamed. `is_draft`: it was drafted and accepted, not sampled by the target itself.
    `reasoning`: a piece of the thought before the answer, see `Result`.

    Text that may still become a stop string is held back, so a piece may have tokens and no text, or the reverse.
    """

    text: str
    tokens: tuple[int, ...]
    is_draft: bool
    logprobs: tuple[TokenLogprobs, ...] = ()
    reasoning: str = ""


class StopStrings:
    """Finds the first stop string in a growing text, and holds back exactly the characters that may begin one."""

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        """`include`: the stop string itself stays in the text."""
        self._stops, self._include = tuple(stops), include
        self._held = ""
        self.found: str | None = None

    @property
    def may_end(self) -> bool:
        return bool(self._stops)

    def push(self, text: str, may_end: bool = True) -> str:
        """Add text and return what is now certain to be shown. Unless `may_end`, no stop string ends in this text."""
        if not self._stops:
            return text
        if self.found is not None:
            return ""
        old, held = len(self._held), self._held + text
        if may_end:
            found = [(held.find(stop, max(old - len(stop) + 1, 0)), -len(stop), stop) for stop in self._stops]
            place, _, self.found = min((end for end in found if end[0] >= 0), default=(0, 0, None))
        if self.found is not None:
            self._held = ""
            return held[: place + len(self.found) * self._include]
        keep = max((held_back(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def finish(self) -> str:
        """Return the text that was held back and became no stop string."""
        held, self._held = self._held, ""
        return held


class TextAssembler:
    """Turns one request's tokens into pieces of text, and finds where a stop string ends the text.

    Without stop strings, tokens are decoded when the pieces are read, not between two target passes.
    """

    def __init__(
        self,
        text: TextStream,
        stops: StopStrings,
        hidden: Collection[int],
        min_tokens: int = 0,
        thoughts: ReasoningParser | None = None,
    ) -> None:
        """`hidden`: stop tokens, whose text is not part of the answer. A stop string ends the text if a token after the
        first `min_tokens` completes it. `thoughts` separates thoughts from the text."""
        self._text, self._stops, self._hidden, self._min_tokens = text, stops, hidden, min_tokens
        self._thoughts = thoughts
        self._written = 0
        self._undecoded: deque[tuple[Sequence[int], int]] = deque()  # rounds: their tokens, and how many were drafted
        self._pieces: deque[Piece] = deque()

    @property
    def has_news(self) -> bool:
        return bool(self._undecoded or self._pieces)

    @property
    def pieces(self) -> deque[Piece]:
        """The pieces that were not handed out yet; another thread may add rounds meanwhile."""
        while self._undecoded:
            self._decode(*self._undecoded.popleft())
        return self._pieces

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.found

    def watch(self, tokens: Sequence[int], drafted: int) -> int | None:
        """Take one round's tokens, the first `drafted` of them accepted drafts. Return how many of them belong to the
        text if a stop string ends it here, otherwise None."""
        if self._stops.may_end:
            return self._decode(tokens, drafted)
        self._undecoded.append((tokens, drafted))
        return None

    def finish(self) -> None:
        """End the text: add a piece for what was held back."""
        pieces = self.pieces
        rest = "" if self._stops.found is not None else self._push(self._text.finish()) + self._stops.finish()
        piece = self._piece(rest, (), False, is_last=True)
        if piece.text or piece.reasoning:
            pieces.append(piece)

    def _decode(self, tokens: Sequence[int], drafted: int) -> int | None:
        """Append a round's pieces; see `watch`."""
        read = 0
        for some, is_draft in ((tokens[:drafted], True), (tokens[drafted:], False)):
            if some and self._stops.found is None:
                text, count = self._text_of(some)
                self._pieces.append(self._piece(text, tuple(some[:count]), is_draft))
                read += count
        return None if self._stops.found is None else read

    def _piece(self, text: str, tokens: tuple[int, ...], is_draft: bool, is_last: bool = False) -> Piece:
        """Return a piece with its text, and separately the thought in it."""
        if self._thoughts is None:
            return Piece(text, tokens, is_draft)
        from outpace.tools.reasoning import ThoughtDelta

        deltas = [*self._thoughts.push(text), *(self._thoughts.finish() if is_last else ())]
        thought = "".join(delta.text for delta in deltas if isinstance(delta, ThoughtDelta))
        answer = "".join(delta.text for delta in deltas if not isinstance(delta, ThoughtDelta))
        return Piece(answer, tokens, is_draft, reasoning=thought)

    def _text_of(self, tokens: Sequence[int]) -> tuple[str, int]:
        """Return the text of these tokens, and how many of them belong to it: fewer if a stop string ends it."""
        if not self._stops.may_end:
            return self._text.push([token for token in tokens if token not in self._hidden]), len(tokens)
        texts = []
        for count, token in enumerate(tokens, 1):
            self._written += 1
            texts.append(self._push(self._text.push([token])) if token not in self._hidden else "")
            if self._stops.found is not None:
                return "".join(texts), count
        return "".join(texts), len(tokens)

    def _push(self, text: str) -> str:
        return self._stops.push(text, may_end=self._written > self._min_tokens)


def thought_before(
    prompt: Prompt | ChatPrompt, tokens: Sequence[int], params: SamplingParams, tokenizer: Tokenizer
) -> Thought:
    """Return whether the answer to a prompt begins within a thought; NONE also where thoughts stay in the text.

    They are separated in answers to conversations, unless special tokens are to be shown, or the caller has written a
    whole grammar, which may have its own rules for thoughts. `tokens`: those of the prompt.
    """
    conversation = chat_prompt_of(prompt)
    if conversation is None or not params.skip_special_tokens:
        return Thought.NONE
    from outpace.grammar.structure import Structure
    from outpace.models.text.template_form import text_of
    from outpace.tools.reasoning import thought_of

    if isinstance(params.structured_outputs, Structure):
        return Thought.NONE
    continued = text_of(conversation.messages[-1].get("content")) if conversation.continues else ""
    return thought_of(tokenizer, tokens, continued)


def echo_of(params: SamplingParams, prompt: Prompt | ChatPrompt, tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return what is shown before the answer: the prompt, if that was asked for."""
    if not params.echo:
        return ""
    return prompt if isinstance(prompt, str) else tokenizer.decode(tokens)


def assembler_of(params: SamplingParams, tokenizer: Tokenizer, thought: Thought = Thought.NONE) -> TextAssembler:
    """Return an assembler for an answer by these parameters. `thought`: whether the answer begins within a thought."""
    own_ends = frozenset() if params.ignore_eos else tokenizer.stop_ids
    hidden = own_ends.union(() if params.include_stop_str_in_output else params.stop_token_ids)
    stops = StopStrings(params.stop, params.include_stop_str_in_output)
    if thought is Thought.NONE:
        return TextAssembler(tokenizer.stream(params.skip_special_tokens), stops, hidden, params.min_tokens)
    # Marks that are special tokens must be in the text from which thoughts are taken, and no other special tokens.
    hidden |= tokenizer.special_ids - tokenizer.thought_ids
    from outpace.tools.reasoning import ReasoningParser

    parser = ReasoningParser(thought, tokenizer.thought_marks or THINK)
    return TextAssembler(tokenizer.stream(skip_special=False), stops, hidden, params.min_tokens, parser)
