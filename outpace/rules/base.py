"""What rules share: the walk along one pick a node, and rows of several requests sent each to its own rule."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from outpace.core.tree import Siblings, TokenTree
from outpace.core.types import Row, Verdict


def follow(tree: TokenTree, picks: Sequence[int]) -> Verdict:
    """Walks from the root along the picks. Exact for picked siblings, and for them alone.

    `picks[i]` is what the target writes after node i; nodes from len(picks) on are late and have none: a path may end
    on one, and then the verdict has no next token.
    """
    path = [0]
    while path[-1] < len(picks):
        node = path[-1]
        if tree.siblings.get(node, Siblings.PICKED) is not Siblings.PICKED:
            raise ValueError(
                f"this rule is exact for picked siblings only, node {node} has {tree.siblings[node].value}"
            )
        child = tree.child(node, picks[node])
        if child is None:
            return Verdict(path, picks[node])
        path.append(child)
    return Verdict(path, None)


def reduce_rows(logits: Tensor, rows: Sequence[Row]) -> list[Any]:
    """Every row reduced by its own request's rule; rows of one rule go together. [rows, vocab] to one value a row"""
    picks: list[Any] = []
    for start, run in _runs(rows):
        picks += run[0].request.rule.reduce(logits[start : start + len(run)], run)
    return picks


def rank_rows(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """A drafter's rows, each on the scale of its own request's rule. [rows, vocab] to [rows, vocab]"""
    ranked = [run[0].request.rule.rank(logits[start : start + len(run)], run) for start, run in _runs(rows)]
    return ranked[0] if len(ranked) == 1 else torch.cat(ranked)


def _runs(rows: Sequence[Row]) -> list[tuple[int, list[Row]]]:
    """Neighbouring rows of one rule, with the number of the first."""
    runs: list[tuple[int, list[Row]]] = []
    for _, group in groupby(rows, key=lambda row: id(row.request.rule)):
        runs.append((sum(len(run) for _, run in runs), list(group)))
    return runs
