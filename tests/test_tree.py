"""Token trees: the pure functions over random trees, late children, and what is refused."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
import torch
from doubles import make_rule

from outpace.core.tree import (
    PREFIX,
    Role,
    Siblings,
    TokenTree,
    best_nodes,
    depths,
    positions,
    tree_mask,
)
from outpace.core.types import Verdict
from outpace.rules.base import follow_picks

RULES = ("greedy", "gumbel", "match")
SEEDS = range(60)


def random_tree(seed: int, nodes: int = 30, vocab: int = 6) -> TokenTree:
    """A picked tree whose nodes hang anywhere, some of them probes."""
    chance = random.Random(seed)
    tree = TokenTree(chance.randrange(vocab), root_id=100, next_id=101)
    for _ in range(chance.randrange(nodes)):
        parent = chance.randrange(len(tree))
        score = tree.scores[parent] + math.log(chance.random() + 1e-9)
        role = chance.choice((Role.PRIMARY, Role.SECONDARY, Role.PROBE))
        tree.add(parent, chance.randrange(vocab), score, role)
    return tree


def chain(tokens: Sequence[int]) -> TokenTree:
    tree = TokenTree(tokens[0])
    for node, token in enumerate(tokens[1:]):
        tree.add(node, token, -float(node))
    return tree


def naive_walk(tree: TokenTree, picks: Sequence[int]) -> Verdict:
    """By looking through all nodes for one with the right parent and token."""
    path = [0]
    while path[-1] < len(picks):
        children = [n for n in range(len(tree)) if tree.parents[n] == path[-1] and tree.roles[n] != Role.PROBE]
        right = [node for node in children if tree.tokens[node] == picks[path[-1]]]
        if not right:
            return Verdict(path, picks[path[-1]])
        path.append(right[0])
    return Verdict(path, None)


@pytest.mark.parametrize("seed", SEEDS)
def test_shape_of_random_trees(seed: int) -> None:
    tree = random_tree(seed)
    assert tree.parents[0] == PREFIX
    assert all(tree.parents[node] < node for node in range(len(tree)))
    assert all(tree.scores[node] <= tree.scores[tree.parents[node]] for node in range(1, len(tree)))
    assert len(set(tree.ids)) == len(tree)
    assert tree.next_id > max(tree.ids)
    pairs = [(tree.parents[node], tree.tokens[node]) for node in range(len(tree)) if tree.roles[node] != Role.PROBE]
    assert len(set(pairs)) == len(pairs), "picked siblings carry the same token"
    for node in range(len(tree)):
        assert list(tree.children(node)) == [n for n in range(len(tree)) if tree.parents[n] == node]


@pytest.mark.parametrize("seed", SEEDS)
def test_ancestry_depths_positions_and_mask_agree(seed: int) -> None:
    tree = random_tree(seed)
    mask = tree_mask(tree.parents)
    assert mask.shape == (len(tree), len(tree))
    assert mask.dtype is torch.bool
    for node in range(len(tree)):
        path = tree.path(node)
        assert path[0] == 0
        assert path[-1] == node
        assert all(tree.parents[b] == a for a, b in itertools.pairwise(path))
        assert depths(tree.parents)[node] == tree.depth(node) == len(path) - 1
        assert positions(tree.parents, 7)[node] == 7 + len(path) - 1
        assert mask[node].nonzero().flatten().tolist() == path


def test_mask_of_a_forest_below_the_prefix() -> None:
    parents = [PREFIX, PREFIX, 0, 1, 2]
    expected = [[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [1, 0, 1, 0, 0], [0, 1, 0, 1, 0], [1, 0, 1, 0, 1]]
    assert tree_mask(parents).int().tolist() == expected
    assert depths(parents) == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("seed", SEEDS)
def test_best_nodes_are_the_best_and_closed_under_ancestors(seed: int) -> None:
    tree = random_tree(seed)
    for count in range(1, len(tree) + 2):
        nodes = best_nodes(tree, count)
        assert len(nodes) == min(count, len(tree))
        assert nodes == sorted(set(nodes))
        assert nodes[0] == 0
        assert all(tree.parents[node] in nodes for node in nodes[1:])
        worst = min(tree.scores[node] for node in nodes)
        assert all(tree.scores[node] <= worst for node in range(len(tree)) if node not in nodes)


def test_best_nodes_of_equal_scores_stay_closed() -> None:
    tree = TokenTree(0)
    for parent in (0, 1, 0, 2, 4):
        tree.add(parent, len(tree), 5.0)  # a score above the parent's is cut down to it
    assert set(tree.scores) == {0.0}
    assert [best_nodes(tree, count) for count in (1, 3, 6)] == [[0], [0, 1, 2], [0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("seed", SEEDS)
def test_copy_of_a_subtree(seed: int) -> None:
    tree = random_tree(seed)
    for root in range(len(tree)):
        inside = tree.subtree(root)
        assert inside == [node for node in range(len(tree)) if root in tree.path(node)]
        copy = tree.copy(inside)
        assert copy.tokens == [tree.tokens[node] for node in inside]
        assert copy.ids == [tree.ids[node] for node in inside]
        assert copy.roles[1:] == [tree.roles[node] for node in inside[1:]]
        assert copy.scores == pytest.approx([tree.scores[node] - tree.scores[root] for node in inside])
        assert copy.parents[1:] == [inside.index(tree.parents[node]) for node in inside[1:]]
        assert copy.next_id == tree.next_id
    size = len(tree)
    tree.copy([0]).add(0, 1, -1.0)
    assert len(tree) == size, "a copy's growth shows in the original"


@pytest.mark.parametrize("seed", SEEDS)
def test_copy_of_the_best_nodes_keeps_every_path(seed: int) -> None:
    tree = random_tree(seed)
    nodes = best_nodes(tree, 1 + seed % 9)
    copy = tree.copy(nodes)
    for node in range(len(copy)):
        original = [tree.ids[n] for n in tree.path(nodes[node])]
        assert [copy.ids[n] for n in copy.path(node)] == original


def test_copy_refuses_a_gap() -> None:
    with pytest.raises(ValueError, match="node 2 has no parent"):
        chain([1, 2, 3]).copy([0, 2])


@pytest.mark.parametrize("parent", [-1, 2, 99])
def test_bad_parents_are_refused(parent: int) -> None:
    tree = chain([1, 2])
    with pytest.raises(ValueError, match=f"parent {parent} is not in a tree of 2"):
        tree.add(parent, 3, -1.0)
    assert len(tree) == 2


def test_picked_siblings_are_not_doubled_and_drawn_ones_are() -> None:
    picked, drawn = TokenTree(0), TokenTree(0)
    assert [picked.add(0, 4, -1.0), picked.add(0, 4, -0.5), picked.add(0, 5, -2.0)] == [1, None, 2]
    assert [drawn.add(0, 4, -1.0, siblings=Siblings.DRAWN) for _ in range(2)] == [1, 2]
    assert drawn.tokens == [0, 4, 4]


def test_a_probe_is_never_found_and_hides_nobody() -> None:
    tree = TokenTree(0)
    probe = tree.add(0, 4, -1.0, Role.PROBE)
    assert tree.child(0, 4) is None
    assert tree.add(0, 4, -1.0) == 2 != probe
    assert tree.child(0, 4) == 2


@pytest.mark.parametrize("kind", [Siblings.DRAWN, Siblings.WITHOUT_REPLACEMENT])
def test_mixed_siblings_and_pruned_draws_are_refused(kind: Siblings) -> None:
    tree = chain([1, 2, 3])
    with pytest.raises(ValueError, match="picked"):
        tree.add(0, 5, -1.0, siblings=kind)
    tree.add(2, 5, -1.0, siblings=kind)
    assert best_nodes(tree, 2) == [0, 1], "a chain may be cut: that asks for its length alone"
    tree.add(2, 6, -1.0, siblings=kind)
    with pytest.raises(ValueError, match="picked"):
        best_nodes(tree, 2)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", [Siblings.DRAWN, Siblings.WITHOUT_REPLACEMENT])
def test_rules_refuse_drawn_siblings(rule: str, kind: Siblings) -> None:
    tree = chain([1, 2])
    tree.add(1, 5, -1.0, siblings=kind)
    assert make_rule(rule).walk(tree, [3, 5, 0]) == Verdict([0], 3), "a walk that ends above them sees none"
    with pytest.raises(ValueError, match=kind.label):
        make_rule(rule).walk(tree, [2, 5, 0])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", SEEDS)
def test_walk_equals_the_naive_one_with_late_children(rule: str, seed: int) -> None:
    tree, chance = random_tree(seed), random.Random(seed + 1000)
    for rows in range(1, len(tree) + 1):  # the other nodes are late
        picks = [chance.choice([tree.tokens[n] for n in tree.children(node)] or [0]) for node in range(rows)]
        verdict = make_rule(rule).walk(tree, picks)
        assert verdict == follow_picks(tree, picks) == naive_walk(tree, picks)
        assert (verdict.next_token is None) == (verdict.path[-1] >= rows)
        assert all(node < rows for node in verdict.path[:-1])


def test_late_child_ends_the_path() -> None:
    tree = chain([1, 2, 3, 4])
    assert follow_picks(tree, [2, 3, 4, 9]) == Verdict([0, 1, 2, 3], 9)
    assert follow_picks(tree, [2, 3]) == Verdict([0, 1, 2], None)
    assert follow_picks(tree, [2, 7]) == Verdict([0, 1], 7)
    assert follow_picks(tree, [2]) == Verdict([0, 1], None), "a late node has no row, so its own children wait"


@pytest.mark.parametrize("seed", SEEDS)
def test_children_hung_together_stand_as_if_added_one_by_one(seed: int) -> None:
    one, other, chance = random_tree(seed), random_tree(seed), random.Random(seed)
    places = [(parent, token) for parent in range(len(one)) for token in range(6)]
    chosen = chance.sample(places, min(len(places), 9))
    children = [(chance.uniform(-9.0, 0.5), parent, token) for parent, token in chosen]
    for place, (score, parent, token) in enumerate(children):
        one.add(parent, token, score, Role.PRIMARY if place < 4 else Role.SECONDARY)
    other.attach_children(children, 4)
    assert vars(other) == vars(one)


def test_children_that_cannot_be_hung_are_refused() -> None:
    tree = TokenTree(1)
    with pytest.raises(ValueError, match="path score of token 3 is not a number"):
        tree.attach_children([(math.nan, 0, 3)], 1)
    tree = TokenTree(1)
    tree.add(0, 2, -1.0, siblings=Siblings.DRAWN)
    with pytest.raises(ValueError, match="children of node 0 are drawn, not picked"):
        tree.attach_children([(-1.0, 0, 3)], 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_lies_below_the_bound_is_never_verified(seed: int) -> None:
    """A tree that leaves it out has the same best nodes as one that lets it grow."""
    chance = random.Random(seed)
    whole, pruned = TokenTree(0), TokenTree(0)
    pruned.max_nodes = chance.randrange(2, 12)
    steps: dict[tuple[int, ...], float] = {}  # by path: what a model would say of its last token
    for _ in range(5):
        parents = {tuple(tokens_to(whole, node)): node for node in range(len(whole))}
        beside = {tuple(tokens_to(pruned, node)): node for node in range(len(pruned))}
        some = chance.sample(sorted(parents), min(4, len(parents)))
        drawn = [
            (path, token, steps.setdefault((*path, token), chance.uniform(-3.0, 0.0)))
            for path in some
            for token in range(3)
        ]
        whole.attach_children([(whole.scores[parents[p]] + s, parents[p], t) for p, t, s in drawn], 4)
        there = [(pruned.scores[beside[p]] + s, beside[p], t) for p, t, s in drawn if p in beside]
        pruned.attach_children(there, 4)
    best, own = best_nodes(whole, pruned.max_nodes), best_nodes(pruned, pruned.max_nodes)
    assert {tuple(tokens_to(whole, node)) for node in best} == {tuple(tokens_to(pruned, node)) for node in own}
    assert len(pruned) < len(whole)


def tokens_to(tree: TokenTree, node: int) -> list[int]:
    return [tree.tokens[other] for other in tree.path(node)]
