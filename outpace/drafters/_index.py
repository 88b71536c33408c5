"""Where the last tokens stood before: chains of equal n-grams over the last tokens of a text, extended token by token.

The hash chains of LZ77 coders, one for each of a few lengths. Neither the work for a token nor the memory grows with
the text.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

BREAK = -1  # ends a text: no token is equal to it
_SLACK = 1024  # tokens beyond the memory that are let go together


class Match(NamedTuple):
    """`length` tokens that stand before `place` are the text's last ones."""

    length: int
    place: int


@dataclass
class _Chains:
    """All n-grams of one length: where each stood last, and from each place to the one before it."""

    length: int
    heads: dict[int, int] = field(default_factory=dict)  # hash of the n-gram -> the latest place behind it
    before: array[int] = field(default_factory=lambda: array("q"))  # by place


class Index:
    """The last `memory` tokens. A place is known once a token stands there, so a text never finds its own end."""

    def __init__(self, lengths: Sequence[int], memory: int) -> None:
        self._chains = [_Chains(length) for length in sorted(lengths, reverse=True)]
        self._memory, self._longest = memory, max(lengths)
        self._tokens: list[int] = []
        self._start = 0  # the place of the first of them

    def __len__(self) -> int:
        """Tokens that are held."""
        return len(self._tokens)

    @property
    def entries(self) -> int:
        """N-grams that are held, of all lengths."""
        return sum(len(chains.heads) for chains in self._chains)

    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on."""
        known = self._tokens
        for token in tokens:
            place = self._start + len(known)
            for chains in self._chains:
                if len(known) >= chains.length:
                    key = hash(tuple(known[-chains.length :]))
                    chains.before.append(chains.heads.get(key, -1))
                    chains.heads[key] = place
                else:
                    chains.before.append(-1)
            known.append(token)
            if place >= self._memory:
                self._forget(place - self._memory)

    def matches(self, text: Sequence[int], count: int, longest: int = 0) -> list[Match]:
        """At most `count` places where the last tokens of `text` stood: those with the longest n-gram first, of these
        the latest first. Lengths are told up to `longest`, or the longest n-gram."""
        found: dict[int, int] = {}
        for chains in self._chains:
            last = list(text[-chains.length :])
            if len(last) == chains.length:
                for place in self._walk(chains, hash(tuple(last)), 2 * count):
                    if len(found) == count:
                        break
                    if place not in found and self._before(place, chains.length) == last:
                        found[place] = chains.length
        return [Match(self._extended(place, text, length, longest), place) for place, length in found.items()]

    def after(self, place: int, count: int) -> list[int]:
        """The tokens that stand at a place and behind it, as far as their text goes."""
        tokens = self._tokens[place - self._start : place - self._start + count]
        return tokens[: tokens.index(BREAK)] if BREAK in tokens else tokens

    def _walk(self, chains: _Chains, key: int, most: int) -> Iterator[int]:
        """The places of one n-gram, the latest first."""
        place, oldest = chains.heads.get(key, -1), self._start + len(self._tokens) - self._memory
        while place >= max(oldest, 0) and most:
            yield place
            place, most = chains.before[place - self._start], most - 1

    def _extended(self, place: int, text: Sequence[int], length: int, longest: int) -> int:
        """How many tokens before the place are the text's last ones; so many are known to be."""
        here = place - self._start
        most = min(longest, here, len(text))
        while length < most and self._tokens[here - length - 1] == text[-length - 1]:
            length += 1
        return length

    def _key(self, place: int, length: int) -> int:
        return hash(tuple(self._before(place, length)))

    def _before(self, place: int, length: int) -> list[int]:
        return self._tokens[place - self._start - length : place - self._start]

    def _forget(self, place: int) -> None:
        """Lets the n-grams go that stood here last, and now and then the tokens before them."""
        for chains in self._chains:
            if place - self._start >= chains.length:
                key = self._key(place, chains.length)
                if chains.heads.get(key) == place:
                    del chains.heads[key]
        spare = len(self._tokens) - self._memory - self._longest
        if spare >= _SLACK:
            del self._tokens[:spare]
            for chains in self._chains:
                del chains.before[:spare]
            self._start += spare
