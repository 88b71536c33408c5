"""Copies what followed the longest match of the text's last tokens in a datastore of the user's own texts.

REST: He et al., 2023, arXiv:2311.08252; no training, no model.

The datastore (outpace tune --drafter retrieval --corpus ...) is memory-mapped: the tokens of the texts, and all places
in them sorted by the tokens before each, read backwards. One binary search finds the places with the longest match.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from outpace.core.drafting import BuildContext
from outpace.core.errors import UserError
from outpace.core.options import MethodOptions, option, whole
from outpace.core.tree import TokenTree
from outpace.drafters._lookup import (
    BREAK,
    LookupDrafter,
    LookupMatch,
    LookupState,
    TreeLimits,
    grow_continuations,
    lookup,
)
from outpace.models.files import token_tables

DEPTH = 32  # tokens before a place by which places are sorted; a power of two
LARGEST = 1 << 30  # most tokens of a datastore
_SHORTEST, _LONGEST = 2, 16  # tokens to match
_PLACES = 16  # places examined
_COPIES = 16  # tokens copied of each
_OFFERED = 64  # tokens proposed in all
_MIN_CHANCE = 0.1  # nodes that are less likely to be reached are not proposed


@dataclass(frozen=True)
class Options(MethodOptions):
    """The corpus, and how many of its continuations are proposed."""

    branches: int = whole(4, 1, 64, help="tokens proposed after the same token")
    datastore: str = option("", "a file made by outpace tune; the default is the one for this tokenizer")


class Datastore:
    """Concatenated texts, each ended by a break, and their places sorted by the tokens before them."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._tokens, self._order = arrays["tokens"], arrays["order"]

    def matches(self, text: Sequence[int], count: int, shortest: int, longest: int) -> Iterator[tuple[int, int]]:
        """Yield (length, place) of the places with the longest matches, the longest first."""
        last = list(text[-longest:])[::-1]
        # the first place whose preceding tokens, read backwards, do not sort before the text's
        above = bisect_left(range(len(self._order)), last, key=partial(self._before, count=len(last)))
        below = above - 1
        lengths = [self._length(below, last), self._length(above, last)]
        for _ in range(count):
            side = int(lengths[1] > lengths[0])
            if lengths[side] < shortest:
                return
            rank = above if side else below
            yield lengths[side], int(self._order[rank])
            above, below = above + side, below - 1 + side
            lengths[side] = self._length(above if side else below, last)

    def after(self, place: int, count: int) -> list[int]:
        """Return up to `count` tokens from a place on, within its text."""
        tokens: list[int] = self._tokens[place : place + count].tolist()
        return tokens[: tokens.index(BREAK)] if BREAK in tokens else tokens

    def _length(self, rank: int, last: list[int]) -> int:
        """Return how many tokens before this rank's place match the text's last ones; -1 if the rank does not exist."""
        if not 0 <= rank < len(self._order):
            return -1
        length = 0
        for mine, other in zip(self._before(rank, len(last)), last, strict=False):
            if mine != other:
                break
            length += 1
        return length

    def _before(self, rank: int, count: int) -> list[int]:
        """Return the tokens before this rank's place, the nearest first."""
        place = int(self._order[rank])
        tokens: list[int] = self._tokens[max(place - count, 0) : place].tolist()
        return tokens[::-1]


class RetrievalDrafter(LookupDrafter[LookupState]):
    """Proposes the tree of what followed in the datastore, best first."""

    capabilities = lookup("retrieval")

    def __init__(self, options: Options, datastore: Datastore) -> None:
        super().__init__(options)
        self._datastore = datastore

    def propose(self, state: LookupState, tree: TokenTree) -> None:
        """Attach the continuations of the places with the longest matches."""
        store = self._datastore
        found = store.matches(state.tokens, _PLACES, _SHORTEST, _LONGEST)
        copies = [LookupMatch(length, store.after(place, _COPIES)) for length, place in found]
        limits = TreeLimits(_OFFERED, self._options.branches, _MIN_CHANCE)
        grow_continuations(self, state, tree, copies, limits)


def make(texts: Sequence[Sequence[int]], vocab_size: int, options: Options) -> dict[str, np.ndarray]:
    """Build the arrays of a datastore; UserError for a corpus without continuations, or one that is too large."""
    tokens = np.concatenate([np.append(np.asarray(text, np.int32), BREAK) for text in texts] or [np.zeros(0, np.int32)])
    tokens = tokens.astype(np.int32)
    if len(tokens) > LARGEST:
        raise UserError(f"the corpus has {len(tokens)} tokens, a datastore holds {LARGEST}")
    places = np.flatnonzero((tokens[1:] != BREAK) & (tokens[:-1] != BREAK)) + 1
    if not len(places):
        raise UserError("the corpus has no text of more than one token")
    before = np.append(BREAK, tokens[:-1])
    ranks = np.unique(before, return_inverse=True)[1].astype(np.int64)
    width = 1
    while width < DEPTH:  # prefix doubling: each iteration ranks by twice as many tokens
        further = np.zeros_like(ranks)
        further[width:] = ranks[:-width]
        ranks = np.unique(ranks * (ranks.max() + 1) + further, return_inverse=True)[1].astype(np.int64)
        width *= 2
    order = places[np.argsort(ranks[places], kind="stable")]
    return {"tokens": tokens, "order": order.astype(np.int32)}


def build(options: Options, *, given: BuildContext | None = None, **_: Any) -> RetrievalDrafter:
    """Build the drafter; UserError without a datastore for the target's tokenizer."""
    path = token_tables.find("retrieval", options.datastore, given)
    if path is None:
        raise UserError(
            "drafter retrieval needs a datastore: make one with outpace tune --drafter retrieval --corpus FILE"
        )
    return RetrievalDrafter(options, Datastore(token_tables.read(path, "retrieval", token_tables.tokenizer_of(given))))
