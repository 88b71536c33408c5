"""The native token tree against its slow twin, over random operations."""

from __future__ import annotations

import pickle

import pytest
import tree_twin
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from outpace_kernels import OfferMap, PickModel, SlotMap, TopKRows, attach_offers, choose_frontiers
from tree_twin import TreeTwin

from outpace.core.tree import PREFIX, Role, TokenTree

TOKENS, SCORES = st.integers(0, 6), st.floats(-6.0, 0.5, width=32)
FACTORS = st.dictionaries(st.sampled_from("abc"), st.sampled_from([0.0, 0.5, 1.0, 2.0]))
COLUMNS = ("tokens", "parents", "scores", "roles", "ids", "sources")


class TreeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tree, self.twin = TokenTree(3), TreeTwin(3)
        self.slots, self.closed = SlotMap(), dict[int, int]()

    def both(self, name: str, *given: object) -> None:
        assert getattr(self.tree, name)(*given) == getattr(self.twin, name)(*given)

    @rule(node=st.integers(0, 99), token=TOKENS, score=SCORES, role=st.sampled_from(Role))
    def add(self, node: int, token: int, score: float, role: Role) -> None:
        self.both("add", node % len(self.twin), token, score, role)

    @rule(given=st.lists(st.tuples(SCORES, st.integers(0, 99), TOKENS), max_size=8), primary=st.integers(0, 4))
    def attach_children(self, given: list[tuple[float, int, int]], primary: int) -> None:
        distinct = {(node % len(self.twin), token): score for score, node, token in given}
        self.both("attach_children", [(score, *place) for place, score in distinct.items()], primary)

    @rule(
        nodes=st.lists(st.integers(0, 99), min_size=1, max_size=3),
        values=st.lists(SCORES, min_size=1, max_size=5),
        fit=st.tuples(st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([0.3, 0.9])),
        width=st.integers(1, 5),
        most=st.integers(0, 9),
    )
    def attach_offers(
        self, nodes: list[int], values: list[float], fit: tuple[float, float], width: int, most: int
    ) -> None:
        frontier = sorted({node % len(self.twin) for node in nodes})
        values = sorted(values, reverse=True)
        offers = [([(node + rank) % 7 for rank in range(len(values))], values) for node in frontier]
        picks, known = PickModel(), OfferMap()
        picks.restore(*fit, 1.0, 1.0, 1.0)
        before = len(self.tree) + self.tree.num_confirmed
        added = attach_offers([self.tree], [frontier], TopKRows(offers), [known], [picks], [width], [most])
        assert added == [len(self.tree) + self.tree.num_confirmed - before]
        assert [known.get(self.tree.ids[node]) for node in frontier] == offers
        tree_twin.attach_offers(self.twin, frontier, offers, fit, width, most)

    @rule(node=st.integers(0, 99), tokens=st.lists(TOKENS, min_size=1, max_size=4))
    def chain(self, node: int, tokens: list[int]) -> None:
        node %= len(self.twin)
        if self.twin.child(node, tokens[0]) is None and not any(
            self.twin.tokens[child] == tokens[0] for child in self.twin.children(node)
        ):
            above = self.twin.scores[node]
            self.both("chain", node, tokens, [above - number for number in range(len(tokens))])

    @rule(most=st.none() | st.integers(1, 20), source=st.sampled_from("ab"))
    def limit(self, most: int | None, source: str) -> None:
        for tree in (self.tree, self.twin):
            tree.max_nodes, tree.current_source = most, source

    @precondition(lambda self: len(self.twin) > 1)
    @rule(node=st.integers(0, 99))
    def move_root(self, node: int) -> None:
        nodes = self.twin.subtree(node % len(self.twin))
        assert self.tree.subtree(nodes[0]) == nodes
        most, source = self.twin.max_nodes, self.twin.current_source
        self.tree, self.twin = self.tree.below(nodes[0]), self.twin.copy(nodes)
        self.limit(most, source)
        path = self.twin.ids[:1]
        expected = [self.closed[path[0]]] if path[0] in self.closed else []
        live = [self.closed[node_id] for node_id in self.twin.ids if node_id in self.closed]
        assert self.slots.follow(path, self.tree) == (expected, live)
        living = [node_id for node_id in self.twin.ids if node_id in self.closed]
        self.closed = {node_id: number for number, node_id in enumerate(living)}

    @rule(count=st.integers(0, 30))
    def keep_the_best(self, count: int) -> None:
        best = tree_twin.best_nodes(self.twin, count)
        assert self.tree.best(count) == best
        if best:
            assert [*self.tree.best_copy(count).ids] == [self.twin.ids[node] for node in best]

    @rule(count=st.integers(0, 9))
    def best_scores(self, count: int) -> None:
        leaves = [score for node, score in enumerate(self.twin.scores) if not self.twin.children(node)]
        assert self.tree.best_scores(count) == sorted(self.tree.scores[1:], reverse=True)[:count]
        found = self.tree.best_scores(count, leaves=True)
        expected = sorted(leaves, reverse=True)[:count]
        assert max((abs(a - b) for a, b in zip(found, expected, strict=True)), default=0.0) < 1e-12

    @rule(factors=FACTORS, last_lookup_node=st.integers(0, 99))
    def chances(self, factors: dict[str, float], last_lookup_node: int) -> None:
        expected, last_lookup_node = tree_twin.chances(self.twin, factors, 0.9), last_lookup_node % len(self.twin)
        assert self.tree.chances(factors, 0.9) == pytest.approx(expected, abs=1e-12)
        for with_root in (False, True):
            found = self.tree.parent_chances(expected, "a", last_lookup_node, 0.7, with_root)
            parents = tree_twin.parent_chances(self.twin, expected, "a", last_lookup_node, 0.7, with_root)
            assert found == pytest.approx(parents, abs=1e-12)

    @rule(picks=st.lists(TOKENS, max_size=12))
    def follow(self, picks: list[int]) -> None:
        picks = picks[: len(self.twin)]
        assert self.tree.follow(picks) == tree_twin.follow(self.twin, picks)

    @rule(count=st.integers(1, 4), deepest=st.integers(0, 5))
    def expand(self, count: int, deepest: int) -> None:
        self.slots.reset()
        bound, depths = self.twin.bound(), [self.twin.depth(node) for node in range(len(self.twin))]
        closed, open_nodes = set(self.closed), []
        for node, score in enumerate(self.twin.scores):
            if score >= -5.0 and depths[node] <= deepest and self.twin.ids[node] not in closed:
                open_nodes += [node] if self.twin.roles[node] != Role.PROBE else []
        best = sorted(open_nodes, key=lambda node: (-self.twin.scores[node], node))[:count]
        parents = {self.twin.parents[node] for node in best if node}
        found = choose_frontiers([self.slots], [self.tree], [count], [-5.0], [deepest])[0]
        if all(parent in best or self.twin.ids[parent] in closed for parent in parents):
            assert found == sorted(node for node in best if self.twin.scores[node] >= bound)
            rows, first, above = found, len(self.closed), self.twin.parents
            parents_slots = [self.closed.get(self.twin.ids[above[node]], PREFIX) if node else PREFIX for node in rows]
            self.closed |= {self.twin.ids[node]: first + number for number, node in enumerate(rows)}
            places = {node: first + number for number, node in enumerate(rows)}
            expected = [places.get(above[node], slot) for node, slot in zip(rows, parents_slots, strict=True)]
            tokens, slots = self.slots.expand(self.tree, rows, first, 0)
            assert (tokens, slots) == ([self.twin.tokens[node] for node in rows], expected)
            assert {node_id: self.slots[node_id] for node_id in self.slots.ids()} == self.closed
        else:
            assert not found, "no node is expanded before its parent"

    @rule(first=st.integers(0, 30))
    def copy_through_messages(self, first: int) -> None:
        """What was added from `first` on, inserted into a tree of what was there before."""
        before = self.tree.copy(range(min(max(first, 1), len(self.tree))))
        known = len(before)
        delta = self.tree.delta(known)
        added, orphans = before.insert(pickle.loads(pickle.dumps(delta)))
        assert len(delta) == len(self.tree) - known
        assert orphans == 0
        kept = [number for number, role in enumerate(self.tree.roles) if role != Role.PROBE]
        if len(kept) == len(self.tree):
            assert added == len(self.tree) - known
            assert [*before.ids] == [*self.tree.ids]
            assert max(abs(a - b) for a, b in zip(before.scores, self.tree.scores, strict=True)) < 1e-9

    @invariant()
    def equal(self) -> None:
        for name in COLUMNS:
            mine, other = [*getattr(self.tree, name)], getattr(self.twin, name)
            if name == "scores":
                assert max(abs(a - b) for a, b in zip(mine, other, strict=True)) < 1e-12
            else:
                assert mine == other
        assert (self.tree.next_id, len(self.tree)) == (self.twin.next_id, len(self.twin))
        assert self.tree.leaves() == self.twin.leaves()
        for node in range(len(self.twin)):
            assert self.tree.children(node) == self.twin.children(node)
            assert self.tree.depth(node) == self.twin.depth(node)
            assert self.tree.path(node) == [*self.twin.ancestry(node)][::-1]
            assert self.tree.find(self.tree.ids[node]) == node
        assert abs(self.tree.bound() - self.twin.bound()) < 1e-12 or self.tree.bound() == self.twin.bound()
        assert self.tree.num_confirmed == self.twin.num_confirmed


TreeMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestNativeTree = TreeMachine.TestCase
