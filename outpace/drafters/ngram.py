"""Copies what followed the last few tokens at earlier places in the prompt and the answer.

Prompt lookup decoding (A. Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding); no training, no model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outpace.core.errors import check_range, check_whole
from outpace.core.tree import TokenTree
from outpace.core.types import Observation, Request
from outpace.drafters._grafter import Grade, Grafter, GraftState
from outpace.drafters._index import Index

_COUNTED = 64  # equal tokens that make a copy no surer than more would


@dataclass(frozen=True)
class Options:
    """`longest`: the last tokens to match, fewer where there is no match; `copies`: tokens copied of each match;
    `branches`: the most different copies; `least_chance`: tokens less likely to be reached are not proposed, 0: all
    are, whatever came true in other answers; `window`: the last tokens of the text in which matches are sought."""

    longest: int = 3
    copies: int = 10
    branches: int = 2
    least_chance: float = 0.0
    window: int = 65536

    def __post_init__(self) -> None:
        check_whole("longest", self.longest, 1, 16)
        check_whole("copies", self.copies, 1, 256)
        check_whole("branches", self.branches, 1, 64)
        check_range("least_chance", self.least_chance, 0.0, 1.0)
        check_whole("window", self.window, 16)


@dataclass
class NgramState(GraftState):
    """Where each n-gram stood so far."""

    index: Index = field(default_factory=lambda: Index((1,), 1))


class Ngram(Grafter[NgramState]):
    """Grows one branch from the root for each place where the last tokens stood before, longest match first."""

    name = "ngram"

    def __init__(self, options: Options) -> None:
        super().__init__()
        self._options = options

    def open(self, request: Request) -> NgramState:
        state = NgramState(request, list(request.prompt))
        state.index = Index(range(1, self._options.longest + 1), self._options.window)
        state.index.extend(request.prompt)
        return state

    def propose(self, state: NgramState, tree: TokenTree) -> None:
        """Branches from the root; the first is the likeliest."""
        options, grade = self._options, Grade.SURE
        for length, place in state.index.matches(state.tokens, options.branches, _COUNTED):
            tokens = state.index.after(place, options.copies)
            self.branch(state, tree, tokens, length, grade, options.least_chance)
            grade = Grade.OTHER

    def observe(self, state: NgramState, seen: Observation) -> None:
        super().observe(state, seen)
        state.index.extend(seen.tokens)


def build(options: Options, **_: object) -> Ngram:
    """The drafter; it needs no model."""
    return Ngram(options)
