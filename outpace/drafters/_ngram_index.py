"""Where the last tokens stood before: chains of equal n-grams over the last tokens of a text, extended token by token.

The hash chains of LZ77 coders, one for each of a few lengths. Neither the work for a token nor the memory grows with
the text.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

BREAK = -1  # ends a text: no token is equal to it
_SLACK = 1024  # tokens beyond the memory that are let go together


class NgramMatch(NamedTuple):
    """`length` tokens that stand before `place` are the text's last ones."""

    length: int
    place: int


@dataclass
class _Chains:
    """All n-grams of one length: where each stood last, and from each place to the one before it."""

    length: int
    heads: dict[int, int] = field(default_factory=dict)  # hash of the n-gram -> the latest place behind it
    before: array[int] = field(default_factory=lambda: array("q"))  # by place


class NgramIndex:
    """The last `memory` tokens. A place is known once a token stands there, so a text never finds its own end."""

    def __init__(self, lengths: Sequence[int], memory: int) -> None:
        self._chains = [_Chains(length) for length in sorted(lengths, reverse=True)]
        self._memory, self._longest = memory, max(lengths)
        self._tokens: list[int] = []
        self._start = 0  # the place of the first of them
        self._has_ends = False  # of texts, among them

    def __len__(self) -> int:
        """Tokens that are held."""
        return len(self._tokens)

    @property
    def entries(self) -> int:
        """N-grams that are held, of all lengths."""
        return sum(len(chains.heads) for chains in self._chains)

    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on."""
        for start in range(0, len(tokens), _SLACK):
            self._extend(tokens[start : start + _SLACK])

    def _extend(self, tokens: Sequence[int]) -> None:
        """One length after the other, and only then what stands too far back goes."""
        known = self._tokens
        first = self._start + len(known)
        text = (*known[-self._longest :], *tokens)
        for chains in self._chains:
            length, heads, before = chains.length, chains.heads, chains.before
            at = len(text) - len(tokens) - length  # where the n-gram before the next place begins
            for place in range(first, first + len(tokens)):
                if at >= 0:
                    key = hash(text[at : at + length])
                    before.append(heads.get(key, -1))
                    heads[key] = place
                else:
                    before.append(-1)
                at += 1
        known += tokens
        self._has_ends = self._has_ends or BREAK in tokens
        for place in range(max(first - self._memory, 0), first + len(tokens) - self._memory):
            self._forget(place)
        self._trim()

    def matches(self, text: Sequence[int], count: int, longest: int = 0, is_alone: bool = False) -> list[NgramMatch]:
        """At most `count` places where the last tokens of `text` stood: those with the longest n-gram first, of these
        the latest first; `is_alone`: those of the longest n-gram alone. Lengths are told up to `longest`, or the
        longest n-gram."""
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
                if same >= length:  # no other n-gram of the same hash
                    found.setdefault(place, same)
                place, left = chains.before[here], left - 1
            if is_alone and found:
                break
        return [NgramMatch(length, place) for place, length in found.items()]

    def after(self, place: int, count: int) -> list[int]:
        """The tokens that stand at a place and behind it, as far as their text goes."""
        tokens = self._tokens[place - self._start : place - self._start + count]
        return tokens[: tokens.index(BREAK)] if self._has_ends and BREAK in tokens else tokens

    def _forget(self, place: int) -> None:
        """Lets the n-grams go that stood here last."""
        for chains in self._chains:
            if place - self._start >= chains.length:
                here = place - self._start
                key = hash(tuple(self._tokens[here - chains.length : here]))
                if chains.heads.get(key) == place:
                    del chains.heads[key]

    def _trim(self) -> None:
        """Now and then lets the tokens go that stand too far back."""
        spare = len(self._tokens) - self._memory - self._longest
        if spare >= _SLACK:
            del self._tokens[:spare]
            for chains in self._chains:
                del chains.before[:spare]
            self._start += spare
