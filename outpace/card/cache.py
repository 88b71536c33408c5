"""The candidate cache of one request: the drafter inserts layers, the target queries it and corrects the direction.

CARD, arXiv:2508.04462: query-and-correct. Here a hit in the secondary cache B counts, and the best subtree is verified
instead of one chain.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from heapq import nlargest
from math import exp
from typing import NamedTuple

from outpace.core.tree import Role, TokenTree, best_nodes, depths
from outpace.core.types import Verdict

_GIVEN_UP = 1 << 30  # layers, of a drafter that adds no more


class Candidate(NamedTuple):
    """A node on its way into the cache. `chance`: log of the estimated chance that the target walks on from the parent
    to it; relative, because the parent's own path score changes whenever the root moves."""

    node_id: int
    parent_id: int
    token: int
    chance: float
    role: Role


class CandidateLayer(NamedTuple):
    """A delta: what the drafter added below `root_id` since it last published, parents first. Without nodes: it offers
    no more below this root."""

    root_id: int
    nodes: Sequence[Candidate]


class Correction(NamedTuple):
    """Where the target went: the walked ids, the tokens it committed, and the root from now on.

    After a hit the root is a node that the drafter knows; after a miss it is new.
    """

    path: Sequence[int]
    tokens: Sequence[int]
    root_id: int
    is_hit: bool


class VisibilityOptions(NamedTuple):
    """Which candidates the target sees. `secondary`: those of B that the drafter did not take up; `late`: those that
    came while it ran; `chain`: of all, it verifies the walk down the best children alone. The defaults see most."""

    secondary: bool = True
    late: bool = True
    chain: bool = False
    keeps: bool = True  # what stands below the next root lives on


