"""Copies what followed the last few tokens at earlier places in the prompt and the answer.

Prompt lookup decoding (A. Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding); no training, no model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from outpace.core.carried import Copied
from outpace.core.errors import check_range, check_whole
from outpace.core.tree import TokenTree
from outpace.core.types import Request
from outpace.drafters._carrier import CopiesText
from outpace.drafters._lookup import NEVER, Certainty, LookupDrafter, LookupState
from outpace.drafters._ngram_index import NgramIndex

LONGEST = 3  # tokens of an n-gram that the kernels hold
_LENGTH = itemgetter(0)  # of a match
_COUNTED = 64  # equal tokens that make a copy no surer than more would


@dataclass(frozen=True)
class Options:
    """`longest`: the last tokens to match, fewer where there is no match; `copies`: tokens copied of each match;
    `branches`: the most different copies; `places`: so many are looked at, as branches at least, and those with the
    longest matches are copied; `least_chance`: tokens less likely to be reached are not proposed, 0: all
    are, whatever came true in other answers; `window`: the last tokens of the text in which matches are sought."""

    longest: int = 3
    copies: int = 10
    branches: int = 2
    places: int = 8
    least_chance: float = 0.0
    window: int = 65536

    def __post_init__(self) -> None:
        check_whole("longest", self.longest, 1, 16)
        check_whole("copies", self.copies, 1, 256)
        check_whole("branches", self.branches, 1, 64)
        check_whole("places", self.places, 1, 1024)
        check_range("least_chance", self.least_chance, 0.0, 1.0)
        check_whole("window", self.window, 16)


@dataclass
class NgramState(LookupState):
    """Where each n-gram stood so far, of as much of the text as was asked about; `made`: the kernels' own index of the
    same text, where they copy."""

    index: NgramIndex = field(default_factory=lambda: NgramIndex((1,), 1))
    indexed: int = 0  # tokens that the index has
    made: Any = None


class NgramDrafter(LookupDrafter[NgramState], CopiesText):
    """Grows a branch from the root for some places where the last tokens stood before, longest match first."""

    name = "ngram"

    def __init__(self, options: Options) -> None:
        super().__init__()
        self._options = options
        self._places = max(options.places, options.branches)

    def open(self, request: Request) -> NgramState:
        state = NgramState(request, list(request.prompt))
        state.index = NgramIndex(range(1, self._options.longest + 1), self._options.window)
        return state

    def propose(self, state: NgramState, tree: TokenTree) -> None:
        """Branches from the root; the first is the likeliest."""
        options, grade = self._options, Certainty.SURE
        state.index.extend(state.tokens[state.indexed :])
        state.indexed = len(state.tokens)
        found = state.index.matches(state.tokens, self._places, _COUNTED)
        for length, place in sorted(found, key=_LENGTH, reverse=True)[: options.branches]:
            tokens = state.index.after(place, options.copies)
            self.branch(state, tree, tokens, length, grade, options.least_chance)
            grade = Certainty.OTHER

    @property
    def can_be_copied(self) -> bool:  # type: ignore[override]
        """Whether the kernels hold n-grams of this length."""
        return self._options.longest <= LONGEST

    def copied(self, state: NgramState, text: Sequence[int], made: Callable[..., Any]) -> Copied:
        """The kernels' own copier, which knows all of the text."""
        options = self._options
        if state.made is None:
            least = math.log(options.least_chance or NEVER)
            limits = options.branches, self._places, options.window
            state.made = made(options.longest, options.copies, *limits, least)
        state.made.extend(text[state.made.size :])
        return Copied(state.made, self.log_rates(state))

    def note(self, state: NgramState, ids: Sequence[int], planted: Sequence[Sequence[tuple[int, int]]]) -> None:
        for node, below in zip(ids, planted, strict=True):
            if below:
                state.planted[node] = dict(below)


def build(options: Options, **_: object) -> NgramDrafter:
    """The drafter; it needs no model."""
    return NgramDrafter(options)
