"""Where a text stands in a prediction of it, and what that says next; also behind a place where the two differ."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from outpace.core.tree import TokenTree

_LENGTHS = (8, 4, 2, 1)  # n-grams by which a text is found in its prediction again
_TRUSTED = 3  # equal tokens after which a place is no chance find
_COUNTED = 64  # equal tokens that are counted


class Continuation(NamedTuple):
    """What may come next: the prediction's tokens from `place` on, `length` of which before it were written too."""

    place: int
    length: int


class Alignment:
    """Follows a text that was predicted. `offers` holds the places where it may go on, the likeliest first.

    It stays where it is while the text is as predicted. Where it is not, the text's last tokens are looked for: of the
    places behind the longest n-gram that stands there, the nearest behind the last place that could be trusted, else
    the nearest before it. Beside them stands the place behind a token that was replaced.
    """

    def __init__(self, prediction: Sequence[int], before: int = 0) -> None:
        """`before`: tokens before the text that are known to be equal, as those of a prompt."""
        self._prediction = list(prediction)
        self._text: list[int] = []  # its end
        self._home = 0
        self.offers: tuple[Continuation, ...] = (Continuation(0, min(before, _COUNTED)),) if self._prediction else ()

    @cached_property
    def _places(self) -> dict[tuple[int, ...], list[int]]:
        """Where each n-gram stands; not asked for as long as all is as predicted."""
        places: dict[tuple[int, ...], list[int]] = {}
        for length in _LENGTHS:
            for place in range(length, len(self._prediction)):
                places.setdefault(tuple(self._prediction[place - length : place]), []).append(place)
        return places

    def tokens(self, offer: Continuation, count: int) -> list[int]:
        """The first of what is offered there."""
        return self._prediction[offer.place : offer.place + count]

    def nodes(self, tree: TokenTree) -> set[int]:
        """The tree's nodes that carry what is offered, one behind the other below the root, whoever planted them."""
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
        """The text goes on."""
        for token in tokens if self._prediction else ():
            self._step(token)

    def _step(self, token: int) -> None:
        self._text = [*self._text[-_COUNTED:], token]
        for place, length in self.offers:
            if self._prediction[place : place + 1] == [token]:
                self._home = place + 1 if length + 1 >= _TRUSTED else self._home
                self.offers = (Continuation(place + 1, min(length + 1, _COUNTED)),)
                return
        replaced = self.offers[0].place + 1 if self.offers else len(self._prediction)
        found = self._found()
        self.offers = (found,) if found else ()
        if replaced < len(self._prediction) and (found is None or found.place != replaced):
            self.offers = (*self.offers, Continuation(replaced, 0))

    def _found(self) -> Continuation | None:
        """Where the text's last tokens stand."""
        for length in _LENGTHS:
            places = self._places.get(tuple(self._text[-length:]), []) if length <= len(self._text) else []
            if places:
                at = bisect_left(places, self._home)
                place = places[at] if at < len(places) else places[-1]
                return Continuation(place, self._equal(place, length))
        return None

    def _equal(self, place: int, length: int) -> int:
        """How many tokens before the place are the text's last ones; so many are known to be."""
        most = min(place, len(self._text), _COUNTED)
        while length < most and self._prediction[place - length - 1] == self._text[-length - 1]:
            length += 1
        return length
