"""An index of texts by their prefixes, which finds the longest common prefix without comparing texts.

A text is cut into blocks, and a block is hashed with the hash of the block before it: equal hashes at one position mean
equal prefixes, and a holder of a block holds all blocks before it. As in vLLM's prefix cache; Kwon et al.,
arXiv:2309.06180.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from typing import Generic, Protocol, TypeVar

BLOCK = 16  # tokens


class HashedTokens:
    """A growing list of tokens with the hashes of its whole blocks, each computed once.

    Texts with different keys have no prefix in common.
    """

    def __init__(self, tokens: Sequence[int], key: Hashable = None) -> None:
        self.tokens, self.key = tokens, key
        self._hashes: list[int] = []

    def hashes(self, length: int) -> list[int]:
        """Return the hashes of the whole blocks among the first `length` tokens."""
        made = self._hashes
        above = made[-1] if made else hash((self.key,))
        for start in range(BLOCK * len(made), length - BLOCK + 1, BLOCK):
            above = hash((above, *self.tokens[start : start + BLOCK]))
            made.append(above)
        return made[: length // BLOCK]

    def upto(self, length: int) -> HashedTokens:
        """Return the first `length` tokens as a text of its own."""
        text = HashedTokens(self.tokens[:length], self.key)
        text._hashes = self.hashes(length)
        return text

    def common(self, other: HashedTokens, most: int) -> int:
        """Return the length of the common prefix, at most `most` tokens; 0 where the keys differ."""
        most = min(most, len(self.tokens), len(other.tokens))
        if self.key != other.key:
            return 0
        start, end = 0, most  # bisection, because comparing slices is fast
        while start < end:
            middle = (start + end + 1) // 2
            if self.tokens[start:middle] == other.tokens[start:middle]:
                start = middle
            else:
                end = middle - 1
        return start


class PrefixHolder(Protocol):
    """Something that holds a prefix of a text."""

    @property
    def text(self) -> HashedTokens: ...


H = TypeVar("H", bound=PrefixHolder)


class PrefixIndex(Generic[H]):
    """Maps blocks to the objects that hold them."""

    def __init__(self) -> None:
        self._by_block: dict[int, dict[H, None]] = {}
        self._blocks: dict[H, int] = {}  # number of blocks that each holds

    def __contains__(self, holder: H) -> bool:
        return holder in self._blocks

    def hold(self, holder: H, length: int) -> None:
        """Note that a holder has the first `length` tokens of its text, or as many as before if these were more."""
        hashes = holder.text.hashes(length)
        before = self._blocks.get(holder, 0)
        self._blocks[holder] = max(before, len(hashes))  # first, so that `drop` finds all blocks after an interrupt
        for block in hashes[before:]:
            self._by_block.setdefault(block, {})[holder] = None

    def drop(self, holder: H) -> None:
        for block in holder.text.hashes(BLOCK * self._blocks.get(holder, 0)):
            holders = self._by_block.get(block, {})
            holders.pop(holder, None)
            if not holders:
                self._by_block.pop(block, None)
        self._blocks.pop(holder, None)

    def nearest(self, text: HashedTokens, most: int) -> list[H]:
        """Return the holders of the most blocks of the first `most` tokens; none if they hold no block."""
        hashes = text.hashes(most)
        count = bisect_left(hashes, True, key=lambda block: block not in self._by_block)
        return list(self._by_block[hashes[count - 1]]) if count else []
