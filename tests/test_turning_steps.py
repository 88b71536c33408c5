"""Draft steps in one graph that are told meanwhile where the target went: they turn, and the trees are those of single
steps."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_draft_steps import Pair, as_on_a_device, drafter_of, exact, request_of, words

from outpace.card.cache import CandidateCache, Correction
from outpace.card.thread import ThreadWorker
from outpace.core.multi_step import MAX_UPDATE_TOKENS, RootUpdate
from outpace.core.tree import TokenTree
from outpace.core.types import Observation, Request
from outpace.drafters import model as model_drafter
from outpace.drafters._multi_step import RootMove
from outpace.models.llama.cuda.multi_step_runtime import SteppingLlama
from outpace.models.llama.cuda.step_choice import NodeColumns, RootMailbox, RootTracker

__all__ = ["as_on_a_device"]  # for all tests here, too
STEPS = 8
BEFORE = -1  # a graph's first forward: what a device can be told at a known time
AFTER = -2  # the graph was begun, which a device works on meanwhile


class Told(Pair):
    """As Pair; the second drafter is told of walks while a graph runs, before its forwards of these numbers, or before
    all of it."""

    def __init__(self, model: SteppingLlama, requests: Sequence[Request], **options: Any) -> None:
        super().__init__(model, requests, STEPS, **options)
        self.drafters[1].begin_concurrent()
        self.due: dict[int, list[tuple[int, RootMove]]] = {}  # by the forward: request and walk
        self._forward, self._roots = -1, 0
        forward, replay = model._step_forward, model.captures.replay

        def told(*given: Any) -> Any:
            if self._forward >= 0:  # not while the graph is captured
                for number, walk in self.due.pop(self._forward, []):
                    self.drafters[1].on_root_moved(self.states[1][number], *walk)
                self._forward += 1
            return forward(*given)

        def counted(key: Any) -> None:
            self._forward = 0 if key[0] == "steps" else -1
            for number, walk in self.due.pop(BEFORE, []) if key[0] == "steps" else ():
                self.drafters[1].on_root_moved(self.states[1][number], *walk)
            replay(key)
            for number, walk in self.due.pop(AFTER, []) if key[0] == "steps" else ():
                self.drafters[1].on_root_moved(self.states[1][number], *walk)
            self._forward = -1

        model._step_forward, model.captures.replay = told, counted  # type: ignore[method-assign]

    def walk(self, number: int, node: int, token: int, before: RootMove | None = None) -> RootMove:
        """The target walks down to a node and writes this token; or it writes it behind what it wrote `before`."""
        tree = self.trees[0][number]
        if before is not None:
            self._roots -= 1
            return RootMove([before.root_id], [token], self._roots)
        nodes = list(tree.ancestry(node))[::-1]
        child = tree.child(node, token)
        if child is None:
            self._roots -= 1
        tokens = [*(tree.tokens[node] for node in nodes[1:]), token]
        return RootMove([tree.ids[node] for node in nodes], tokens, self._roots if child is None else tree.ids[child])

    def correct(self, number: int, walk: RootMove) -> None:
        """Both drafters follow, as they would when they read their mail."""
        for drafter, states, trees in zip(self.drafters, self.states, self.trees, strict=True):
            tree = trees[number]
            if walk.root_id in tree.ids:
                after = tree.copy(tree.subtree(tree.ids.index(walk.root_id)))
            else:
                after = TokenTree(walk.tokens[-1], walk.root_id, tree.next_id)
            drafter.observe(states[number], Observation(walk.path, walk.tokens, after))
            trees[number] = after


def told_of(rule: str = "greedy", model: SteppingLlama | None = None, **options: Any) -> Told:
    """A tree that one graph has grown; the next growth runs another."""
    model = exact() if model is None else model
    told = Told(model, [request_of(rule, words(model, 20))], floor=0.0, **options)
    for _ in range(STEPS):
        told.grow([0])
    assert told.forwards == [STEPS, 1]
    return told


def places(told: Told) -> tuple[list[int], list[int]]:
    """Nodes of the tree that were expanded, and leaves that were not, the root left out."""
    tree, slots = told.tree, told.states[1][0].slots
    known = [node for node in range(1, len(tree)) if tree.ids[node] in slots]
    return known, [node for node in tree.leaves() if tree.ids[node] not in slots]


def unlike(tree: TokenTree, node: int) -> int:
    """A token that does not stand below a node."""
    below = {tree.tokens[child] for child in tree.children(node)}
    return next(token for token in range(5, 100) if token not in below)


def walk_of(told: Told, kind: str) -> RootMove:
    """A walk whose root was expanded, is a leaf, or is new, below a node or below a leaf."""
    tree, (expanded, leaves) = told.tree, places(told)
    if kind in ("expanded", "leaf"):
        node = expanded[len(expanded) // 2] if kind == "expanded" else leaves[len(leaves) // 2]
        return told.walk(0, tree.parents[node], tree.tokens[node])
    node = {"below the root": 0, "below a node": expanded[-1], "below a leaf": leaves[-1]}[kind]
    return told.walk(0, node, unlike(tree, node))


KINDS = {"expanded": 3, "leaf": 3, "below the root": 4, "below a node": 4, "below a leaf": 3}
"""How many of the steps serve the new root at least. Of eight three were chosen when the walk comes; what the fit
learns from the walk may put the last of the others into another order."""


def served(told: Told, walk: RootMove) -> int:
    """Growths below the new root without a forward. The trees are compared at each."""
    told.grow([0])
    assert told.forwards == [STEPS + 1, 2]
    assert not told.due
    told.correct(0, walk)
    count = -1
    while told.forwards[1] == 2:
        told.grow([0])
        count += 1
    return count


@pytest.mark.parametrize("rule", ["greedy", "gumbel", "match"])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_that_are_told_go_where_the_target_went(kind: str, rule: str) -> None:
    told = told_of(rule)
    walk = walk_of(told, kind)
    told.due = {1: [(0, walk)]}
    assert KINDS[kind] <= served(told, walk) <= STEPS - 3
    assert len(told.tree) > KINDS[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_steps_may_be_told_before_the_first_of_them(kind: str) -> None:
    told = told_of()
    walk = walk_of(told, kind)
    told.due = {BEFORE: [(0, walk)]}
    assert served(told, walk) >= KINDS[kind]


@pytest.mark.parametrize("kind", ["below the root", "below a node", "below a leaf"])
def test_steps_that_are_not_told_have_to_be_taken_anew(kind: str) -> None:
    """So the test above is one of what is told."""
    told = told_of()
    assert served(told, walk_of(told, kind)) == 0


def _of_another_place(goal: Any) -> Any:
    return lambda course, columns: (lambda found: found._replace(bits=found.bits & 1))(goal(course, columns))


def _one_deeper(goal: Any) -> Any:
    return lambda course, columns: (lambda found: found._replace(depth=found.depth + 1))(goal(course, columns))


@pytest.mark.parametrize("change", [_of_another_place, _one_deeper])
def test_a_mistake_on_the_way_is_noticed(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    monkeypatch.setattr(RootTracker, "goal", change(RootTracker.goal))
    with pytest.raises(AssertionError):
        test_steps_that_are_told_go_where_the_target_went("below a node", "gumbel")


def test_several_walks_come_in_one_graph() -> None:
    told = told_of()
    first = walk_of(told, "below a node")
    second = told.walk(0, 0, 9, first)
    third = told.walk(0, 0, 11, second)
    told.due = {1: [(0, first)], 2: [(0, second)], 4: [(0, third)]}
    told.grow([0])
    for walk in (first, second, third):
        told.correct(0, walk)
    for _ in range(2):  # the root, and the best of what stands below it
        told.grow([0])
    assert told.forwards[1] == 2


def test_two_walks_between_two_steps_count_together() -> None:
    told = told_of("gumbel")
    first = walk_of(told, "below a leaf")
    second = told.walk(0, 0, 9, first)
    told.due = {2: [(0, first), (0, second)]}
    told.grow([0])
    told.correct(0, first)
    told.correct(0, second)
    for _ in range(2):  # the root, and the best of what stands below it
        told.grow([0])
    assert told.forwards[1] == 2


def test_more_tokens_than_steps_are_told_of_are_read_afterwards() -> None:
    told = told_of()
    walks = [walk_of(told, "below the root")]
    for token in range(7, 7 + MAX_UPDATE_TOKENS):
        walks.append(told.walk(0, 0, token, walks[-1]))
    told.due = {1: [(0, walk) for walk in walks]}
    told.grow([0])
    for walk in walks:
        told.correct(0, walk)
    for _ in range(4):
        told.grow([0])


def test_what_is_said_of_another_root_is_not_heard() -> None:
    """A walk that comes too late, when the steps were begun with what it says."""
    told = told_of()
    known, _ = places(told)
    stale = RootMove([told.tree.ids[known[0]]], [9], -77)
    told.due = {1: [(0, stale)]}
    told.grow([0])
    assert told.forwards[1] == 2
    for _ in range(STEPS - 1):
        told.grow([0])
    assert told.forwards[1] == 2, "the graph went on as it was"


def test_what_is_said_before_the_steps_are_under_way_waits_for_them() -> None:
    """Also what follows it: a drafter that reads its mail just before does not hear of the first."""
    told = told_of()
    first = walk_of(told, "below a node")
    second = told.walk(0, 0, 9, first)
    told.drafters[1].on_root_moved(told.states[1][0], *first)
    told.due = {1: [(0, second)]}
    told.grow([0])
    for walk in (first, second):
        told.correct(0, walk)
    for _ in range(3):
        told.grow([0])
    assert told.forwards[1] == 2


def test_what_was_observed_is_not_said_again() -> None:
    told = told_of()
    walk = walk_of(told, "below a node")
    told.drafters[1].on_root_moved(told.states[1][0], *walk)
    told.correct(0, walk)
    assert not told.states[1][0].multi_step.heard
    for _ in range(STEPS):
        told.grow([0])
    assert told.forwards[1] == 2, "a graph of its own, which nobody turned"


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_that_is_nearly_full_leaves_room_below_a_new_root(kind: str) -> None:
    """Nodes of what stood before are not counted any more."""
    told = told_of(tree_nodes=170)
    walk = walk_of(told, kind)
    told.due = {1: [(0, walk)]}
    assert served(told, walk) >= 3


def test_a_node_that_comes_by_another_id_is_the_same() -> None:
    """As where a layer was on its way when the target went to one of its nodes."""
    told = told_of()
    tree, (_, leaves) = told.tree, places(told)
    leaf = max(leaves, key=tree.scores.__getitem__)
    walk = told.walk(0, tree.parents[leaf], tree.tokens[leaf])._replace(root_id=-9)
    told.due = {1: [(0, walk)]}
    assert served(told, walk) >= 3


@pytest.mark.parametrize("seed", [3, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(20))])
@pytest.mark.parametrize("rule", ["greedy", "gumbel"])
def test_whatever_is_told_and_when_the_trees_are_those_of_single_steps(rule: str, seed: int) -> None:
    model, rng = exact(), random.Random(seed)
    requests = [request_of(rule, words(model, 5 + 9 * number, number), number) for number in range(3)]
    told = Told(model, requests, tree_nodes=90, draft_window=12 if seed % 2 else 0)
    for _ in range(50):
        some = sorted(rng.sample(range(3), rng.randrange(1, 4)))
        said: list[tuple[int, RootMove]] = []
        told.due = {}
        for number in some:
            if rng.random() < 0.6:
                tree = told.trees[0][number]
                node = rng.randrange(len(tree))
                below = [tree.tokens[child] for child in tree.children(node)]
                token = rng.choice(below) if below and rng.random() < 0.6 else rng.randrange(model.vocab_size)
                walks = [told.walk(number, node, token)]
                if walks[0].root_id < 0 and rng.random() < 0.5:
                    walks.append(told.walk(number, 0, rng.randrange(model.vocab_size), walks[0]))
                said += [(number, walk) for walk in walks]
                at = rng.randrange(STEPS)
                for walk in walks:
                    told.due.setdefault(at, []).append((number, walk))
                    at = rng.randrange(at, STEPS)
        told.grow(some)
        for number, walk in said:
            told.correct(number, walk)
    assert told.forwards[1] < told.forwards[0]


def test_what_is_read_while_it_is_written_is_passed_over() -> None:
    """Any part of it that is missing shows in the sum; what was whole before goes on to count."""
    box = RootMailbox(1, 99, torch.device("cpu"))
    bits = torch.zeros(1, 256, 4, dtype=torch.int64)
    bits[0, :, 0] = torch.arange(256) + 1
    course = RootTracker(box, bits, torch.zeros(1, 256, dtype=torch.int64))
    columns = [torch.zeros(1, 3, dtype=torch.int64) for _ in range(2)]
    nothing = NodeColumns(columns[0], torch.zeros(1, 3, 4, dtype=torch.int64), columns[1] - 1, columns[0].double())
    assert not course.goal(nothing).is_told
    box.write(0, RootUpdate(7, -0.5, (3, 200)))
    whole = box._host.clone()
    goal = course.goal(nothing)
    assert (goal.is_told.item(), goal.slot.item(), goal.score.item(), goal.token.item()) == (True, 7, -0.5, 3)
    box.write(0, RootUpdate(8, -1.5, (4,)))
    after = box._host.clone()
    for column in range(after.shape[1]):
        if whole[0, column] != after[0, column]:
            box._host.copy_(after)
            box._host[0, column] = whole[0, column]
            assert course.goal(nothing).slot.item() == 7, f"column {column} was not written yet"
    box._host.copy_(after)
    assert course.goal(nothing).slot.item() == 8


def test_a_worker_in_a_thread_turns_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph of a real worker waits, within its steps, for the correction that another thread sends."""
    model = exact()
    request = request_of("greedy", words(model, 20))
    sent, begun = threading.Event(), threading.Event()
    forward, replay, is_running, graphs = model._step_forward, model.captures.replay, [False], []

    def waiting(*given: Any) -> Any:
        if is_running[0] and len(graphs) == 1 and not begun.is_set():
            begun.set()
            assert sent.wait(60)
        return forward(*given)

    def counted(key: Any) -> None:
        is_running[0] = key[0] == "steps"
        graphs.extend([key] if is_running[0] else [])
        replay(key)
        is_running[0] = False

    model._step_forward, model.captures.replay = waiting, counted  # type: ignore[method-assign]
    drafter: model_drafter.ModelDrafter = drafter_of(model, STEPS, floor=0.0)
    turned: list[RootUpdate] = []
    write = RootMailbox.write

    def noted(box: RootMailbox, text: int, moved: RootUpdate) -> None:
        turned.append(moved)
        write(box, text, moved)

    monkeypatch.setattr(RootMailbox, "write", noted)
    worker = ThreadWorker(drafter)
    try:
        cache = CandidateCache(request.prompt[-1])
        worker.open(0, request, cache)
        assert begun.wait(60)
        worker.correct(0, Correction([0], [9], -1, False))
        sent.set()
        cache.wait(1, 60.0)
    finally:
        sent.set()
        worker.close()
    assert worker.failure is None
    assert turned == [RootUpdate(0, 0.0, (9,))]
