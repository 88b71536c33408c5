"""Whose scores a forward over several trees' frontiers gives, where a rule has to look at them."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.core.tree import TokenTree
from outpace.core.types import Row
from outpace.drafters._grower import Job


def rows_of(jobs: Sequence[Job]) -> list[Row]:
    """Whose the scores of the jobs' nodes are."""
    rows = []
    for state, tree, frontier in jobs:
        for node in frontier:
            rows.append(Row(state.request, state.tokens, _below_root(tree, node)))
    return rows


def _below_root(tree: TokenTree, node: int) -> tuple[int, ...]:
    """The tokens from below the root down to a node."""
    tokens = []
    while node:
        tokens.append(tree.tokens[node])
        node = tree.parents[node]
    return tuple(tokens[::-1])
