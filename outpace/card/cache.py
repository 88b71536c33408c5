"""The candidate cache of one request: the drafter inserts levels, the target queries it and corrects its direction.

CARD, arXiv:2508.04462, has two caches. C, the primary one, holds the K best new nodes of each draft step; B, the
secondary one, holds the other nodes that the step added. Here both are one tree: a node's `Role` says which cache it
belongs to (`TokenTree.attach_offers` assigns it), and decides nothing but what `VisibilityOptions` hide and
how a hit is counted. The drafter expands the nodes with the best path scores, whichever their role. Two additions to
the paper: a next token found in B is a hit too, and the best subtree is verified instead of one chain.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from math import exp
from typing import NamedTuple

from outpace_kernels import NodeDelta

from outpace.core.tree import UNLIMITED, Role, TokenTree, best_chain
from outpace.core.types import Verdict

_UNLIMITED = 1 << 30  # number of levels after the drafter gave up, so that all waits end
_REMEMBERED = 512  # latest written tokens whose ids are kept, to match late levels


class CandidateLevel(NamedTuple):
    """A message from the drafter: the nodes that it added below `root_id` since its last level, parents first. A level
    without nodes says that it adds no more below this root.

    `nodes` has the columns ids, ids of the parents, tokens, roles, and the log of the estimated probability that the
    target continues from the parent to the node. It is relative to the parent, because path scores change whenever the
    root moves. `alias` is the drafter's own id of the root's token, if it had drafted this token itself."""

    root_id: int
    nodes: NodeDelta = NodeDelta(((), (), (), (), ()))
    alias: int | None = None


class Correction(NamedTuple):
    """A message to the drafter: the tokens committed since the last one, their end in the answer, and the id of the new
    root: that of a candidate after a hit, a new one after a miss."""

    tokens: Sequence[int]
    length: int
    root_id: int


class VisibilityOptions(NamedTuple):
    """Which candidates the target sees; the defaults show most. `secondary`: candidates of B that the drafter has not
    expanded; `late`: candidates inserted during the target pass; `chain`: verify only the chain of the best
    children."""

    secondary: bool = True
    late: bool = True
    chain: bool = False


class CandidateCache:
    """Candidates of one request below the last committed token, as a token tree. Drafter and target meet here under one
    lock: a plain one, because an interrupt may leave a `Condition` locked.

    Ids are never reused: those of drafted nodes count up from 1, those of roots after a miss count down from -1. A
    level may be older than the last corrections, so its nodes are matched by text: a token that was written in the
    meantime, or drafted twice, is one node with several ids. Nodes that do not continue the written text are dropped.
    `counts` counts where the next roots were found ("primary", "secondary", "late", "miss"), dropped nodes ("orphan"),
    and how often the drafter stopped adding nodes below a root ("exhausted").
    """

    def __init__(self, root_token: int, vocab_size: int = 2**31 - 1, max_tokens: int = UNLIMITED) -> None:
        """`vocab_size`: the target's; `insert` refuses tokens outside of it. `max_tokens`: the request's."""
        self._max_tokens = max_tokens
        self._tree = TokenTree(root_token)
        self._tree.vocab_size = vocab_size
        self._lock = threading.Lock()
        self._news = threading.Lock()  # released when something was inserted
        self.levels = 0  # inserted since the last correction
        self._seen = 0  # number of nodes at the last query
        self._length = 0  # number of written tokens
        self._next: dict[int, tuple[int, int]] = {}  # by id of a written token: the next token, and its id
        self._aliases: dict[int, int] = {}  # by further id of a written token or candidate: its first id
        self.epoch = 0
        self.missed = True  # also before the first query, which may wait for a short draft too
        self.visibility = VisibilityOptions()
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        with self._lock:
            return len(self._tree) - 1

    @property
    def next_id(self) -> int:
        """The first id above all known ones, from which a restarted drafter continues."""
        with self._lock:
            return max(self._tree.next_id, *(alias + 1 for alias in self._aliases), 1)

    def insert(self, level: CandidateLevel) -> int:
        """Insert the nodes of a level that continue the written text; return how many are new. Called by the drafter's
        side. Raise ValueError for a token outside the vocabulary."""
        with self._lock:
            if level.alias is not None:
                self._aliases[level.alias] = level.root_id
            if not level.nodes and level.root_id == self._tree.ids[0]:
                self._give_up()
            added = self._tree.insert(level.nodes)[0]
            if added < len(level.nodes):
                added += self._insert_by_text(level.nodes)
            self.levels += added > 0
            self._notify()
            return added

    def _insert_by_text(self, nodes: NodeDelta) -> int:
        """Insert those nodes of a level that are not in the tree yet. Their parents are found by the text that leads to
        them. Return how many are new."""
        tree, before, gone, orphans = self._tree, len(self._tree), set[int](), 0
        for node_id, parent_id, token, role, log_prob in zip(*nodes.columns(), strict=True):
            if parent_id not in gone:  # else there is nothing to find, as in most of a stale level
                if tree.find(node_id) is not None:
                    continue
                place = self._aliases.get(parent_id, parent_id)
                written, next_id = self._next.get(place, (None, 0))
                if written == token:
                    self._aliases[node_id] = next_id
                    continue
                parent = tree.find(place) if written is None else None
                if parent is not None:
                    if (twin := tree.child(parent, token)) is not None:
                        self._aliases[node_id] = tree.ids[twin]
                    else:
                        tree.add(parent, token, tree.scores[parent] + log_prob, role, node_id=node_id)
                    continue
                if written is None:
                    gone.add(parent_id)
            gone.add(node_id)
            orphans += 1
        self.counts["orphan"] += orphans
        return len(tree) - before

    @property
    def is_given_up(self) -> bool:
        """Whether the drafter adds no more below this root."""
        return self.levels >= _UNLIMITED

    def best_chances(self, count: int, leaves: bool = False) -> list[float]:
        """Return estimated probabilities that the target reaches the best `count` candidates, best first; `leaves`: of
        those without children (the root, if it has no children)."""
        with self._lock:
            return [*map(exp, self._tree.best_scores(count, leaves=leaves))]

    def query(self, budget: int) -> TokenTree:
        """Return a copy of the best `budget` nodes, the root included; perhaps the root alone. Called by the target's
        side."""
        with self._lock:
            self._seen = len(self._tree)
            tree = self._tree
            if not self.visibility.secondary:
                tree = tree.copy([node for node in range(len(tree)) if self._sees(node)])
            if self.visibility.chain:
                found = tree.copy(best_chain(tree, max(budget, 1)))
            else:
                found = tree.best_copy(max(budget, 1))
            found.max_depth = self._max_tokens - self._length - 1  # a drafter may not heed it
            return found.copy(range(len(found))) if found.deepest > found.max_depth else found

    def add_late_children(self, tree: TokenTree) -> int:
        """Add to a queried tree the children that its nodes got since the query; they were not verified. Return their
        number."""
        with self._lock:
            verified = len(tree)
            if self.visibility.late:
                tree.adopt(self._tree, self._seen, self.visibility.secondary)
            return len(tree) - verified

    def correct(self, tree: TokenTree, verdict: Verdict, verified: int) -> tuple[str, Correction]:
        """Move the root to the end of the verdict on a queried tree, whose first `verified` nodes were verified.

        Return where the next root was found ("primary", "secondary", "late", or "miss") and the correction for the
        drafter.
        """
        path = [tree.ids[node] for node in verdict.path]
        tokens = [tree.tokens[node] for node in verdict.path[1:]]
        with self._lock:
            root = self._tree.find(path[-1])
            assert root is not None  # queried nodes stay until the next correction
            kind = "late"
            if verdict.next_token is not None:
                tokens.append(verdict.next_token)
                root = self._tree.child(root, verdict.next_token)
                root = None if root is None or not self._sees(root) else root
                kind = "miss" if root is None else Role(self._tree.roles[root]).label
            elif verdict.path[-1] >= verified:
                path.pop()  # the late child becomes the root
            else:
                raise ValueError("a verdict without a next token must end on a late child")
            self._move(root, tokens[-1])
            self._remember([*path, self._tree.ids[0]], tokens)
            self.counts[kind] += 1
            return kind, Correction(tokens, self._length, self._tree.ids[0])

    def _remember(self, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Record the ids of the tokens just written, and drop all but the latest `_REMEMBERED`. Aliases of dropped ones
        go now and then."""
        self._length += len(tokens)
        self._next.update(zip(path, zip(tokens, path[1:], strict=True), strict=False))
        while len(self._next) > _REMEMBERED:
            del self._next[next(iter(self._next))]
        if len(self._aliases) > 2 * _REMEMBERED:
            self._aliases = {
                alias: node
                for alias, node in self._aliases.items()
                if node in self._next or self._tree.find(node) is not None
            }

    def has_grown(self, levels: int, depth: int = 0) -> bool:
        """Whether `levels` levels came since the last correction and the tree reaches `depth` below the root; or the
        drafter gave up."""
        if self.is_given_up:  # also if it did so after the caller had counted the levels
            return True
        if self.levels < levels or not depth:
            return self.levels >= levels
        with self._lock:
            return self._tree.deepest >= depth

    def wait(self, levels: int, seconds: float, depth: int = 0) -> None:
        """Wait until `has_grown` holds, for at most this many seconds."""
        deadline = time.monotonic() + seconds
        while not self.has_grown(levels, depth) and (left := deadline - time.monotonic()) > 0:
            self._news.acquire(timeout=left)

    def give_up(self) -> None:
        """End all waiting: the drafter is gone."""
        with self._lock:
            self._give_up()
            self._notify()

    def _sees(self, node: int) -> bool:
        """Whether the target may see a node. A node of B that has children was expanded, so it counts as one of C."""
        is_early = self.visibility.late or node < self._seen
        is_primary = self._tree.roles[node] != Role.SECONDARY
        return is_early and (self.visibility.secondary or is_primary or self._tree.has_children(node))

    def _notify(self) -> None:
        """Wake a waiter; called under the lock."""
        if self._news.locked():
            self._news.release()

    def _give_up(self) -> None:
        self.counts["exhausted"] += 1
        self.levels = _UNLIMITED

    def _move(self, root: int | None, token: int) -> None:
        self.levels = 0
        self.missed = root is None
        if root is None:
            self.epoch += 1
            vocab_size, next_id = self._tree.vocab_size, self._tree.next_id
            self._tree = TokenTree(token, root_id=-self.epoch, next_id=next_id)
            self._tree.vocab_size = vocab_size
        else:
            self._tree = self._tree.below(root)
