"""Texts that begin alike: who holds the longest beginning of a text is found without comparing texts.

A text is cut into blocks, and a block's hash is made of its tokens and of the hash before it: equal hashes at one place
stand for equal beginnings, and whoever holds a block holds all blocks before it. Prefix caches of vLLM's kind do so;
Kwon et al., arXiv:2309.06180.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from typing import Generic, Protocol, TypeVar

BLOCK = 16  # tokens


class HashedTokens:
    """Tokens, which may still grow at the end, and the hashes of their whole blocks, each made once.

    Texts with different keys have no beginning in common.
    """

    def __init__(self, tokens: Sequence[int], key: Hashable = None) -> None:
        self.tokens, self.key = tokens, key
        self._hashes: list[int] = []

    def hashes(self, length: int) -> list[int]:
        """Of the whole blocks among the first `length` tokens."""
        made = self._hashes
        above = made[-1] if made else hash((self.key,))
        for start in range(BLOCK * len(made), length - BLOCK + 1, BLOCK):
            above = hash((above, *self.tokens[start : start + BLOCK]))
            made.append(above)
        return made[: length // BLOCK]

    def upto(self, length: int) -> HashedTokens:
        """The first `length` tokens, as a text of its own."""
        text = HashedTokens(self.tokens[:length], self.key)
        text._hashes = self.hashes(length)
        return text

    def common(self, other: HashedTokens, most: int) -> int:
        """Tokens, `most` at most, that both begin with; 0 where their keys differ."""
        most = min(most, len(self.tokens), len(other.tokens))
        if self.key != other.key:
            return 0
        start, end = 0, most  # halving: slices are compared at once
        while start < end:
            middle = (start + end + 1) // 2
            if self.tokens[start:middle] == other.tokens[start:middle]:
                start = middle
            else:
                end = middle - 1
        return start


class Holder(Protocol):
    """Whoever holds a text, as far as it says."""

    @property
    def text(self) -> HashedTokens: ...


H = TypeVar("H", bound=Holder)


class PrefixIndex(Generic[H]):
    """Who holds which blocks."""

    def __init__(self) -> None:
        self._by_block: dict[int, dict[H, None]] = {}
        self._blocks: dict[H, int] = {}  # that each holds

    def __contains__(self, holder: H) -> bool:
        return holder in self._blocks

    def hold(self, holder: H, length: int) -> None:
        """Its text is held up to `length`, or as far as it was before."""
        hashes = holder.text.hashes(length)
        before = self._blocks.get(holder, 0)
        for block in hashes[before:]:
            self._by_block.setdefault(block, {})[holder] = None
        self._blocks[holder] = max(before, len(hashes))

    def drop(self, holder: H) -> None:
        """It holds nothing any more."""
        for block in holder.text.hashes(BLOCK * self._blocks.pop(holder, 0)):
            holders = self._by_block.get(block, {})
            holders.pop(holder, None)
            if not holders:
                self._by_block.pop(block, None)

    def nearest(self, text: HashedTokens, most: int) -> list[H]:
        """Those that hold the most blocks of the first `most` tokens; nobody where they hold none."""
        hashes = text.hashes(most)
        count = bisect_left(hashes, True, key=lambda block: block not in self._by_block)
        return list(self._by_block[hashes[count - 1]]) if count else []
