"""What an answer may be: of any text, which tokens may follow. A grammar is one."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from outpace.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class Constraint:
    """The limits of one request's answer, a function of the text alone; several threads may ask.

    `text` is the prompt and what is written of the answer, `path` drafted tokens behind it. A method may raise, which
    ends the request; whoever drafts then does without.
    """

    def allowed(self, text: Sequence[int], path: Sequence[int]) -> int:
        """How many tokens of `path` may follow `text`, one after the other. None does after the end."""
        raise NotImplementedError

    def mask(self, text: Sequence[int], path: Sequence[int]) -> np.ndarray | None:
        """Which tokens may follow `text` and `path`, bool [vocab]; None where the text is over or cannot be."""
        raise NotImplementedError

    def is_over(self, text: Sequence[int], path: Sequence[int]) -> bool:
        """Whether nothing may follow: the text is complete."""
        raise NotImplementedError

    def forced(self, text: Sequence[int], path: Sequence[int]) -> list[int]:
        """Tokens that spell what has to follow, as the model would most likely cut it; often none."""
        return []

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process drafts without it: what it proposes is judged here."""
        return _none, ()


def _none() -> None:
    return None


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
