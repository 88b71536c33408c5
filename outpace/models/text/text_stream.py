"""Streaming detokenization: token ids in, text out, without split characters or revisions of returned text.

The concatenated pieces equal the tokenizer's own `decode` of all ids, including for invalid UTF-8.
"""

from __future__ import annotations

import codecs
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from outpace.core.errors import UserError

if TYPE_CHECKING:
    import tokenizers


REPLACEMENT = "\ufffd"
_CACHED_NAMES = 1 << 16  # token strings cached
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TextStream(ABC):
    """Decodes one text incrementally; the work per token does not grow with the text's length."""

    @abstractmethod
    def push(self, ids: Sequence[int]) -> str:
        """Return the text that these ids complete, often empty."""

    @abstractmethod
    def finish(self) -> str:
        """Return the text held back, with U+FFFD for incomplete characters. Call it once, at the end."""


Tokens = Callable[[Iterable[int]], list[str]]
"""Maps ids to tokens' strings, without hidden ones."""


class TokenStream(TextStream):
    """Decodes token by token."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def bytes_of(self, index: int) -> bytes:
        """Return what an id adds to a text, in UTF-8; decoding may strip a space from the first id of a text."""
        return b"".join(self._bytes(token) for token in self._tokens([index]))

    @abstractmethod
    def _bytes(self, token: str) -> bytes: ...


class ByteLevelStream(TokenStream):
    """Byte-level BPE: a token is a string of bytes. At most three bytes are held back."""

    def __init__(self, tokens: Tokens, byte_of: dict[str, int]) -> None:
        super().__init__(tokens)
        self._byte_of = byte_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def finish(self) -> str:
        return self._utf8.decode(b"", True)

    def push(self, ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join([self._bytes(token) for token in self._tokens(ids)]))

    def _bytes(self, token: str) -> bytes:
        found = [self._byte_of.get(character, -1) for character in token]
        return token.encode() if -1 in found else bytes(found)


class SentencePieceStream(TokenStream):
    """SentencePiece BPE: a token is text, or one byte named <0x00> to <0xFF>.

    A run of byte tokens is held back until it ends: one invalid byte makes `decode` show every byte as U+FFFD.
    """

    def __init__(self, tokens: Tokens, replacements: Sequence[tuple[str, str]], strip: tuple[str, int]) -> None:
        super().__init__(tokens)
        self._replacements = replacements
        self._stripped, self._strip_left = strip
        self._run = bytearray()

    def push(self, ids: Sequence[int]) -> str:
        return "".join([self._push_token(token) for token in self._tokens(ids)])

    def finish(self) -> str:
        return self._without_start(self._ended_run())

    def _push_token(self, token: str) -> str:
        text = self._replaced(token)
        if byte := BYTE_TOKEN.fullmatch(text):
            self._run.append(int(byte[1], 16))
            return ""
        return self._without_start(self._ended_run() + text)

    def _bytes(self, token: str) -> bytes:
        text = self._replaced(token)
        byte = BYTE_TOKEN.fullmatch(text)
        return bytes([int(byte[1], 16)]) if byte else text.encode()

    def _replaced(self, token: str) -> str:
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token

    def _ended_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _without_start(self, text: str) -> str:
        """Remove the space that encoding put before the text's first character."""
        while self._strip_left and text:
            if text[0] != self._stripped:
                self._strip_left = 0
            else:
                text, self._strip_left = text[1:], self._strip_left - 1
        return text


def stream_factory(tokenizer: tokenizers.Tokenizer) -> Callable[[bool], TokenStream]:
    """Return a function `skip_special -> TextStream` for this tokenizer; UserError if its decoder is not supported."""
    decoder = {} if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder] if decoder else []
    kinds = " ".join(str(step.get("type")) for step in steps)
    special = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    name_of = lru_cache(_CACHED_NAMES)(tokenizer.id_to_token)

    def tokens(skip_special: bool, ids: Iterable[int]) -> list[str]:
        found = [name_of(index) for index in ids if not (skip_special and index in special)]
        return [token for token in found if token is not None]

    if kinds == "ByteLevel":
        byte_of = byte_alphabet()
        return lambda skip_special: ByteLevelStream(partial(tokens, skip_special), byte_of)
    if not re.fullmatch("(Replace )*ByteFallback Fuse( Strip)?", kinds):
        raise UserError(f"the tokenizer's decoder {kinds or None!r} is not supported")
    replacements, strip = [], ("", 0)
    for step in steps:
        if step["type"] == "Replace":
            if "String" not in step["pattern"]:
                pattern = f"the tokenizer's decoder replaces the pattern {step['pattern']!r}"
                raise UserError(f"{pattern}, only plain text is supported")
            replacements.append((step["pattern"]["String"], step["content"]))
        elif step["type"] == "Strip":
            if step.get("stop"):
                raise UserError("the tokenizer's decoder strips the end of the text, which is not supported")
            strip = step["content"], step["start"]
    return lambda skip_special: SentencePieceStream(partial(tokens, skip_special), replacements, strip)


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's character for each byte: printable Latin-1 as itself, the other 68 from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


WINDOW_KEPT = 16  # tokens kept in the window when it slides
WINDOW_MAX = 48  # tokens in the window before it slides


class WindowStream(TextStream):
    """Decodes with any `decode` function: each push decodes the last few tokens, with U+FFFD at their end held back.

    Older tokens leave the window only where the rest decodes to the same text without them; if that never happens, all
    tokens are decoded each time. `finish` compares with `decode` of all ids.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._start = 0  # of the window, which ends at the last id
        self._shown = ""  # the part of the window's text already returned
        self._pieces: list[str] = []
        self._longest = WINDOW_MAX
        self._last_piece = 0  # number of ids when text was last returned
        self._next_look = 0  # number of ids at which to decode again

    def push(self, ids: Sequence[int]) -> str:
        self._ids += ids
        if len(self._ids) < self._next_look:
            return ""
        text = self._decode(self._ids[self._start :])
        new = self._since(text.rstrip(REPLACEMENT))
        if not new:  # a long stretch without text is decoded less and less often
            self._next_look = len(self._ids) + 1 + (len(self._ids) - self._last_piece) // WINDOW_MAX
            return ""
        self._last_piece = len(self._ids)
        if len(self._ids) - self._start >= self._longest:
            self._slide(text)
        return new

    def finish(self) -> str:
        whole, sent = self._decode(self._ids), "".join(self._pieces)
        return whole[len(sent) :] if whole.startswith(sent) else self._since(self._decode(self._ids[self._start :]))

    def _since(self, text: str) -> str:
        if not text.startswith(self._shown):
            return ""
        new, self._shown = text[len(self._shown) :], text
        self._pieces.append(new)
        return new

    def _slide(self, text: str) -> None:
        """Drop all but about WINDOW_KEPT tokens of the window, whose text is given, or double its maximum length."""
        last = len(self._ids) - WINDOW_KEPT
        for start in range(last, last - WINDOW_KEPT, -1):  # starting inside a word or character may change the text
            kept = self._decode(self._ids[start:])
            if kept.strip() and text.endswith(kept):  # decoders may strip leading spaces
                self._start, self._shown = start, kept.rstrip(REPLACEMENT)
                return
        self._longest = 2 * (len(self._ids) - self._start)


def held_back(text: str, mark: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
