"""Constraints on an answer's text: which tokens may follow (a grammar, for example), and banned strings."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np


class Constraint:
    """Limits one request's answer, as a function of the text only; several threads may call it.

    `text` is the prompt and the answer so far, `path` are drafted tokens after it. A method may raise, which ends the
    request; a drafter then continues without the constraint.
    """

    def allowed(self, text: Sequence[int], path: Sequence[int]) -> int:
        """Return how many tokens of `path` may follow `text` in sequence. None may after the end."""
        raise NotImplementedError

    def mask(self, text: Sequence[int], path: Sequence[int]) -> np.ndarray | None:
        """Return which tokens may follow `text` and `path`, bool [vocab]; None if the text is complete or invalid."""
        raise NotImplementedError

    def is_over(self, text: Sequence[int], path: Sequence[int]) -> bool:
        """Return whether the text is complete, so that nothing may follow."""
        raise NotImplementedError

    def forced(self, text: Sequence[int], path: Sequence[int]) -> list[int]:
        """Return tokens that must follow, as the model would most likely tokenize them; often none."""
        return []

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as None: a drafting process drafts without the constraint, and its proposals are verified here."""
        return type(None), ()


@dataclass(frozen=True, eq=False)
class BannedText:
    """Strings that an answer must not contain, and the tokens that can complete one. Built by `TokenTexts.ban`.

    A token completes a string if it contains all of it, or if it begins with the rest of a string whose beginning the
    text before ends with. So the ban depends on the last few bytes before a token and on the token's own, and each node
    of a tree is judged by its own path. Bytes are compared because a token may hold part of a character: UTF-8 text
    contains a string exactly if its bytes contain the string's.
    """

    strings: tuple[str, ...]
    always: np.ndarray  # tokens that contain a whole string, ascending: int64 [tokens]
    completing: tuple[tuple[bytes, tuple[int, ...]], ...]  # text end: tokens that complete a string after it
    texts: Mapping[int, bytes]  # of the tokens that can be part of a string
    context_bytes: int  # number of bytes before a token that matter
    size: int  # of the vocabulary; higher ids pad the embedding and have no text

    def after(self, backwards: Iterable[int]) -> list[int]:
        """Return the tokens forbidden, beyond `always`, after these tokens, which are given last one first."""
        tail = b""
        for token in backwards:
            text = self.texts.get(token) if token < self.size else b""
            if text is None or len(tail) >= self.context_bytes:
                break
            tail = text + tail
        return [token for start, tokens in self.completing if tail.endswith(start) for token in tokens]


class TokenTexts:
    """The bytes that each token of a vocabulary adds to a text, in UTF-8; empty for tokens without text."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self._texts = tuple(texts)
        self._rising = sorted((text, token) for token, text in enumerate(texts) if text)
        self.ban = lru_cache(maxsize=16)(self._ban)  # each call scans the whole vocabulary

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, token: int) -> bytes:
        return self._texts[token]

    def _ban(self, strings: tuple[str, ...]) -> BannedText:
        words = sorted({string.encode() for string in strings})
        starts = sorted({word[:count] for word in words for count in range(1, len(word))})
        rests = {start: {word[len(start) :] for word in words if word.startswith(start)} - {b""} for start in starts}
        completing = [(start, {token for rest in rests[start] for token in self._starting(rest)}) for start in starts]
        tokens = list(enumerate(self._texts))
        return BannedText(
            strings=strings,
            always=np.array([token for token, text in tokens if any(word in text for word in words)], np.int64),
            completing=tuple((start, tuple(sorted(found))) for start, found in completing if found),
            texts={
                t: text for t, text in tokens if text.endswith(tuple(starts)) or any(text in word for word in words)
            },
            context_bytes=max(map(len, words)) - 1,
            size=len(tokens),
        )

    def _starting(self, start: bytes) -> list[int]:
        def beginning(entry: tuple[bytes, int]) -> bytes:
            return entry[0][: len(start)]

        first = bisect_left(self._rising, start, key=beginning)
        return [token for _, token in self._rising[first : bisect_right(self._rising, start, key=beginning)]]
