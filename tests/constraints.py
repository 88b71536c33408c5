"""Constraints for toys: tables of the tokens that may follow each token, without the machinery of a grammar."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from outpace.core.constraints import Constraint


class Table(Constraint):
    """After token t only `follows[t]` may come; nothing after `last`. Counts what it is asked."""

    def __init__(self, start: int, follows: Sequence[frozenset[int]], last: frozenset[int] = frozenset()) -> None:
        self.start, self.follows, self.last = start, follows, last
        self.masks = 0

    def allowed(self, text: Sequence[int], path: Sequence[int]) -> int:
        whole = [*text, *path]
        for count in range(len(path)):
            if not self._may(whole[: len(text) + count], path[count]):
                return count
        return len(path)

    def mask(self, text: Sequence[int], path: Sequence[int]) -> np.ndarray | None:
        self.masks += 1
        if self.allowed(text, path) < len(path) or self.is_over(text, path):
            return None
        return np.array([self._may([*text, *path], token) for token in range(len(self.follows))])

    def is_over(self, text: Sequence[int], path: Sequence[int]) -> bool:
        answer = [*text, *path][self.start :]
        return bool(answer) and answer[-1] in self.last

    def forced(self, text: Sequence[int], path: Sequence[int]) -> list[int]:
        found: list[int] = []
        while len(found) < 8 and not self.is_over(text, [*path, *found]):
            here = [token for token in range(len(self.follows)) if self._may([*text, *path, *found], token)]
            if len(here) != 1:
                break
            found += here
        return found

    def _may(self, whole: Sequence[int], token: int) -> bool:
        answer = whole[self.start :]
        return not (answer and answer[-1] in self.last) and token in self.follows[whole[-1]]


class Failing(Table):
    """A table that raises when it is asked the n-th time."""

    def __init__(
        self, start: int, follows: Sequence[frozenset[int]], asked: int, error: Callable[[], Exception]
    ) -> None:
        super().__init__(start, follows)
        self._left, self._error = asked, error

    def allowed(self, text: Sequence[int], path: Sequence[int]) -> int:
        self._left -= 1
        if self._left < 0:
            raise self._error()
        return super().allowed(text, path)


def rings(vocab: int, width: int, alone: int = 3) -> list[frozenset[int]]:
    """After token t come `width` tokens from 3t + 1 on; after every `alone`-th token one only, which is then forced."""
    return [
        frozenset((3 * token + 1 + step) % vocab for step in range(1 if token % alone == 0 else width))
        for token in range(vocab)
    ]
