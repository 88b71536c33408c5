"""The text of one answer while it is written: pieces in order, cut at the first stop string."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from outpace.core.types import TokenLogprobs
from outpace.models.text.text_stream import TextStream


@dataclass(frozen=True)
class Piece:
    """A bit of text as it comes. `is_draft`: it was drafted and accepted, not written by the target itself.

    Text that may still become a stop string is held back, so a piece may have tokens and no text, or the reverse.
    """

    text: str
    tokens: tuple[int, ...]
    is_draft: bool
    logprobs: tuple[TokenLogprobs, ...] = ()


class StopStrings:
    """Finds the first stop string in a growing text; holds back what may become one, and not a character more."""

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        """`include`: the stop string itself stays in the text."""
        self._stops, self._include = tuple(stops), include
        self._held = ""
        self.found: str | None = None

    @property
    def may_end(self) -> bool:
        """Whether there is any."""
        return bool(self._stops)

    def push(self, text: str, may_end: bool = True) -> str:
        """What is certain to be written once `text` has come; unless it `may_end`, what it completes is no end."""
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
        keep = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def finish(self) -> str:
        """What was held back and became no stop string."""
        held, self._held = self._held, ""
        return held


class TextAssembler:
    """Turns one request's tokens into pieces of text, and tells the engine where a stop string ends the text.

    Without stop strings a round's tokens become text when the pieces are asked for, not between two passes.
    """

    def __init__(self, text: TextStream, stops: StopStrings, hidden: Collection[int], min_tokens: int = 0) -> None:
        """`hidden`: stop tokens, whose text is not part of the answer. A stop string ends the text where a token after
        the first `min_tokens` completes it."""
        self._text, self._stops, self._hidden, self._min_tokens = text, stops, hidden, min_tokens
        self._written = 0
        self._unsaid: deque[tuple[Sequence[int], int]] = deque()  # rounds whose text was not asked for yet
        self._pieces: deque[Piece] = deque()

    @property
    def has_news(self) -> bool:
        """Whether there are pieces to hand out."""
        return bool(self._unsaid or self._pieces)

    @property
    def pieces(self) -> deque[Piece]:
        """Those that were not handed out yet, for whoever does so, while another thread may add rounds."""
        while self._unsaid:
            self._say(*self._unsaid.popleft())
        return self._pieces

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.found

    def watch(self, tokens: Sequence[int], drafted: int) -> int | None:
        """A round's tokens, the first `drafted` of them accepted drafts; after how many of them the text ends."""
        if self._stops.may_end:
            return self._say(tokens, drafted)
        self._unsaid.append((tokens, drafted))
        return None

    def _say(self, tokens: Sequence[int], drafted: int) -> int | None:
        """Adds a round's pieces; after how many of its tokens the text ends."""
        count = len(tokens)
        texts = []
        for number, token in enumerate(tokens):
            self._written += 1
            texts.append(self._shown(self._text.push([token])) if token not in self._hidden else "")
            if self._stops.found is not None:
                count = number + 1
                break
        for some, is_draft in ((range(min(drafted, count)), True), (range(drafted, count), False)):
            if some:
                text = "".join(texts[some.start : some.stop])
                self._pieces.append(Piece(text, tuple(tokens[some.start : some.stop]), is_draft))
        return None if self._stops.found is None else count

    def finish(self) -> None:
        """The text is over: hands out what was held back."""
        pieces = self.pieces
        rest = "" if self._stops.found is not None else self._shown(self._text.finish()) + self._stops.finish()
        if rest:
            pieces.append(Piece(rest, (), False))

    def _shown(self, text: str) -> str:
        return self._stops.push(text, may_end=self._written > self._min_tokens)


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` with which `stop` begins."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
