"""Chains phrases that recently followed each token, from a table that learns and an optional table of a corpus.

Cacheback: Ma et al., 2025, arXiv:2511.21699; no training, no model.

A leader is one token, its followers are the three tokens after it; both lists drop the least recently used. The frozen
table (outpace tune --drafter cacheback --corpus ...) helps while the text itself has taught nothing yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import islice
from typing import Any

import numpy as np

from outpace.core.drafting import BuildContext
from outpace.core.errors import UserError
from outpace.core.options import MethodOptions, option, whole
from outpace.core.tree import TokenTree
from outpace.core.types import Observation, Request
from outpace.drafters._lookup import Certainty, LookupDrafter, LookupState, lookup
from outpace.drafters._phrases import FOLLOWERS, LEADERS, PHRASES_FILE, Phrase, PhraseTable, PhraseTables
from outpace.models.files import token_tables

PHRASE = 3  # tokens per follower
_OFFERED = 64  # tokens proposed in all
_MIN_CHANCE = 0.02  # nodes that are less likely to be reached are not proposed
LEARNT, FROZEN = 0, 1  # origins of followers


@dataclass(frozen=True)
class Options(MethodOptions):
    """Sizes and files of the tables."""

    leaders: int = whole(LEADERS, 1, help="tokens in the table")
    followers: int = whole(FOLLOWERS, 1, 256, help="phrases kept for each")
    branches: int = whole(8, 1, 64, help="phrases proposed after a token")
    table: str = option(
        "",
        "a file made by outpace tune, or none; the default is the one made for this tokenizer, your own before the"
        " shipped one",
    )
    phrases: str = option("", PHRASES_FILE)


@dataclass
class CachebackState(LookupState):
    """`table`: that of the request's cache salt. `last`: the end of the text, whose last phrase is not in the table
    yet."""

    table: PhraseTable = field(default_factory=lambda: PhraseTable(1, 1))
    last: list[int] = field(default_factory=list)


class Frozen:
    """A read-only table from a file: each token's followers, the most frequent first."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._rows, self._phrases = arrays["rows"], arrays["phrases"]  # [vocab], [leaders, followers, PHRASE]

    def followers(self, leader: int) -> list[Phrase]:
        row = int(self._rows[leader]) if leader < len(self._rows) else -1
        return [tuple(phrase) for phrase in self._phrases[row].tolist() if phrase[0] >= 0] if row >= 0 else []


class CachebackDrafter(LookupDrafter[CachebackState]):
    """Proposes the followers of the last token, then those of their last tokens, best first. Each cache salt has its
    own table."""

    capabilities = lookup("cacheback")

    def __init__(self, options: Options, frozen: Frozen | None, given: BuildContext | None = None) -> None:
        super().__init__(options, origins=2)
        self._frozen = frozen
        self._tables = PhraseTables(options.leaders, options.followers, options.phrases, given)
        self.capabilities = replace(self.capabilities, save=self._tables.save)

    def open(self, request: Request) -> CachebackState:
        state = CachebackState(request, table=self._tables.for_salt(request.cache_salt))
        state.last = state.table.read((), request.prompt, PHRASE)
        return state

    def propose(self, state: CachebackState, tree: TokenTree) -> None:
        """Extend the best node first; a node is extended once, however many phrases end there."""
        waiting, known = [(0.0, 0)], {0}  # -path score, node
        size = len(tree) + state.num_left(_OFFERED)
        while waiting and len(tree) < size:
            node = heappop(waiting)[1]
            for phrase, origin, grade in islice(self._phrases(state.table, tree.tokens[node]), self._options.branches):
                end = self.attach_branch(state, tree, phrase, 1, grade, _MIN_CHANCE, node, origin, size)
                if end not in known:
                    known.add(end)
                    heappush(waiting, (-tree.scores[end], end))

    def observe(self, state: CachebackState, seen: Observation) -> None:
        super().observe(state, seen)
        state.last = state.table.read(state.last, seen.tokens, PHRASE)

    def _phrases(self, learnt: PhraseTable, leader: int) -> Iterator[tuple[Phrase, int, Certainty]]:
        """Yield the phrases known to follow a token, with their origin and certainty."""
        for origin, table in ((LEARNT, learnt), (FROZEN, self._frozen)):
            phrases = table.followers(leader) if table is not None else []
            grade = Certainty.SURE if len(phrases) == 1 else Certainty.LIKELY
            for phrase in phrases:
                yield phrase, origin, grade
                grade = Certainty.OTHER


def make(texts: Sequence[Sequence[int]], vocab_size: int, options: Options) -> dict[str, np.ndarray]:
    """Build the arrays of a frozen table: the most frequent phrases of the most frequent leaders. UserError for a
    corpus without phrases."""
    found = [np.lib.stride_tricks.sliding_window_view(np.asarray(t, np.int32), PHRASE + 1) for t in texts if len(t) > 3]
    if not found:
        raise UserError(f"the corpus has no text of more than {PHRASE} tokens")
    windows, counts = np.unique(np.concatenate(found), axis=0, return_counts=True)  # [windows, 1 + PHRASE]
    totals = np.bincount(windows[:, 0], counts, vocab_size)
    leaders = np.flatnonzero(totals >= max(np.sort(totals)[::-1][: options.leaders][-1], 1))[: options.leaders]
    rows = np.full(vocab_size, -1, np.int32)
    rows[leaders] = np.arange(len(leaders))
    phrases = np.full((len(leaders), options.followers, PHRASE), -1, np.int32)
    order = np.lexsort((-counts, windows[:, 0]))
    windows = windows[order]
    firsts = np.searchsorted(windows[:, 0], leaders)
    for row, (leader, first) in enumerate(zip(leaders, firsts, strict=True)):
        mine = windows[first : first + options.followers]
        mine = mine[mine[:, 0] == leader]
        phrases[row, : len(mine)] = mine[:, 1:]
    return {"rows": rows, "phrases": phrases}


def build(options: Options, *, given: BuildContext | None = None, **_: Any) -> CachebackDrafter:
    """Build the drafter; load a frozen table if there is one for the target's tokenizer."""
    path = token_tables.find("cacheback", options.table, given)
    frozen = Frozen(token_tables.read(path, "cacheback", token_tables.tokenizer_of(given))) if path else None
    return CachebackDrafter(options, frozen, given)
