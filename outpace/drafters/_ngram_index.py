"""An index of earlier occurrences of a text's last tokens: hash chains of n-grams of a few lengths, as in LZ77 coders.

Neither the work per token nor the memory grows with the text.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

BREAK = -1  # marks the end of a text; equal to no token
_SLACK = 1024  # tokens beyond the memory that are freed together


class NgramMatch(NamedTuple):
    """The last `length` tokens of the text also precede `place`."""

    length: int
    place: int


@dataclass
class _Chains:
    """All n-grams of one length: the last place after each, and for each place the previous one with the same
    n-gram."""

    length: int
    heads: dict[int, int] = field(default_factory=dict)  # hash of the n-gram -> the latest place after it
    before: array[int] = field(default_factory=lambda: array("q"))  # by place


class NgramIndex:
    """An index of the last `memory` tokens of a text. A place is indexed once a token is there, so a text never finds
    its own end."""

    def __init__(self, lengths: Sequence[int], memory: int) -> None:
        self._chains = [_Chains(length) for length in sorted(lengths, reverse=True)]
        self._memory, self._longest = memory, max(lengths)
        self._tokens: list[int] = []
        self._start = 0  # place of the first stored token
        self._has_ends = False  # whether there is a BREAK

    def __len__(self) -> int:
        """Return the number of indexed tokens."""
        return len(self._tokens)

    @property
    def entries(self) -> int:
        """Number of stored n-grams of all lengths."""
        return sum(len(chains.heads) for chains in self._chains)

    def extend(self, tokens: Sequence[int]) -> None:
        for start in range(0, len(tokens), _SLACK):
            self._extend(tokens[start : start + _SLACK])

    def _extend(self, tokens: Sequence[int]) -> None:
        """Index one n-gram length after the other, with tokens that an interrupted call left out, then forget what is
        too old."""
        known = self._tokens
        known += tokens
        end = self._start + len(known)
        self._has_ends = self._has_ends or BREAK in tokens
        for chains in self._chains:
            length, heads, before = chains.length, chains.heads, chains.before
            at = min(len(before) - length, 0)  # start of the n-gram before the next place
            text = tuple(known[len(before) - length - at :])
            for place in range(self._start + len(before), end):
                if at >= 0:
                    key = hash(text[at : at + length])
                    before.append(heads.get(key, -1))
                    heads[key] = place
                else:
                    before.append(-1)
                at += 1
        for place in range(max(end - len(tokens) - self._memory, 0), end - self._memory):
            self._forget(place)
        self._trim()

    def matches(self, text: Sequence[int], count: int, longest: int = 0, is_alone: bool = False) -> list[NgramMatch]:
        """Return at most `count` places after an occurrence of the last tokens of `text`: those of the longest n-gram
        first, of these the latest first; `is_alone`: only those of the longest n-gram. Match lengths are extended up to
        `longest`."""
        found: dict[int, int] = {}
        tokens, start, end = self._tokens, self._start, tuple(text[-self._longest :])
        oldest = max(start + len(tokens) - self._memory, 0)
        for chains in self._chains:
            length, left = chains.length, 2 * count
            most = min(max(length, longest), len(text))
            place = chains.heads.get(hash(end[-length:]), -1) if len(end) >= length else -1
            while place >= oldest and left and len(found) < count:
                here, same = place - start, 0
                reach = min(most, here)
                while same < reach and tokens[here - same - 1] == text[-same - 1]:
                    same += 1
                if same >= length:  # not just a hash collision
                    found.setdefault(place, same)
                place, left = chains.before[here], left - 1
            if is_alone and found:
                break
        return [NgramMatch(length, place) for place, length in found.items()]

    def after(self, place: int, count: int) -> list[int]:
        """Return up to `count` tokens from a place on, within its text."""
        tokens = self._tokens[place - self._start : place - self._start + count]
        return tokens[: tokens.index(BREAK)] if self._has_ends and BREAK in tokens else tokens

    def _forget(self, place: int) -> None:
        """Remove the n-grams whose last occurrence is here."""
        for chains in self._chains:
            if place - self._start >= chains.length:
                here = place - self._start
                key = hash(tuple(self._tokens[here - chains.length : here]))
                if chains.heads.get(key) == place:
                    del chains.heads[key]

    def _trim(self) -> None:
        """Free old tokens from time to time."""
        spare = len(self._tokens) - self._memory - self._longest
        if spare >= _SLACK:
            chains = [_Chains(each.length, each.heads, each.before[spare:]) for each in self._chains]
            self._tokens, self._chains, self._start = self._tokens[spare:], chains, self._start + spare
