"""What a new prompt shares with earlier texts: an index of prefixes, whose keys and values it can start from, and a
cache of answers, which predict its own.

A text is cut into blocks, and a block is hashed with the hash of the block before it: equal hashes at one position mean
equal prefixes, and a holder of a block holds all blocks before it. As in vLLM's prefix cache; Kwon et al.,
arXiv:2309.06180.

A prompt that an earlier text begins with is sent when a question is repeated, an answer regenerated, or a completion
continued. The target then writes the rest of that text again: always if greedy, with the same seed if sampled. This
holds only for rules whose text does not depend on drafts. The drafter `prediction` copies it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from outpace.core.stats import PerSalt
from outpace.core.types import Request

BLOCK = 16  # tokens
_TEXTS = 256  # for each reuse key
_TOKENS = 131_072  # in all texts of a reuse key together

SamplingKey = tuple[Any, ...]


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

    def common(self, other: HashedTokens, max_length: int) -> int:
        """Return the length of the common prefix, at most `max_length` tokens; 0 where the keys differ."""
        max_length = min(max_length, len(self.tokens), len(other.tokens))
        if self.key != other.key:
            return 0
        start, end = 0, max_length  # bisection, because comparing slices is fast
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

    def nearest(self, text: HashedTokens, max_length: int) -> list[H]:
        """Return the holders of the most blocks of the first `max_length` tokens; none if they hold no block."""
        hashes = text.hashes(max_length)
        count = bisect_left(hashes, True, key=lambda block: block not in self._by_block)
        return list(self._by_block[hashes[count - 1]]) if count else []


class _CachedText(NamedTuple):
    """A text, four bytes for each token, and how its tokens were picked."""

    sampling_key: SamplingKey
    text: bytes


class AnswerCache:
    """The latest finished texts, separately for each reuse key, in bounded memory."""

    def __init__(self) -> None:
        self._kept: PerSalt[list[_CachedText]] = PerSalt(list)

    def find(self, request: Request) -> tuple[int, ...]:
        """Return what followed this prompt in the latest text that begins with it and was picked in the same way."""
        if not request.rule.traits.same_text:
            return ()
        prompt, sampling_key = _packed(request.prompt), _sampling_key(request)
        for kept in reversed(self._kept.for_salt(request.cache_salt)):
            if len(kept.text) > len(prompt) and kept.sampling_key == sampling_key and kept.text.startswith(prompt):
                return tuple(array("i", kept.text[len(prompt) :]))
        return ()

    def store(self, request: Request, tokens: Sequence[int]) -> None:
        """Store a text, prompt and answer, in place of its prefixes; drop the oldest texts beyond the limits."""
        if not (request.rule.traits.same_text and len(request.prompt) < len(tokens) <= _TOKENS):
            return
        kept, new = self._kept.for_salt(request.cache_salt), _CachedText(_sampling_key(request), _packed(tokens))
        kept[:] = [one for one in kept if one.sampling_key != new.sampling_key or not new.text.startswith(one.text)]
        kept.append(new)
        held = sum(len(one.text) for one in kept)
        while len(kept) > _TEXTS or held > _TOKENS * len(_packed([0])):
            held -= len(kept.pop(0).text)


def _packed(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def _sampling_key(request: Request) -> SamplingKey:
    """Return how tokens are picked as far as it changes a text; if greedy, neither seed nor filters do."""
    noise = (request.sampling, request.seed, request.choice)
    return (type(request.rule), request.adjustments, *(() if request.sampling.is_greedy else noise))
