"""Copies what followed the last few tokens when they stood in the prompt or the answer before.

Prompt lookup decoding (A. Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding); no training, no model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from outpace.core.errors import check_whole
from outpace.core.tree import TokenTree
from outpace.core.types import Drafter, DraftState, Observation, Request
from outpace.drafters._chance import Rate


@dataclass(frozen=True)
class Options:
    """Match the last `longest` tokens, else fewer; copy `copies` tokens; at most `branches` different branches."""

    longest: int = 3
    copies: int = 10
    branches: int = 2

    def __post_init__(self) -> None:
        check_whole("longest", self.longest, 1, 16)
        check_whole("copies", self.copies, 1, 256)
        check_whole("branches", self.branches, 1, 64)


@dataclass
class NgramState(DraftState):
    """Where each n-gram ended so far, latest last, and which match length stands behind each proposed node."""

    ends: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    indexed: int = 0
    proposed: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # node id -> parent id, token, kind of rate


class Ngram(Drafter):
    """Grows one branch from the root for each place where the last tokens stood before, longest match first."""

    name = "ngram"
    runs_model = False

    def __init__(self, options: Options) -> None:
        self._options = options
        first = [Rate(0.15 + 0.2 * min(length, 4)) for length in range(options.longest + 1)]
        self._rates = [Rate(0.8), *first[1:]]  # 0: inside a branch; n: its first token after a match of n

    def open(self, request: Request) -> NgramState:
        return NgramState(request, list(request.prompt))

    def grow(self, states: Sequence[NgramState], trees: Sequence[TokenTree]) -> list[int]:
        """Nodes added to each tree; 0 where nothing new matches."""
        return [self._grow_one(state, tree) for state, tree in zip(states, trees, strict=True)]

    def observe(self, state: NgramState, seen: Observation) -> None:
        written = dict(zip(seen.path, seen.tokens, strict=False))
        for parent, token, kind in state.proposed.values():
            if parent in written:
                self._rates[kind].learn(written[parent] == token)
        state.tokens.extend(seen.tokens)
        alive = set(seen.tree.ids)
        state.proposed = {node: known for node, known in state.proposed.items() if known[0] in alive}

    def close(self, state: NgramState) -> None:
        state.ends.clear()

    def remember(self) -> list[float]:
        """What a profile keeps: how often copies came true."""
        return [rate.remember() for rate in self._rates]

    def recall(self, kept: Sequence[float]) -> None:
        """Begins from a profile."""
        for rate, value in zip(self._rates, kept, strict=False):
            rate.recall(float(value))

    def _grow_one(self, state: NgramState, tree: TokenTree) -> int:
        self._index(state)
        before = len(tree)
        for length, end in islice(self._matches(state), self._options.branches):
            self._graft(state, tree, state.tokens[end : end + self._options.copies], length)
        return len(tree) - before

    def _index(self, state: NgramState) -> None:
        """Notes every n-gram that has a token after it and is not noted yet."""
        for end in range(max(state.indexed, 1), len(state.tokens)):
            for length in range(1, min(self._options.longest, end) + 1):
                state.ends.setdefault(tuple(state.tokens[end - length : end]), []).append(end)
        state.indexed = max(len(state.tokens), 1)

    def _matches(self, state: NgramState) -> Iterator[tuple[int, int]]:
        """(length, end) of the places where the last `length` tokens stood before, longest and latest first."""
        seen: set[int] = set()
        for length in range(min(self._options.longest, len(state.tokens)), 0, -1):
            for end in reversed(state.ends.get(tuple(state.tokens[-length:]), [])[-self._options.branches :]):
                if end not in seen:
                    seen.add(end)
                    yield length, end

    def _graft(self, state: NgramState, tree: TokenTree, tokens: Sequence[int], kind: int) -> None:
        """Adds the branch as far as it is new."""
        node = 0
        for token in tokens:
            child = tree.child(node, token)
            if child is None:
                child = tree.add(node, token, tree.scores[node] + math.log(self._rates[kind].value))
                assert child is not None
                state.proposed[tree.ids[child]] = (tree.ids[node], token, kind)
            node, kind = child, 0


def build(options: Options, **_: object) -> Ngram:
    """The drafter; it needs no model."""
    return Ngram(options)
