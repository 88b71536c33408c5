"""Copies what followed the longest matches of the text's last tokens, in this text and in past answers.

SuffixDecoding: Oliaro et al., 2024, arXiv:2411.04975; no training, no model.

Hash chains of n-grams replace the suffix trees, so that neither the work per token nor the memory grows with the text:
of all earlier occurrences of the last tokens, the longest matches are examined, of these the latest ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from outpace.core.cache_salt import PerSalt
from outpace.core.options import MethodOptions, number, whole
from outpace.core.tree import TokenTree
from outpace.core.types import Observation, Request
from outpace.drafters._lookup import LookupDrafter, LookupMatch, LookupState, TreeLimits, grow_continuations, lookup
from outpace.drafters._ngram_index import BREAK, NgramIndex

_LENGTHS = (1, 2, 4)  # indexed n-grams; longer matches are compared token by token


@dataclass(frozen=True)
class Options(MethodOptions):
    """`depth`: most tokens to match; `places`: places examined in the text, and as many in past answers; `copies`:
    tokens copied of each; `offered`: tokens proposed in all; `branches`: tokens proposed after the same token;
    `least_chance`: nodes that are less likely to be reached are not proposed; `window`: tokens of the text that are
    kept; `past`: tokens of past answers that are kept, separately for each cache salt; 0: none."""

    depth: int = whole(64, 1, 1024)
    places: int = whole(16, 1, 1024)
    copies: int = whole(32, 1, 256)
    offered: int = whole(24, 1, 4096)
    branches: int = whole(4, 1, 64)
    least_chance: float = number(0.05, 0.0, 1.0)
    window: int = whole(65536, 16)
    past: int = whole(65536, 0)


@dataclass
class SuffixState(LookupState):
    """The indices of the text and of past answers with the same cache salt."""

    index: NgramIndex = field(default_factory=lambda: NgramIndex((1,), 1))
    past: NgramIndex | None = None


class SuffixDrafter(LookupDrafter[SuffixState]):
    """Proposes the tree of all continuations, best first."""

    capabilities = lookup("suffix")

    def __init__(self, options: Options) -> None:
        super().__init__(options, origins=2)
        self._past = PerSalt(lambda: NgramIndex(_LENGTHS, options.past)) if options.past else None

    def open(self, request: Request) -> SuffixState:
        past = self._past.of(request.cache_salt) if self._past is not None else None
        state = SuffixState(request, index=NgramIndex(_LENGTHS, self._options.window), past=past)
        state.index.extend(request.prompt)
        return state

    def propose(self, state: SuffixState, tree: TokenTree) -> None:
        """Attach the continuations of the best places of the text and of past answers."""
        limits = TreeLimits(self._options.offered, self._options.branches, self._options.least_chance)
        grow_continuations(self, state, tree, list(self._copies(state)), limits)

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
