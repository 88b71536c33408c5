"""Jacobi iteration: the target corrects a window of guesses in each pass, and the resulting n-grams are proposed.

Lookahead decoding: Fu et al., 2024, arXiv:2402.02057; no training, no model.

The window has W columns. A column holds the Jacobi iterates of one position: the first guess, then what the target made
of it in each pass. The first guesses of all columns form a chain after the root, and a column's later iterates hang
below its first. All of them are probes, scored for the window and never accepted. The target's token after a full
column completes an n-gram, which goes into the pool that candidates come from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outpace.core.drafting import BuildContext, Needs
from outpace.core.options import MethodOptions, option, whole
from outpace.core.tree import Role, TokenTree
from outpace.core.types import Observation, Request
from outpace.drafters._lookup import Certainty, LookupDrafter, LookupState, lookup
from outpace.drafters._phrases import LEADERS, PhraseTable, PhraseTables

_WORTH, _TRIED = 0.05, 200.0  # prior: tokens gained per probe, and its weight in probes
_FADE = 0.99  # decay per round


@dataclass(frozen=True)
class Options(MethodOptions):
    """The paper's three numbers, and a file."""

    window: int = whole(7, 1, 256, help="columns of the window (W)")
    ngram: int = whole(5, 2, 32, help="tokens of an n-gram (N)")
    guesses: int = whole(
        7, 1, 256, help="most n-grams proposed after a token (G); a pass needs --nodes W (N-1) + G (N-1) + 1"
    )
    phrases: str = option(
        "",
        "a file that keeps the pool of n-grams between runs; the default is an empty pool for each answer, as in the"
        " paper",
    )


@dataclass
class LookaheadState(LookupState):
    """`columns`: the guesses of each column, oldest first; `probes`: the ids of their nodes in this round's tree."""

    pool: PhraseTable = field(default_factory=lambda: PhraseTable(1, 1))
    columns: list[list[int]] = field(default_factory=list)
    probes: list[list[int]] = field(default_factory=list)
    last: list[int] = field(default_factory=list)  # the end of the text, whose n-grams are incomplete
    renewed: int = 0  # columns started so far


class LookaheadDrafter(LookupDrafter[LookaheadState]):
    """Proposes the pool's n-grams after the last token, then the window."""

    capabilities = lookup("lookahead", Needs(top=1))

    def __init__(self, options: Options, given: BuildContext | None = None) -> None:
        super().__init__(options)
        self._given, self._judged = _WORTH * _TRIED, _TRIED  # accepted tokens of the pool; scored probes
        self._pools = PhraseTables(LEADERS, options.guesses, options.phrases, given)
        self.capabilities = replace(self.capabilities, save=self._pools.save)

    def open(self, request: Request) -> LookaheadState:
        pool = self._pools.for_salt(request.cache_salt) if self._options.phrases else self._pools.make()
        state = LookaheadState(request, pool=pool)
        self._fill(state)
        self._read(state, request.prompt)
        return state

    def propose(self, state: LookaheadState, tree: TokenTree) -> None:
        """Attach candidates, then probes; they share a node if both have the same token at the same place."""
        grade = Certainty.SURE
        for phrase in state.pool.followers(tree.tokens[0]):
            self.attach_branch(state, tree, phrase, 1, grade)
            grade = Certainty.OTHER
        if not state.probes:
            self._probe(state, tree)

    def observe(self, state: LookaheadState, seen: Observation) -> None:
        walked = zip(seen.node_ids, seen.tokens, strict=False)
        given = sum(written in state.proposed.get(node, ()) for node, written in walked)
        super().observe(state, seen)
        if seen.seen is not None and seen.seen.top is not None:
            said = dict(zip(seen.seen.ids, seen.seen.top[:, 0].tolist(), strict=True))
            judged = len({node for ids in state.probes for node in ids if node in said})
            self._given, self._judged = _FADE * self._given + given, _FADE * self._judged + judged
            self._iterate(state, said)
        self._read(state, seen.tokens)
        del state.columns[: len(seen.tokens) - 1]  # the root has moved past them
        state.probes = []
        self._fill(state)

    def _read(self, state: LookaheadState, tokens: Sequence[int]) -> None:
        """Take the n-grams of the prompt and the answer into the pool."""
        state.last = state.pool.read(state.last, tokens, self._options.ngram - 1)

    def _fill(self, state: LookaheadState) -> None:
        """Start new columns at the window's end, with pseudo-random tokens of the text."""
        while len(state.columns) < self._options.window:
            state.renewed += 1
            state.columns.append([state.tokens[state.renewed * 40503 % len(state.tokens)]])

    def _probe(self, state: LookaheadState, tree: TokenTree) -> None:
        """Attach the window's nodes, scored by what probes have gained so far: usually below the candidates, so that
        these come first in a narrow pass, and the first columns before the others. Columns are cut where the text
        ends."""
        above, worth = 0, math.log(max(self._given / self._judged, 1e-4))
        for place, column in enumerate(state.columns[: tree.max_depth]):
            score = worth - 1e-3 * place
            node = above = self._node(tree, above, column[0], score)
            ids = [tree.ids[node]]
            for token in column[1 : tree.max_depth - place]:
                node = self._node(tree, node, token, score)
                ids.append(tree.ids[node])
            state.probes.append(ids)

    @staticmethod
    def _node(tree: TokenTree, parent: int, token: int, score: float) -> int:
        """Return the parent's child with this token, a new probe if there is none."""
        for child in tree.children(parent):
            if tree.tokens[child] == token:
                return child
        added = tree.add(parent, token, score, Role.PROBE)
        assert added is not None
        return added

    def _iterate(self, state: LookaheadState, said: dict[int, int]) -> None:
        """Advance each fully scored column by one Jacobi step; `said`: the target's token after each node, by id."""
        for column, ids in zip(state.columns, state.probes, strict=False):
            if len(ids) < len(column) or ids[-1] not in said:
                continue
            column.append(said[ids[-1]])
            state.pool.learn(column[0], tuple(column[1:]))  # a shorter n-gram while the column is new
            if len(column) == self._options.ngram:
                del column[0]


def build(options: Options, *, given: BuildContext | None = None, **_: object) -> LookaheadDrafter:
    """Build the drafter; it needs no model."""
    return LookaheadDrafter(options, given)
