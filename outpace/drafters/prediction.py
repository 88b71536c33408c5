"""Copies the caller's predicted answer, or an earlier answer to the prompt, and resumes after each difference.

As in OpenAI's predicted outputs (2024, platform.openai.com/docs/guides/predicted-outputs); no training, no model.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from outpace.core.options import MethodOptions, whole
from outpace.core.tree import TokenTree
from outpace.core.types import Observation, Request
from outpace.drafters._lookup import Certainty, LookupDrafter, LookupState, lookup

_AHEAD = 32  # tokens copied from the prediction
_VOUCHED = 4  # matching tokens that the caller's prediction counts as at the beginning of an answer
_LENGTHS = (8, 4, 2, 1)  # lengths of the n-grams that are searched
_TRUSTED = 3  # equal tokens that make a place reliable
_COUNTED = 64  # most equal tokens that are counted


@dataclass(frozen=True)
class Options(MethodOptions):
    """What is copied."""

    branches: int = whole(2, 1, 64, help="most places in the prediction from which tokens are copied")


class PredictedSpan(NamedTuple):
    """A possible continuation: the prediction from `place` on; the `length` tokens before it match the text."""

    place: int
    length: int


class Alignment:
    """Follows a text that was predicted. `offers` holds the possible continuations, likeliest first.

    While the text is as predicted, there is one. After a difference, the text's last tokens are searched in the
    prediction: among the places after the longest matching n-gram, the nearest after the last reliable place, else the
    nearest before it. The place after a replaced token is a second candidate.
    """

    def __init__(self, prediction: Sequence[int], before: int = 0) -> None:
        """Start at the beginning; `before` is the number of earlier tokens known to be equal, as of a prompt."""
        self._prediction = list(prediction)
        self._text: list[int] = []  # the last tokens
        self._home = 0
        self.offers: tuple[PredictedSpan, ...] = (PredictedSpan(0, min(before, _COUNTED)),) if self._prediction else ()

    @cached_property
    def _places(self) -> dict[tuple[int, ...], list[int]]:
        """Map each n-gram to the places after it. Computed only once the text differs."""
        places: dict[tuple[int, ...], list[int]] = {}
        for length in _LENGTHS:
            for place in range(length, len(self._prediction)):
                places.setdefault(tuple(self._prediction[place - length : place]), []).append(place)
        return places

    def tokens(self, offer: PredictedSpan, count: int) -> list[int]:
        return self._prediction[offer.place : offer.place + count]

    def nodes(self, tree: TokenTree) -> set[int]:
        """Return the tree's nodes on the paths of the continuations, whichever drafter added them."""
        found: set[int] = set()
        for offer in self.offers:
            node = 0
            for token in self._prediction[offer.place : offer.place + len(tree)]:
                child = tree.child(node, token)
                if child is None:
                    break
                found.add(child)
                node = child
        return found

    def follow(self, tokens: Sequence[int]) -> None:
        for token in tokens if self._prediction else ():
            self._step(token)

    def _step(self, token: int) -> None:
        self._text = [*self._text[-_COUNTED:], token]
        for place, length in self.offers:
            if self._prediction[place : place + 1] == [token]:
                self._home = place + 1 if length + 1 >= _TRUSTED else self._home
                self.offers = (PredictedSpan(place + 1, min(length + 1, _COUNTED)),)
                return
        replaced = self.offers[0].place + 1 if self.offers else len(self._prediction)
        found = self._found()
        self.offers = (found,) if found else ()
        if replaced < len(self._prediction) and (found is None or found.place != replaced):
            self.offers = (*self.offers, PredictedSpan(replaced, 0))

    def _found(self) -> PredictedSpan | None:
        """Search the text's last tokens in the prediction."""
        for length in _LENGTHS:
            places = self._places.get(tuple(self._text[-length:]), []) if length <= len(self._text) else []
            if places:
                at = bisect_left(places, self._home)
                place = places[at] if at < len(places) else places[-1]
                return PredictedSpan(place, self._equal(place, length))
        return None

    def _equal(self, place: int, length: int) -> int:
        """Return how many tokens before the place equal the last ones of the text; `length` of them are known to."""
        max_length = min(place, len(self._text), _COUNTED)
        while length < max_length and self._prediction[place - length - 1] == self._text[-length - 1]:
            length += 1
        return length


@dataclass
class PredictionState(LookupState):
    """`alignment`: the answer's position in its prediction. `is_new`: nothing has been written yet, and the prediction
    is the caller's."""

    alignment: Alignment = field(default_factory=lambda: Alignment(()))
    is_new: bool = True


class PredictionDrafter(LookupDrafter[PredictionState]):
    """Proposes the next tokens of the prediction, for each position that the answer may have in it."""

    capabilities = lookup("prediction")

    def open(self, request: Request) -> PredictionState:
        is_own = bool(request.prediction)
        guess, before = (request.prediction, 0) if is_own else (request.recalled, len(request.prompt))
        sources = None if guess else ()
        return PredictionState(request, alignment=Alignment(guess, before), is_new=is_own, sources=sources)

    def propose(self, state: PredictionState, tree: TokenTree) -> None:
        """Attach branches below the root, the likelier position first."""
        grade, vouched = Certainty.SURE, _VOUCHED if state.is_new else 0
        for offer in state.alignment.offers[: self._options.branches]:
            tokens: Sequence[int] = state.alignment.tokens(offer, _AHEAD)
            self.attach_branch(state, tree, tokens, offer.length + vouched, grade)
            grade = Certainty.OTHER

    def observe(self, state: PredictionState, seen: Observation) -> None:
        super().observe(state, seen)
        state.alignment.follow(seen.tokens)
        state.is_new = False
