"""Groups of drawn children in a tree: distinct nodes, repeats remembered, whole groups kept or cut."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from doubles import make_request
from enumerating import rule_of

from outpace.core.distribution import RandomSource, TokenDistribution
from outpace.core.errors import UserError
from outpace.core.logits import SparseLogits
from outpace.core.tree import DrawnChildren, TokenTree, best_nodes
from outpace.core.types import Request, Row
from outpace.drafters._model_drafter import DrawCounts, proposed
from outpace.drafters.model import Options

Q = TokenDistribution(np.array([0.5, 0.3, 0.2, 0.0]))


def grown(seed: int = 0, groups: int = 8) -> TokenTree:
    """A tree of drawn groups, some with repeats, below nodes that have none."""
    chance, tree = random.Random(seed), TokenTree(9)
    tree.draw(0, DrawnChildren(Q, (0, 1, 0)))
    for _ in range(groups):
        node = chance.choice([n for n in range(len(tree)) if n not in tree.drawn])
        tree.draw(node, DrawnChildren(Q, tuple(chance.choices((0, 1, 2), k=chance.randint(1, 4)))))
    return tree


def test_children_are_distinct_and_draws_are_remembered() -> None:
    tree = TokenTree(9)
    assert tree.draw(0, DrawnChildren(Q, (1, 0, 1, 1))) == 2
    assert [tree.tokens[node] for node in tree.children(0)] == [1, 0]
    assert tree.drawn[0].tokens == (1, 0, 1, 1)
    assert tree.scores[1:] == pytest.approx([math.log(0.3), math.log(0.5)])
    with pytest.raises(ValueError, match="children already"):
        tree.draw(0, DrawnChildren(Q, (2,)))


@pytest.mark.parametrize("seed", range(6))
def test_pruning_keeps_the_first_groups_whole_and_counts_draws(seed: int) -> None:
    tree = grown(seed)
    for count in range(1, 40):
        nodes = best_nodes(tree, count)
        copy = tree.copy(nodes)
        kept = [drawn for drawn in copy.drawn.values() if drawn.tokens]
        drawn = list(tree.drawn.values())
        assert [group.tokens for group in kept] == [group.tokens for group in drawn[: len(kept)]]
        draws = 1 + sum(len(group.tokens) for group in kept)
        assert draws <= count
        assert len(kept) == len(drawn) or draws + len(drawn[len(kept)].tokens) > count
        for node, group in copy.drawn.items():
            assert {copy.tokens[child] for child in copy.children(node)} == set(group.tokens)
            assert group.q is Q


def test_what_is_cut_does_not_depend_on_what_was_drawn() -> None:
    kept = set()
    for first in (0, 1):
        for second in (0, 1):
            tree = TokenTree(9)
            tree.draw(0, DrawnChildren(Q, (first, second)))
            tree.draw(1, DrawnChildren(Q, (0,)))
            kept.add(sum(len(group.tokens) for group in tree.copy(best_nodes(tree, 3)).drawn.values()))
    assert kept == {2}, "with repeats there would be room for one more, and that would be a bias"


def test_q_of_a_leaf_stays_and_may_be_asked_for() -> None:
    tree = TokenTree(9)
    for node in range(3):
        tree.draw(node, DrawnChildren(Q, (node,)))
    cut = tree.copy(best_nodes(tree, 2))
    assert [(group.q is Q, group.tokens) for group in cut.drawn.values()] == [(True, (0,)), (True, ())]
    assert best_nodes(tree, 9) == [0, 1, 2, 3]
    assert best_nodes(tree, 9, q_at_leaves=True) == [0, 1, 2]
    assert best_nodes(tree, 1, q_at_leaves=True) == [0]


def request_of(rule: str, chance: RandomSource | None = None) -> Request:
    return make_request((1,), rule_of(rule, chance), temperature=1.0)


def test_q_is_what_was_drawn_from_though_the_draft_writes_on() -> None:
    """A captured pass has the same tensor for all its steps."""
    scores, request = torch.randn(1, 40), request_of("rejection")
    q, _ = proposed(SparseLogits(scores, None, 40), Row(request, (1,)))
    before = q.to_dense(40).copy()
    q.forget()
    scores.zero_()
    assert (q.to_dense(40) == before).all()


def test_a_token_that_was_drawn_twice_stands_for_two_branches() -> None:
    tree = TokenTree(9)
    tree.draw(0, DrawnChildren(Q, (1, 0, 1)))
    request = request_of("multi_round")
    draws = DrawCounts.read("3, 2")
    assert [draws.below(tree, node, request) for node in range(3)] == [3, 4, 2]
    assert draws.below(tree, 1, request_of("rejection")) == 1


@pytest.mark.parametrize("draws", ["", "2,", "0", "1,65", "a", "1.5", "-1"])
def test_wrong_draws_are_refused(draws: str) -> None:
    with pytest.raises(UserError, match="draws is"):
        Options(draws=draws)
