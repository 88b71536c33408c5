"""Text from ids by a `decode` of unknown kind: the last few tokens are decoded with each new one, not all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outpace.models.text.text_stream import DAMAGED, TextStream

KEPT = 16  # tokens that stay in the window when its older ones leave
LONGEST = 48  # tokens at which they leave


class WindowText(TextStream):
    """Returns what more text the window has with each new token, U+FFFD at its end held back.

    Older tokens leave the window only where the others decode to the same text without them. Where they never do, all
    tokens are decoded each time. What `decode` says of all ids at the end decides what the last piece is.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._start = 0  # of the window, which ends with the last id
        self._shown = ""  # what was returned of the window's text
        self._pieces: list[str] = []
        self._longest = LONGEST
        self._last_piece = 0  # how many ids there were when text was returned last
        self._next_look = 0  # how many there must be before they are decoded again

    def push(self, ids: Sequence[int]) -> str:
        """The text that became certain with these ids, often empty."""
        self._ids += ids
        if len(self._ids) < self._next_look:
            return ""
        text = self._decode(self._ids[self._start :])
        new = self._since(text.rstrip(DAMAGED))
        if not new:  # a long stretch without text is decoded ever more seldom
            self._next_look = len(self._ids) + 1 + (len(self._ids) - self._last_piece) // LONGEST
            return ""
        self._last_piece = len(self._ids)
        if len(self._ids) - self._start >= self._longest:
            self._slide(text)
        return new

    def finish(self) -> str:
        """What was held back. Call it once, last."""
        whole, sent = self._decode(self._ids), "".join(self._pieces)
        return whole[len(sent) :] if whole.startswith(sent) else self._since(self._decode(self._ids[self._start :]))

    def _since(self, text: str) -> str:
        if not text.startswith(self._shown):
            return ""
        new, self._shown = text[len(self._shown) :], text
        self._pieces.append(new)
        return new

    def _slide(self, text: str) -> None:
        """Leaves all but about KEPT tokens of the window, whose text is given, or doubles the length it may have."""
        last = len(self._ids) - KEPT
        for start in range(last, last - KEPT, -1):  # a start within a word or a character may show
            kept = self._decode(self._ids[start:])
            if kept.strip() and text.endswith(kept):  # a decoder may strip what an empty text begins with
                self._start, self._shown = start, kept.rstrip(DAMAGED)
                return
        self._longest = 2 * (len(self._ids) - self._start)
