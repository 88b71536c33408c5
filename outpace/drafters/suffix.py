"""Copies what followed the longest matches of the text's last tokens, in this text and in past answers.

SuffixDecoding: Oliaro et al., 2024, arXiv:2411.04975; no training, no model.

Hash chains of n-grams replace the suffix trees, so that neither the work per token nor the memory grows with the text:
of all earlier occurrences of the last tokens, the longest matches are examined, of these the latest ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from outpace.core.options import MethodOptions, whole
from outpace.core.stats import PerSalt
from outpace.core.tree import TokenTree
from outpace.core.types import Observation, Request
from outpace.drafters._lookup import (
    BREAK,
    LookupDrafter,
    LookupMatch,
    LookupState,
    NgramIndex,
    TreeLimits,
    grow_continuations,
    lookup,
)

_DEPTH = 64  # most tokens to match
_PLACES = 16  # places examined in the text, and as many in past answers
_COPIES = 32  # tokens copied of each
_OFFERED = 24  # tokens proposed in all
_MIN_CHANCE = 0.05  # nodes that are less likely to be reached are not proposed
_WINDOW = 65536  # tokens of the text that are kept
_LENGTHS = (1, 2, 4)  # indexed n-grams; longer matches are compared token by token


@dataclass(frozen=True)
class Options(MethodOptions):
    """What is kept, and how much of it is proposed."""

    branches: int = whole(4, 1, 64, help="tokens proposed after the same token")
    past: int = whole(65536, 0, help="tokens of past answers that are kept, separately for each cache salt; 0: none")


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
        past = self._past.for_salt(request.cache_salt) if self._past is not None else None
        state = SuffixState(request, index=NgramIndex(_LENGTHS, _WINDOW), past=past)
        state.index.extend(request.prompt)
        return state

    def propose(self, state: SuffixState, tree: TokenTree) -> None:
        """Attach the continuations of the best places of the text and of past answers."""
        limits = TreeLimits(_OFFERED, self._options.branches, _MIN_CHANCE)
        grow_continuations(self, state, tree, list(self._copies(state)), limits)

    def observe(self, state: SuffixState, seen: Observation) -> None:
        super().observe(state, seen)
        state.index.extend(seen.tokens)

    def close(self, state: SuffixState) -> None:
        if state.past is not None:
            state.past.extend([*state.tokens[len(state.request.prompt) :], BREAK])

    def _copies(self, state: SuffixState) -> Iterator[LookupMatch]:
        for origin, index in enumerate((state.index, state.past)):
            if index is not None:
                for length, place in index.matches(state.tokens, _PLACES, _DEPTH, is_alone=True):
                    yield LookupMatch(min(length, _DEPTH), index.after(place, _COPIES), origin)
