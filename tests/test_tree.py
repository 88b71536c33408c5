"""Token trees: the pure functions over random trees, late children, and what is refused."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
import torch
from doubles import make_rule
from outpace_kernels import OfferMap, PickModel, SlotMap, TopKRows, attach_offers, choose_frontiers

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
from outpace.rules.greedy import Greedy

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


def test_picked_siblings_are_not_doubled_and_drawn_ones_are() -> None:
    picked, drawn = TokenTree(0), TokenTree(0)
    assert [picked.add(0, 4, -1.0), picked.add(0, 4, -0.5), picked.add(0, 5, -2.0)] == [1, None, 2]
    assert [drawn.add(0, 4, -1.0, siblings=Siblings.DRAWN) for _ in range(2)] == [1, 2]
    assert drawn.tokens == [0, 4, 4]


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


def test_late_child_ends_the_path() -> None:
    tree = chain([1, 2, 3, 4])
    assert Greedy().walk(tree, [2, 3, 4, 9]) == Verdict([0, 1, 2, 3], 9)
    assert Greedy().walk(tree, [2, 3]) == Verdict([0, 1, 2], None)
    assert Greedy().walk(tree, [2, 7]) == Verdict([0, 1], 7)
    assert Greedy().walk(tree, [2]) == Verdict([0, 1], None), "a late node has no row, so its own children wait"


def test_children_of_late_children_wait_too() -> None:
    whole = chain([1, 2])
    seen = whole.copy([0, 1])
    whole.add(whole.add(1, 3, -3.0), 4, -4.0)
    seen.adopt(whole, 2, True)
    assert [*seen.tokens] == [1, 2, 3], "a late child has no row"


NOWHERE = (-2, -1, 2, 10**9)


@pytest.mark.parametrize("node", NOWHERE)
@pytest.mark.parametrize("name", ["children", "has_children", "path", "path_tokens", "depth", "siblings_of", "subtree"])
def test_a_node_that_is_not_there_is_refused(name: str, node: int) -> None:
    with pytest.raises(ValueError, match="not in a tree of 2 nodes"):
        getattr(chain([1, 2]), name)(node)


@pytest.mark.parametrize("node", NOWHERE)
def test_what_would_break_a_tree_is_refused(node: int) -> None:
    tree, other = chain([1, 2]), SlotMap()
    assert choose_frontiers([other], [chain([1, 2, 3])], [1], [-9.0], [9]) == [[0]]
    for refused in (
        lambda: tree.child(node, 1),
        lambda: tree.copy([node]),
        lambda: tree.copy([0, node]),
        lambda: tree.add(node, 5, -1.0),
        lambda: tree.add(0, 5, -1.0, siblings=9),
        lambda: tree.add(0, 5, -1.0, role=7),
        lambda: tree.scores.__setitem__(1, math.nan),
        lambda: choose_frontiers([other], [tree], [1], [-9.0], [9]),
    ):
        with pytest.raises(ValueError, match=r"not|no |another"):
            refused()
    assert Greedy().walk(tree, [2**32 + 2]) == Verdict([0], 2**32 + 2)


def test_a_proposal_for_a_child_that_is_there_raises_the_branch_below_it() -> None:
    """A draft model that agrees with a branch of lookups makes all of it likelier, and is named as its source."""
    tree, picks, slots = TokenTree(1), PickModel(), SlotMap()
    tree.current_source = "ngram"
    tree.chain(0, [5, 6, 7], [-2.0, -2.5, -4.0])
    tree.add(0, 8, -1.0)
    picks.restore(1.0, 0.8, 1.0, 1.0, 1.0)
    assert choose_frontiers([slots], [tree], [1], [-9.0], [9]) == [[0]]
    slots.expand(tree, [0], 0, 0)
    tree.current_source = "model"
    rows = TopKRows([([5, 8], [0.0, -9.0])])
    assert attach_offers([tree], [[0]], rows, [OfferMap()], [picks], [2], [2]) == [2]
    assert len(tree) == 5
    raised = tree.scores[1]
    assert raised == pytest.approx(math.log(0.8), abs=1e-3)
    assert [*tree.scores][2:] == pytest.approx([raised - 0.5, raised - 2.0, -1.0])
    assert [*tree.sources][1:] == ["model", "ngram", "ngram", "ngram"], "a child that was likelier keeps its source"
    assert choose_frontiers([slots], [tree], [1], [-9.0], [9]) == [[1]], "the order of expansion follows the scores"


@pytest.mark.parametrize("token", [1 << 32, -1])
def test_an_offer_of_no_token_is_refused(token: int) -> None:
    rows = TopKRows([([3, token], [-0.5, -0.7])])
    with pytest.raises(ValueError, match=f"no token has the id {token}"):
        attach_offers([chain([1, 2])], [[1]], rows, [OfferMap()], [PickModel()], [1], [2])


def test_batch_calls_refuse_none() -> None:
    tree, rows = chain([1, 2]), TopKRows([([3], [-0.5])])
    whole = [[tree], [OfferMap()], [PickModel()]]
    assert attach_offers(whole[0], [[1]], rows, whole[1], whole[2], [1], [1]) == [1]
    for place in range(3):
        trees, maps, picks = (*whole[:place], [None], *whole[place + 1 :])
        with pytest.raises(ValueError, match="has None in it"):
            attach_offers(trees, [[1]], rows, maps, picks, [1], [1])
    for slots, trees in (([None], [tree]), ([SlotMap()], [None])):
        with pytest.raises(ValueError, match="has None in it"):
            choose_frontiers(slots, trees, [1], [-9.0], [9])
