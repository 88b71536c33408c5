"""Copies what followed the longest matches of the text's last tokens, in this text and in past answers.

SuffixDecoding: Oliaro et al., 2024, arXiv:2411.04975; no training, no model.

Hash chains of n-grams replace the suffix trees, so that neither the work per token nor the memory grows with the text:
of all earlier occurrences of the last tokens, the longest matches are examined, of these the latest ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from outpace.core.cache_salt import PerSalt
from outpace.core.errors import check_whole
from outpace.core.tree import TokenTree
from outpace.core.types import Observation, Request
from outpace.drafters._lookup import (
    LookupDrafter,
    LookupMatch,
    LookupState,
    check_limits,
    grow_continuations,
    limits_of,
)
from outpace.drafters._ngram_index import BREAK, NgramIndex

_LENGTHS = (1, 2, 4)  # indexed n-grams; longer matches are compared token by token


@dataclass(frozen=True)
class Options:
    """`depth`: most tokens to match; `places`: places examined in the text, and as many in past answers; `copies`:
    tokens copied of each; `offered`: tokens proposed in all; `branches`: tokens proposed after the same token;
    `least_chance`: nodes that are less likely to be reached are not proposed; `window`: tokens of the text that are
    kept; `past`: tokens of past answers that are kept, separately for each cache salt; 0: none."""

    depth: int = 64
    places: int = 16
    copies: int = 32
    offered: int = 24
    branches: int = 4
    least_chance: float = 0.05
    window: int = 65536
    past: int = 65536

    def __post_init__(self) -> None:
        check_whole("depth", self.depth, 1, 1024)
        check_whole("places", self.places, 1, 1024)
        check_whole("copies", self.copies, 1, 256)
        check_limits(self)
        check_whole("window", self.window, 16)
        check_whole("past", self.past, 0)


@dataclass
class SuffixState(LookupState):
    """The indices of the text and of past answers with the same cache salt."""

    index: NgramIndex = field(default_factory=lambda: NgramIndex((1,), 1))
    past: NgramIndex | None = None


class SuffixDrafter(LookupDrafter[SuffixState]):
    """Proposes the tree of all continuations, best first."""

    name = "suffix"

    def __init__(self, options: Options) -> None:
        super().__init__(origins=2)
        self._options = options
        self._past = PerSalt(lambda: NgramIndex(_LENGTHS, options.past)) if options.past else None

    def open(self, request: Request) -> SuffixState:
        state = SuffixState(request, list(request.prompt))
        state.past = self._past.of(request.cache_salt) if self._past is not None else None
        state.index = NgramIndex(_LENGTHS, self._options.window)
        state.index.extend(request.prompt)
        return state

    def propose(self, state: SuffixState, tree: TokenTree) -> None:
        """Attach the continuations of the best places of the text and of past answers."""
        grow_continuations(self, state, tree, list(self._copies(state)), limits_of(self._options))

    def observe(self, state: SuffixState, seen: Observation) -> None:
        super().observe(state, seen)
        state.index.extend(seen.tokens)

    def close(self, state: SuffixState) -> None:
        if state.past is not None:
            state.past.extend([*state.tokens[len(state.request.prompt) :], BREAK])

    def _copies(self, state: SuffixState) -> Iterator[LookupMatch]:
        options = self._options
        for origin, index in enumerate((state.index, state.past)):
            if index is not None:
                for length, place in index.matches(state.tokens, options.places, options.depth, is_alone=True):
                    yield LookupMatch(min(length, options.depth), index.after(place, options.copies), origin)


def build(options: Options, **_: object) -> SuffixDrafter:
    """Build the drafter; it needs no model."""
    return SuffixDrafter(options)
