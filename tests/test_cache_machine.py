"""Random operations on a candidate cache, compared with a twin that is a table of nodes by id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from machines import DEPTHS, SEARCH
from mutations import MUTATIONS

from outpace.card.cache import Candidate, CandidateCache, CandidateLayer, VisibilityOptions
from outpace.core.tree import Role, TokenTree
from outpace.core.types import Verdict
from outpace.rules.base import follow_picks

VOCAB = 4
SIGHTS = (
    VisibilityOptions(),
    VisibilityOptions(secondary=False),
    VisibilityOptions(late=False),
    VisibilityOptions(chain=True),
    VisibilityOptions(False, False, True),
)
NUMBERS = st.integers(0, 1 << 16)
PROPOSED = st.tuples(NUMBERS, st.integers(0, VOCAB - 1), st.floats(-3.0, -0.01), st.booleans())


class Known(NamedTuple):
    """A live node: below which id, its token, the log of its chance there, its role, and when it came."""

    parent: int | None
    token: int
    chance: float
    role: Role
    time: int


class CacheMachine(RuleBasedStateMachine):
    """A drafter that inserts whatever it likes, and a target that queries, looks again, and goes anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = CandidateCache(0)
        self.root = 0
        self.live = {0: Known(None, 0, 0.0, Role.PRIMARY, 0)}
        self.dead: list[int] = []
        self.next_id, self.time, self.misses = 1, 0, 0
        self.queried: TokenTree | None = None
        self.queried_at = 0

    @initialize(visibility=st.sampled_from(SIGHTS))
    def look(self, visibility: VisibilityOptions) -> None:
        self.cache.visibility = self.visibility = visibility

    def children(self, node: int) -> list[int]:
        return [other for other, known in self.live.items() if known.parent == node]

    def child(self, node: int, token: int) -> int | None:
        return next((other for other in self.children(node) if self.live[other].token == token), None)

    def score(self, node: int) -> float:
        """The log of the chance that the target walks from the root to this node."""
        known = self.live[node]
        return 0.0 if node == self.root or known.parent is None else known.chance + self.score(known.parent)

    def sees(self, node: int) -> bool:
        """Whether the target may see it: what came while it ran, and what the drafter did not take up, not always."""
        known = self.live[node]
        is_taken = known.role is Role.PRIMARY or bool(self.children(node))
        return (self.visibility.late or known.time <= self.queried_at) and (self.visibility.secondary or is_taken)

    @rule(proposed=st.lists(PROPOSED, min_size=1, max_size=6))
    def insert(self, proposed: Sequence[tuple[int, int, float, bool]]) -> None:
        """New nodes below any that live, that are dead, or that came with them."""
        self.time += 1
        nodes, added, orphans = [], 0, 0
        for number, token, chance, is_primary in proposed:
            parents = [*self.live, *self.dead[-3:], *(node.node_id for node in nodes)]
            candidate = Candidate(
                self.next_id,
                parents[number % len(parents)],
                token,
                chance,
                Role.PRIMARY if is_primary else Role.SECONDARY,
            )
            self.next_id += 1
            nodes.append(candidate)
            if candidate.parent_id not in self.live:
                orphans += 1
            elif self.child(candidate.parent_id, token) is None:
                self.live[candidate.node_id] = Known(candidate.parent_id, token, chance, candidate.role, self.time)
                added += 1
            if candidate.node_id not in self.live:
                self.dead.append(candidate.node_id)
        before = self.cache.layers, self.cache.counts["orphan"]
        assert self.cache.insert(CandidateLayer(self.root, nodes)) == added
        assert (self.cache.layers, self.cache.counts["orphan"]) == (before[0] + (added > 0), before[1] + orphans)

    @rule(is_stale=st.booleans())
    def offer_nothing(self, is_stale: bool) -> None:
        before = self.cache.counts["exhausted"]
        assert self.cache.insert(CandidateLayer(self.root + 1000 * is_stale, ())) == 0
        assert self.cache.counts["exhausted"] == before + (not is_stale)
        self.cache.wait(10**6 if not is_stale else 0, 60.0)  # who waits is let go

    @precondition(lambda self: self.queried is None)
    @rule(budget=st.integers(0, 9))
    def query(self, budget: int) -> None:
        self.queried_at = self.time
        tree = self.queried = self.cache.query(budget)
        self.check(tree)
        visible = [node for node in self.live if node == self.root or self.sees(node)]
        if self.visibility.chain:
            assert all(parent == node - 1 for node, parent in enumerate(tree.parents))
            ends = [node for node in self.children(tree.ids[-1]) if self.sees(node)]
            assert len(tree) == max(budget, 1) or not ends
            for above, below in zip(tree.ids, tree.ids[1:], strict=False):
                best = max(self.score(node) for node in self.children(above) if self.sees(node))
                assert self.score(below) >= best - 1e-9
            return
        assert len(tree) == min(max(budget, 1), len(visible))
        left = [self.score(node) for node in visible if node not in tree.ids]
        assert min(tree.scores) >= max(left, default=-1e9) - 1e-9

    def check(self, tree: TokenTree) -> None:
        """A tree of live nodes that the target may see, as they are."""
        assert tree.ids[0] == self.root
        assert len(set(tree.ids)) == len(tree)
        for node in range(1, len(tree)):
            known = self.live[tree.ids[node]]
            assert tree.ids[tree.parents[node]] == known.parent
            assert (tree.tokens[node], tree.roles[node]) == (known.token, known.role)
            assert tree.scores[node] == pytest.approx(self.score(tree.ids[node]), abs=1e-9)
            assert self.sees(tree.ids[node])

    @precondition(lambda self: self.queried is not None)
    @rule(picks=st.lists(st.integers(0, 2 * VOCAB), min_size=10, max_size=10))
    def judge(self, picks: Sequence[int]) -> None:
        """The target's pass is over: it looks for late children, walks, and corrects."""
        tree, self.queried = self.queried, None
        assert tree is not None
        verified = len(tree)
        late = self.cache.add_late_children(tree)
        self.check(tree)
        judged = tree.ids[:verified]  # a late node has no row: its own children wait
        new = [node for node, known in self.live.items() if known.time > self.queried_at and known.parent in judged]
        assert tree.ids[verified:] == [node for node in new if self.sees(node)]
        assert late == len(tree) - verified
        choices = [pick % VOCAB for pick in picks[:verified]]  # half of them, the first child's token
        for node, pick in enumerate(picks[:verified]):
            if pick >= VOCAB and tree.children(node):
                choices[node] = tree.tokens[tree.children(node)[0]]
        self.correct(tree, follow_picks(tree, choices), verified)

    def correct(self, tree: TokenTree, verdict: Verdict, verified: int) -> None:
        path = [tree.ids[node] for node in verdict.path]
        written = [self.live[node].token for node in path[1:]]
        root, kind = path[-1], "late"
        if verdict.next_token is not None:
            written.append(verdict.next_token)
            found = self.child(path[-1], verdict.next_token)
            is_hit = found is not None and self.sees(found)
            kind = self.live[found].role.value if found is not None and is_hit else "miss"
            self.misses += not is_hit
            root = found if found is not None and is_hit else -self.misses
        else:
            path = path[:-1]
        said, correction = self.cache.correct(tree, verdict, verified)
        assert said == kind
        assert correction == (path, written, root, kind != "miss")
        self.move(root, written[-1])
        assert (self.cache.missed, self.cache.layers) == (kind == "miss", 0)

    def move(self, root: int, token: int) -> None:
        """What does not hang below the new root is dead."""
        below = {root} if root in self.live else set()
        for node, known in self.live.items():
            if known.parent in below:
                below.add(node)
        self.dead += [node for node in self.live if node not in below]
        self.live = {node: known for node, known in self.live.items() if node in below}
        self.live.setdefault(root, Known(None, token, 0.0, Role.PRIMARY, self.time))
        self.root = root

    @invariant()
    def the_counts_are_the_twins(self) -> None:
        assert len(self.cache) == len(self.live) - 1
        assert self.cache.epoch == self.cache.counts["miss"] == self.misses
        assert max([0, *self.live]) < self.cache.next_id <= self.next_id


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_cache_is_a_table_of_nodes(depth: settings) -> None:
    run_state_machine_as_test(CacheMachine, settings=depth)


@pytest.mark.parametrize(
    "name",
    [
        "accept a dead child (hung on the root)",
        "correct() re-roots at a sibling",
        "correct() re-roots at a grandchild",
        "query not closed under ancestors",
    ],
)
def test_a_mistake_is_found(name: str) -> None:
    (mutation,) = (mutation for mutation in MUTATIONS if mutation.name == name)
    with mutation.applied(), pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(CacheMachine, settings=SEARCH)
