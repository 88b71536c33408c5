"""Copies what followed the last few tokens at earlier places in the prompt and the answer.

Prompt lookup decoding (A. Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding); no training, no model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import itemgetter

from outpace.core.options import MethodOptions, whole
from outpace.core.tree import TokenTree
from outpace.core.types import Request
from outpace.drafters._lookup import Certainty, LookupDrafter, LookupState, NgramIndex, lookup

_PLACES = 8  # places examined, or as many as copies are proposed if these are more
_WINDOW = 65536  # number of trailing tokens of the text in which matches are sought
_COUNTED = 64  # match length beyond which a copy is no more certain


@dataclass(frozen=True)
class Options(MethodOptions):
    """What is matched and copied."""

    longest: int = whole(3, 1, 16, help="most trailing tokens to match")
    copies: int = whole(10, 1, 256, help="tokens copied of each match")
    branches: int = whole(2, 1, 64, help="most different copies, those of the longest matches")


@dataclass
class NgramState(LookupState):
    """`index`: the n-grams of the text as far as `indexed`."""

    index: NgramIndex = field(default_factory=lambda: NgramIndex((1,), 1))
    indexed: int = 0  # tokens in the index


class NgramDrafter(LookupDrafter[NgramState]):
    """Proposes a branch below the root for some places where the last tokens occurred before, longest match first."""

    capabilities = lookup("ngram")

    def open(self, request: Request) -> NgramState:
        return NgramState(request, index=NgramIndex(range(1, self._options.longest + 1), _WINDOW))

    def propose(self, state: NgramState, tree: TokenTree) -> None:
        """Attach branches below the root, the likeliest first."""
        options, grade = self._options, Certainty.SURE
        state.index.extend(state.tokens[state.indexed :])
        state.indexed = len(state.tokens)
        found = state.index.matches(state.tokens, max(_PLACES, options.branches), _COUNTED)
        for length, place in sorted(found, key=itemgetter(0), reverse=True)[: options.branches]:
            tokens = state.index.after(place, options.copies)
            self.attach_branch(state, tree, tokens, length, grade)
            grade = Certainty.OTHER
