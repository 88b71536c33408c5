"""Strings that an answer must not contain, whatever tokens they are made of: which tokens would complete one.

A token completes a string where it holds the whole of it, or where it begins with the rest of one whose beginning the
text before ends with. So the ban looks at the last few bytes before a token and at the token's own, and each node of a
tree is judged by its own path. Bytes, because a token may hold part of a character: UTF-8 text contains a string
exactly where its bytes contain the string's.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from outpace.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class BannedText:
    """Some strings, and the tokens that matter for them; made by `TokenTexts.ban`."""

    strings: tuple[str, ...]
    always: Tensor  # tokens that hold a whole string, rising: int64 [tokens]
    completing: tuple[tuple[bytes, tuple[int, ...]], ...]  # after a text that ends so, these tokens complete a string
    texts: Mapping[int, bytes]  # of the tokens that can be a part of one; all others break it
    reach: int  # bytes before a token that matter
    size: int  # of the vocabulary: ids from here on, which pad an embedding, have no text

    def after(self, backwards: Iterable[int]) -> list[int]:
        """Tokens that are forbidden beside `always` after these tokens, the last one first."""
        tail = b""
        for token in backwards:
            text = self.texts.get(token) if token < self.size else b""
            if text is None or len(tail) >= self.reach:
                break
            tail = text + tail
        return [token for start, tokens in self.completing if tail.endswith(start) for token in tokens]


class TokenTexts:
    """What each token of a vocabulary adds to a text, in UTF-8; nothing where it shows none."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self._texts = tuple(texts)
        self._rising = sorted((text, token) for token, text in enumerate(texts) if text)
        self.ban = lru_cache(maxsize=16)(self._ban)  # each takes a look at the whole vocabulary

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, token: int) -> bytes:
        return self._texts[token]

    def _ban(self, strings: tuple[str, ...]) -> BannedText:
        """The ban of these strings, none of them empty."""
        words = sorted({string.encode() for string in strings})
        starts = sorted({word[:count] for word in words for count in range(1, len(word))})
        rests = {start: {word[len(start) :] for word in words if word.startswith(start)} - {b""} for start in starts}
        completing = [(start, {token for rest in rests[start] for token in self._starting(rest)}) for start in starts]
        tokens = list(enumerate(self._texts))
        return BannedText(
            strings=strings,
            always=torch.tensor([token for token, text in tokens if any(word in text for word in words)]).long(),
            completing=tuple((start, tuple(sorted(found))) for start, found in completing if found),
            texts={
                t: text for t, text in tokens if text.endswith(tuple(starts)) or any(text in word for word in words)
            },
            reach=max(map(len, words)) - 1,
            size=len(tokens),
        )

    def _starting(self, start: bytes) -> list[int]:
        def beginning(entry: tuple[bytes, int]) -> bytes:
            return entry[0][: len(start)]

        first = bisect_left(self._rising, start, key=beginning)
        return [token for _, token in self._rising[first : bisect_right(self._rising, start, key=beginning)]]