class CandidateCache:
    """Candidates of one request below the last committed token. Two threads meet here, under one lock: a plain one,
    because an interrupt may leave a `Condition` locked.

    Ids are never reused: those of drafted nodes count up from 1, those of the roots after a miss down from -1. An
    insertion drops nodes whose parents are dead, which covers those of an older epoch (it moves on a miss only).
    `counts` says what was met.
    """

    def __init__(self, root_token: int) -> None:
        self._tree = TokenTree(root_token)
        self._places = {0: 0}  # node id -> node
        self._lock = threading.Lock()
        self._news = threading.Lock()  # open where something came that nobody waited for
        self.layers = 0  # accepted since the last correction
        self._seen = 0  # nodes there at the last query
        self.epoch = 0
        self.missed = True  # nothing is there yet: the first query, too, may wait for a short draft
        self.sight = VisibilityOptions()
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._tree) - 1

    @property
    def next_id(self) -> int:
        """Above the ids of all nodes that were ever inserted: where a drafter that starts anew begins to count."""
        with self._lock:
            return self._tree.next_id

    def insert(self, layer: CandidateLayer) -> int:
        """The drafter's thread: adds what still hangs on a live parent; the number of nodes added."""
        with self._lock:
            added = 0
            if not layer.nodes and layer.root_id == self._tree.ids[0]:
                self._give_up()
            for candidate in layer.nodes:
                parent = self._places.get(candidate.parent_id)
                if parent is None:
                    self.counts["dead parent"] += 1
                    continue
                score = self._tree.scores[parent] + candidate.chance
                node = self._tree.add(parent, candidate.token, score, candidate.role, node_id=candidate.node_id)
                if node is not None:
                    self._places[candidate.node_id] = node
                    added += 1
            self.layers += added > 0
            self._tell()
            return added

    @property
    def is_given_up(self) -> bool:
        """Whether the drafter adds no more below this root."""
        return self.layers >= _GIVEN_UP

    def outlook(self, most: int, ends: int) -> tuple[list[float], list[float]]:
        """Estimated chances that the target walks to a candidate: of the `most` best of all, and of the `ends` best of
        those without children; best first. Where there is none the root itself is what may get children."""
        with self._lock:
            tree = self._tree
            best = nlargest(most, tree.scores[1:])
            leaves = nlargest(ends, [score for node, score in enumerate(tree.scores) if not tree.children(node)])
        return list(map(exp, best)), list(map(exp, leaves))

    def query(self, budget: int) -> TokenTree:
        """The target's thread: a copy of the best `budget` nodes, the root included; maybe the root alone."""
        with self._lock:
            self._seen = len(self._tree)
            tree = self._tree
            if not self.sight.secondary:
                tree = tree.copy([node for node in range(len(tree)) if self._sees(node)])
            choose = _best_chain if self.sight.chain else best_nodes
            return tree.copy(choose(tree, max(budget, 1)))

    def late(self, tree: TokenTree) -> int:
        """Appends to a queried tree the children that its nodes got since the query; they have no score row yet."""
        with self._lock:
            places = {node_id: node for node, node_id in enumerate(tree.ids)}
            verified = len(tree)
            for node in range(self._seen, len(self._tree)):
                parent = places.get(self._tree.ids[self._tree.parents[node]])
                if parent is not None and self._sees(node):
                    mine = self._tree
                    tree.add(parent, mine.tokens[node], mine.scores[node], mine.roles[node], node_id=mine.ids[node])
            return len(tree) - verified

    def correct(self, tree: TokenTree, verdict: Verdict, verified: int) -> tuple[str, Correction]:
        """The target's thread: moves the root to where the verdict on a queried tree ends.

        Gives where the next root stood ("primary", "secondary", "late", or "miss") and what to tell the drafter.
        `verified` is the number of the tree's nodes that had a score row.
        """
        path = [tree.ids[node] for node in verdict.path]
        tokens = [tree.tokens[node] for node in verdict.path[1:]]
        with self._lock:
            root: int | None = self._places[path[-1]]
            kind = "late"
            if verdict.next_token is not None:
                tokens.append(verdict.next_token)
                assert root is not None
                root = self._tree.child(root, verdict.next_token)
                root = None if root is None or not (self.sight.keeps and self._sees(root)) else root
                kind = "miss" if root is None else self._tree.roles[root].value
            elif verdict.path[-1] >= verified:
                path.pop()  # the late child is the new root
                root, kind = (root, kind) if self.sight.keeps else (None, "miss")
            else:
                raise ValueError("a verdict without a next token must end on a late child")
            self._move(root, tokens[-1])
            self.counts[kind] += 1
            return kind, Correction(path, tokens, self._tree.ids[0], kind != "miss")

    def has(self, layers: int, depth: int = 0) -> bool:
        """Whether `layers` layers came since the last correction and one reaches `depth` below the root; or the drafter
        gave up."""
        if self.layers < layers or not depth or self.layers >= _GIVEN_UP:
            return self.layers >= layers
        with self._lock:
            return max(depths(self._tree.parents)) >= depth

    def wait(self, layers: int, seconds: float, depth: int = 0) -> None:
        """Until the cache has that, or `seconds` passed."""
        deadline = time.monotonic() + seconds
        while not self.has(layers, depth) and (left := deadline - time.monotonic()) > 0:
            self._news.acquire(timeout=left)

    def give_up(self) -> None:
        """The drafter is gone: whoever waits goes on."""
        with self._lock:
            self._give_up()
            self._tell()

    def _sees(self, node: int) -> bool:
        """Whether the target may see a node. One of B that has children was taken up: it is like one of C."""
        is_early = self.sight.late or node < self._seen
        is_primary = self._tree.roles[node] is not Role.SECONDARY
        return is_early and (self.sight.secondary or is_primary or bool(self._tree.children(node)))

    def _tell(self) -> None:
        """Whoever waits looks again; called under the lock."""
        if self._news.locked():
            self._news.release()

    def _give_up(self) -> None:
        self.counts["nothing to offer"] += 1
        self.layers = _GIVEN_UP

    def _move(self, root: int | None, token: int) -> None:
        self.layers = 0
        self.missed = root is None
        if root is None:
            self.epoch += 1
            self._tree = TokenTree(token, root_id=-self.epoch, next_id=self._tree.next_id)
        else:
            self._tree = self._tree.copy(self._tree.subtree(root))
        self._places = {node_id: node for node, node_id in enumerate(self._tree.ids)}


def _best_chain(tree: TokenTree, count: int) -> list[int]:
    """The walk from the root down the best child of each node, `count` nodes at most."""
    path = [0]
    while len(path) < count and (children := tree.children(path[-1])):
        path.append(max(children, key=lambda child: (tree.scores[child], -child)))
    return path
