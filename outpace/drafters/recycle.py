"""Proposes the tokens that the target ranked highest when it last scored the same token.

Token Recycling: Luo et al., 2024, arXiv:2408.08696; no training, no model.

The paper's tree of 80 nodes has a fixed shape; here the likeliest nodes are taken, by how often a successor of each
rank was accepted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from outpace.core.cache_salt import PerSalt
from outpace.core.drafting import Needs
from outpace.core.options import MethodOptions, number, whole
from outpace.core.tree import TokenTree
from outpace.core.types import Observation, Request
from outpace.drafters._lookup import LookupDrafter, LookupState, kind_of, lookup


@dataclass(frozen=True)
class Options(MethodOptions):
    """`branches`: likeliest tokens kept for each token; `offered`: nodes proposed in all; `least_chance`: nodes that
    are less likely to be reached are not proposed."""

    branches: int = whole(8, 1, 64)
    offered: int = whole(80, 1, 4096)
    least_chance: float = number(0.02, 0.0, 1.0)


Successors = dict[int, Sequence[int]]


@dataclass
class RecycleState(LookupState):
    """`successors`: the table of the request's cache salt."""

    successors: Successors = field(default_factory=dict)


class RecycleDrafter(LookupDrafter[RecycleState]):
    """Proposes the successors of the last token, then theirs, best first. Each cache salt has its own table, with at
    most one row per token of the vocabulary."""

    capabilities = lookup("recycle")

    def __init__(self, options: Options) -> None:
        super().__init__(options, origins=options.branches)
        self.capabilities = replace(self.capabilities, needs=Needs(top=options.branches))
        self._tables: PerSalt[Successors] = PerSalt(dict)

    def open(self, request: Request) -> RecycleState:
        return RecycleState(request, successors=self._tables.of(request.cache_salt))

    def propose(self, state: RecycleState, tree: TokenTree) -> None:
        """Extend the best node first; a successor's kind is its rank, and whether it is a child of the root."""
        least = math.log(self._options.least_chance) if self._options.least_chance else -math.inf
        waiting, left = [(0.0, 0, 0)], state.num_left(self._options.offered)  # -path score, depth, node
        while waiting and left > 0:
            loss, depth, node = heappop(waiting)
            following = state.successors.get(tree.tokens[node], ()) if depth < tree.max_depth else ()
            for rank, token in enumerate(following):
                kind = kind_of(min(depth, 1), origin=rank)
                if left > 0 and self.log_rate(state, kind) - loss >= least:
                    child = self.attach(state, tree, node, token, kind)
                    heappush(waiting, (-tree.scores[child], depth + 1, child))
                    left -= 1

    def observe(self, state: RecycleState, seen: Observation) -> None:
        super().observe(state, seen)
        if seen.seen is not None and seen.seen.top is not None:
            state.successors.update(zip(seen.seen.tokens, seen.seen.top.tolist(), strict=True))
