"""Drafters without torch, and what builds them: with one of them a process starts in a tenth of the time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from outpace.core.errors import UserError
from outpace.core.tree import TokenTree
from outpace.core.types import Capabilities, Drafter, DraftSource, DraftState, Observation, Request

MOST = 32  # nodes of a tree
SECONDS = 60.0  # far more than anything here takes


class Empty(Drafter):
    """Never offers anything."""

    capabilities = Capabilities((DraftSource("drafter", runs_model=True),))

    def grow(self, states: Sequence[Any], trees: Sequence[TokenTree]) -> None:
        pass


def grown(drafter: Drafter, state: Any, tree: TokenTree) -> int:
    """Grow one tree; return the number of nodes added."""
    before = len(tree)
    drafter.grow([state], [tree])
    return len(tree) - before


class Lookup(Empty):
    """Knows the likeliest token after each three, by `table`, a byte for each three tokens of a vocabulary of 16; below
    the likeliest leaf it grows that one and its neighbour."""

    def __init__(self, table: bytes) -> None:
        self._table = table

    def grow(self, states: Sequence[DraftState], trees: Sequence[TokenTree]) -> None:
        for state, tree in zip(states, trees, strict=True):
            self._grow(state, tree)

    def _grow(self, state: DraftState, tree: TokenTree) -> None:
        leaves = [node for node in range(len(tree)) if not tree.children(node)]
        if len(tree) >= MOST:
            return
        leaf = max(leaves, key=lambda node: tree.scores[node])
        below = [tree.tokens[node] for node in tree.path(leaf)[1:]]
        a, b, c = [*state.tokens[-3:], *below][-3:]
        token = self._table[256 * a + 16 * b + c]
        tree.add(leaf, token, tree.scores[leaf] - 0.1)
        tree.add(leaf, (token + 1) % 16, tree.scores[leaf] - 2.5)


class Wrapped(Drafter):
    """A drafter around another; `before(verb)` is called first, and may sleep or raise."""

    def __init__(self, inner: Any, before: Callable[[str], None]) -> None:
        self.inner, self._before = inner, before
        self.capabilities = Capabilities(inner.capabilities.sources)

    def open(self, request: Request) -> Any:
        self._before("open")
        return self.inner.open(request)

    def grow(self, states: Sequence[Any], trees: Sequence[TokenTree]) -> None:
        self._before("grow")
        self.inner.grow(states, trees)

    def observe(self, state: Any, seen: Observation) -> None:
        self._before("observe")
        self.inner.observe(state, seen)

    def close(self, state: Any) -> None:
        self._before("close")
        self.inner.close(state)


class DrafterDiedError(RuntimeError):
    """Raised on purpose by a failing drafter."""


def failing(inner: Any, verb: str = "grow", after: int = 3) -> Wrapped:
    """Raises at its call number `after` (from 0) of `verb`, and at every one that follows."""
    calls: Counter[str] = Counter()

    def before(called: str) -> None:
        calls[called] += 1
        if called == verb and calls[called] > after:
            raise DrafterDiedError(f"{verb} number {after}")

    return Wrapped(inner, before)


def build_failing(table: bytes) -> Wrapped:
    return failing(Lookup(table), "grow", 5)


def build_slowly() -> Empty:
    time.sleep(SECONDS)
    return Empty()


def build_never() -> Empty:
    raise UserError("no such draft")
