"""Copies what followed the last few tokens at earlier places in the prompt and the answer.

Prompt lookup decoding (A. Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding); no training, no model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import itemgetter

from outpace.core.options import MethodOptions, number, whole
from outpace.core.tree import TokenTree
from outpace.core.types import Request
from outpace.drafters._lookup import Certainty, LookupDrafter, LookupState, lookup
from outpace.drafters._ngram_index import NgramIndex

_COUNTED = 64  # match length beyond which a copy is no more certain


@dataclass(frozen=True)
class Options(MethodOptions):
    """`longest`: most trailing tokens to match, fewer if there is no match; `copies`: tokens copied of each match;
    `branches`: most different copies; `places`: number of places examined, at least `branches`; those with the
    longest matches are copied; `least_chance`: tokens that are less likely to be reached are not proposed, 0: all are,
    whatever came true in other answers; `window`: number of trailing tokens of the text in which matches are sought."""

    longest: int = whole(3, 1, 16)
    copies: int = whole(10, 1, 256)
    branches: int = whole(2, 1, 64)
    places: int = whole(8, 1, 1024)
    least_chance: float = number(0.0, 0.0, 1.0)
    window: int = whole(65536, 16)


@dataclass
class NgramState(LookupState):
    """`index`: the n-grams of the text as far as `indexed`."""

    index: NgramIndex = field(default_factory=lambda: NgramIndex((1,), 1))
    indexed: int = 0  # tokens in the index


class NgramDrafter(LookupDrafter[NgramState]):
    """Proposes a branch below the root for some places where the last tokens occurred before, longest match first."""

    capabilities = lookup("ngram")

    def open(self, request: Request) -> NgramState:
        return NgramState(request, index=NgramIndex(range(1, self._options.longest + 1), self._options.window))

    def propose(self, state: NgramState, tree: TokenTree) -> None:
        """Attach branches below the root, the likeliest first."""
        options, grade = self._options, Certainty.SURE
        state.index.extend(state.tokens[state.indexed :])
        state.indexed = len(state.tokens)
        found = state.index.matches(state.tokens, max(options.places, options.branches), _COUNTED)
        for length, place in sorted(found, key=itemgetter(0), reverse=True)[: options.branches]:
            tokens = state.index.after(place, options.copies)
            self.attach_branch(state, tree, tokens, length, grade, options.least_chance)
            grade = Certainty.OTHER
