"""What rules share: the walk along one pick a node, and rows of several requests sent each to its own rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outpace.core.scores import Held, host_rows, largest
from outpace.core.tree import Siblings, TokenTree
from outpace.core.types import Row, Verdict

Offer = tuple[list[int], list[float]]
"""Tokens on the scale by which a rule's target will choose, best first, and their values there."""


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


def best_rows(held: Held, rows: Sequence[Row], count: int) -> list[Offer]:
    """The best `count` tokens of each row of a drafter's scores, without what the request's options filter out.

    A rule's `best(row, held, whose, count)` finds them in one row on the host, or leaves it (None) to its `rank`.
    """
    host = host_rows(held.values)
    return [_best_row(held, host, number, row, count) for number, row in enumerate(rows)]


def _best_row(held: Held, host: np.ndarray | None, number: int, row: Row, count: int) -> Offer:
    rule, adjustments = row.request.rule, row.request.adjustments
    if host is not None and adjustments is None and hasattr(rule, "best") and np.isfinite(host[number].max()):
        offer: Offer | None = rule.best(host[number], held, row, min(count, host.shape[1]))
        if offer is not None:
            return offer
    ranked = rule.rank(held.wide(slice(number, number + 1)), [row])[0]
    best = torch.topk(ranked, min(count, len(ranked)))
    return offer_of(best.indices.tolist(), best.values.tolist())


def offer_of(tokens: list[int], values: list[float]) -> Offer:
    """The best tokens, without those that are filtered out: they stand last."""
    possible = sum(value > -math.inf for value in values)
    return tokens[:possible], values[:possible]


def likeliest(log_q: np.ndarray, held: Held, count: int) -> Offer:
    """The offer of a rule whose scale is log q. [held]"""
    places = largest(log_q, count)
    tokens = places if held.ids is None else held.ids[places]
    return offer_of(tokens.tolist(), log_q[places].tolist())


def _runs(rows: Sequence[Row]) -> list[tuple[int, list[Row]]]:
    """Neighbouring rows of one rule, with the number of the first."""
    runs: list[tuple[int, list[Row]]] = []
    for _, group in groupby(rows, key=lambda row: id(row.request.rule)):
        runs.append((sum(len(run) for _, run in runs), list(group)))
    return runs
