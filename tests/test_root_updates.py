"""Multi-step drafting that receives root updates while its graph runs: later steps draft below the new root, and the
trees equal those of single steps."""

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
from outpace.models.llama.cuda.step_choice import NodeColumns, RootMailbox, RootTarget, RootTracker

__all__ = ["as_on_a_device"]  # an automatic fixture
STEPS = 8
BEFORE = -1  # send the update before the graph is replayed
SENT = -3  # hand the update to the drafter before its steps begin
AFTER = -2  # send the update after the replay was launched, while the device may still be running it


class UpdatedPair(Pair):
    """A `Pair` whose second drafter receives root updates while a graph runs: `due` maps the number of a forward, or
    BEFORE or AFTER, to the updates that are sent just before it."""

    def __init__(self, model: SteppingLlama, requests: Sequence[Request], **options: Any) -> None:
        super().__init__(model, requests, STEPS, **options)
        self.drafters[1].begin_concurrent()
        self.due: dict[int, list[tuple[int, RootMove]]] = {}  # number of the forward -> request and update
        self._forward, self._roots = -1, 0
        forward, replay = model._step_forward, model.captures.replay

        def send(when: int) -> None:
            for number, move in self.due.pop(when, []):
                self.drafters[1].on_root_moved(self.states[1][number], *move)

        def updated_forward(*given: Any) -> Any:
            if self._forward >= 0:  # not while the graph is captured
                send(self._forward)
                self._forward += 1
            return forward(*given)

        def updated_replay(key: Any) -> None:
            if key[0] != "steps":
                replay(key)
                return
            self._forward = 0
            send(BEFORE)
            replay(key)
            send(AFTER)
            self._forward = -1

        model._step_forward, model.captures.replay = updated_forward, updated_replay  # type: ignore[method-assign]

    def move(self, number: int, node: int, token: int, before: RootMove | None = None) -> RootMove:
        """Return the update after the target accepted the path to `node` and emitted `token`, or emitted `token` after
        the update `before`."""
        tree = self.trees[0][number]
        if before is not None:
            self._roots -= 1
            return RootMove([before.root_id], [token], self._roots)
        nodes = tree.path(node)
        child = tree.child(node, token)
        if child is None:
            self._roots -= 1
        tokens = [*(tree.tokens[node] for node in nodes[1:]), token]
        return RootMove([tree.ids[node] for node in nodes], tokens, self._roots if child is None else tree.ids[child])

    def correct(self, number: int, move: RootMove) -> None:
        """Let both drafters observe the update, as a worker does when it reads its messages."""
        for drafter, states, trees in zip(self.drafters, self.states, self.trees, strict=True):
            tree = trees[number]
            if move.root_id in tree.ids:
                after = tree.copy(tree.subtree(tree.ids.index(move.root_id)))
            else:
                after = TokenTree(move.tokens[-1], move.root_id, tree.next_id)
            drafter.observe(states[number], Observation(move.path, move.tokens, after))
            trees[number] = after


def grown_pair(rule: str = "greedy", model: SteppingLlama | None = None, **options: Any) -> UpdatedPair:
    """Return a pair with a tree that one graph has grown; the next growth runs another."""
    model = exact() if model is None else model
    pair = UpdatedPair(model, [request_of(rule, words(model, 20))], floor=0.0, **options)
    for _ in range(STEPS):
        pair.grow([0])
    assert pair.forwards == [STEPS, 1]
    return pair


def expanded_and_leaves(pair: UpdatedPair) -> tuple[list[int], list[int]]:
    """Return the expanded nodes of the tree without its root, and the leaves that were not expanded."""
    tree, slots = pair.tree, pair.states[1][0].slots
    known = [node for node in range(1, len(tree)) if tree.ids[node] in slots]
    return known, [node for node in tree.leaves() if tree.ids[node] not in slots]


def new_child(tree: TokenTree, node: int) -> int:
    """Return a token that no child of a node has."""
    below = {tree.tokens[child] for child in tree.children(node)}
    return next(token for token in range(5, 100) if token not in below)


def move_of_kind(pair: UpdatedPair, kind: str) -> RootMove:
    """Return an update to a new root that was expanded, is a leaf, or is no node of the tree yet."""
    tree, (expanded, leaves) = pair.tree, expanded_and_leaves(pair)
    if kind in ("expanded", "leaf"):
        node = expanded[len(expanded) // 2] if kind == "expanded" else leaves[len(leaves) // 2]
        return pair.move(0, tree.parents[node], tree.tokens[node])
    node = {"below the root": 0, "below a node": expanded[-1], "below a leaf": leaves[-1]}[kind]
    return pair.move(0, node, new_child(tree, node))


KINDS = {"expanded": 3, "leaf": 3, "below the root": 4, "below a node": 4, "below a leaf": 3}
"""Kinds of new roots, and the least number of steps that are useful below each. When the update arrives, three of the
eight steps have chosen their nodes; the acceptance model learns from the update and may reorder the last ones."""


def useful_steps(pair: UpdatedPair, move: RootMove) -> int:
    """Count the growths below the new root that need no further forward. `grow` compares the trees each time."""
    pair.grow([0])
    assert pair.forwards == [STEPS + 1, 2]
    assert not pair.due
    pair.correct(0, move)
    count = -1
    while pair.forwards[1] == 2:
        pair.grow([0])
        count += 1
    return count


@pytest.mark.parametrize("rule", ["greedy", "gumbel", "match"])
@pytest.mark.parametrize("kind", KINDS)
def test_later_steps_draft_below_the_new_root(kind: str, rule: str) -> None:
    pair = grown_pair(rule)
    move = move_of_kind(pair, kind)
    pair.due = {1: [(0, move)]}
    assert KINDS[kind] <= useful_steps(pair, move) <= STEPS - 3
    assert len(pair.tree) > KINDS[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_may_arrive_before_the_first_step(kind: str) -> None:
    pair = grown_pair()
    move = move_of_kind(pair, kind)
    pair.due = {BEFORE: [(0, move)]}
    assert useful_steps(pair, move) >= KINDS[kind]


@pytest.mark.parametrize("kind", ["below the root", "below a node", "below a leaf"])
def test_steps_without_an_update_are_repeated(kind: str) -> None:
    """Show that the tests above measure the effect of the updates."""
    pair = grown_pair()
    assert useful_steps(pair, move_of_kind(pair, kind)) == 0


def _wrong_ancestors(target: RootTarget) -> RootTarget:
    return target._replace(bits=target.bits & 1)


def _one_deeper(target: RootTarget) -> RootTarget:
    return target._replace(depth=target.depth + 1)


@pytest.mark.parametrize("change", [_wrong_ancestors, _one_deeper])
def test_a_wrong_root_target_fails_the_comparison(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    original = RootTracker.target
    monkeypatch.setattr(RootTracker, "target", lambda tracker, columns: change(original(tracker, columns)))
    with pytest.raises(AssertionError):
        test_later_steps_draft_below_the_new_root("below a node", "gumbel")


@pytest.mark.parametrize(
    ("rule", "kind", "times", "useful"),
    [
        ("greedy", "below a node", (1, 2, 4), 2),  # the root, and the best node below it
        ("gumbel", "below a leaf", (2, 2), 2),  # both between two steps
        ("greedy", "below a node", (SENT, 1), 3),
    ],
)
def test_several_updates_add_up(rule: str, kind: str, times: Sequence[int], useful: int) -> None:
    """A graph also applies an update that the drafter received before its steps began."""
    pair = grown_pair(rule)
    moves = [move_of_kind(pair, kind)]
    moves += [pair.move(0, 0, 9, moves[0])]
    moves += [pair.move(0, 0, 11, moves[1])] * (len(times) - 2)
    for at, move in zip(times, moves, strict=True):
        if at == SENT:
            pair.drafters[1].on_root_moved(pair.states[1][0], *move)
        else:
            pair.due.setdefault(at, []).append((0, move))
    pair.grow([0])
    for move in moves:
        pair.correct(0, move)
    for _ in range(useful):
        pair.grow([0])
    assert pair.forwards[1] == 2


def test_tokens_beyond_the_mailbox_limit_are_observed_afterwards() -> None:
    pair = grown_pair()
    moves = [move_of_kind(pair, "below the root")]
    for token in range(7, 7 + MAX_UPDATE_TOKENS):
        moves.append(pair.move(0, 0, token, moves[-1]))
    pair.due = {1: [(0, move) for move in moves]}
    pair.grow([0])
    for move in moves:
        pair.correct(0, move)
    for _ in range(4):
        pair.grow([0])


def test_an_update_of_another_root_is_ignored() -> None:
    """The update arrives after steps began whose tree already includes it."""
    pair = grown_pair()
    known, _ = expanded_and_leaves(pair)
    stale = RootMove([pair.tree.ids[known[0]]], [9], -77)
    pair.due = {1: [(0, stale)]}
    pair.grow([0])
    assert pair.forwards[1] == 2
    for _ in range(STEPS - 1):
        pair.grow([0])
    assert pair.forwards[1] == 2, "the graph continued unchanged"


def test_an_observed_update_is_not_sent_again() -> None:
    pair = grown_pair()
    move = move_of_kind(pair, "below a node")
    pair.drafters[1].on_root_moved(pair.states[1][0], *move)
    pair.correct(0, move)
    assert not pair.states[1][0].multi_step.heard
    for _ in range(STEPS):
        pair.grow([0])
    assert pair.forwards[1] == 2, "a graph of its own, which received no update"


@pytest.mark.parametrize("kind", KINDS)
def test_a_nearly_full_tree_has_space_below_a_new_root(kind: str) -> None:
    """Nodes outside the new root's subtree no longer count towards the limit."""
    pair = grown_pair(tree_nodes=170)
    move = move_of_kind(pair, kind)
    pair.due = {1: [(0, move)]}
    assert useful_steps(pair, move) >= 3


def test_a_node_with_another_id_is_recognised() -> None:
    """This happens when the target accepts a node of a layer that had not arrived in the cache yet."""
    pair = grown_pair()
    tree, (_, leaves) = pair.tree, expanded_and_leaves(pair)
    leaf = max(leaves, key=tree.scores.__getitem__)
    move = pair.move(0, tree.parents[leaf], tree.tokens[leaf])._replace(root_id=-9)
    pair.due = {1: [(0, move)]}
    assert useful_steps(pair, move) >= 3


@pytest.mark.parametrize("seed", [3, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(20))])
@pytest.mark.parametrize("rule", ["greedy", "gumbel"])
def test_random_updates_at_random_times_give_the_trees_of_single_steps(rule: str, seed: int) -> None:
    model, rng = exact(), random.Random(seed)
    requests = [request_of(rule, words(model, 5 + 9 * number, number), number) for number in range(3)]
    pair = UpdatedPair(model, requests, tree_nodes=90, draft_window=12 if seed % 2 else 0)
    for _ in range(50):
        some = sorted(rng.sample(range(3), rng.randrange(1, 4)))
        sent_moves: list[tuple[int, RootMove]] = []
        pair.due = {}
        for number in some:
            if rng.random() < 0.6:
                tree = pair.trees[0][number]
                node = rng.randrange(len(tree))
                below = [tree.tokens[child] for child in tree.children(node)]
                token = rng.choice(below) if below and rng.random() < 0.6 else rng.randrange(model.vocab_size)
                moves = [pair.move(number, node, token)]
                if moves[0].root_id < 0 and rng.random() < 0.5:
                    moves.append(pair.move(number, 0, rng.randrange(model.vocab_size), moves[0]))
                sent_moves += [(number, move) for move in moves]
                at = rng.randrange(STEPS)
                for move in moves:
                    pair.due.setdefault(at, []).append((number, move))
                    at = rng.randrange(at, STEPS)
        pair.grow(some)
        for number, move in sent_moves:
            pair.correct(number, move)
    assert pair.forwards[1] < pair.forwards[0]


def test_a_partly_written_update_is_ignored() -> None:
    """The checksum shows a missing part; the last complete update stays in effect."""
    box = RootMailbox(1, 99, torch.device("cpu"))
    bits = torch.zeros(1, 256, 4, dtype=torch.int64)
    bits[0, :, 0] = torch.arange(256) + 1
    tracker = RootTracker(box, bits, torch.zeros(1, 256, dtype=torch.int64))
    columns = [torch.zeros(1, 3, dtype=torch.int64) for _ in range(2)]
    nothing = NodeColumns(columns[0], torch.zeros(1, 3, 4, dtype=torch.int64), columns[1] - 1, columns[0].double())
    assert not tracker.target(nothing).has_moved
    box.write(0, RootUpdate(7, -0.5, (3, 200)))
    whole = box._host.clone()
    target = tracker.target(nothing)
    assert (target.has_moved.item(), target.slot.item(), target.score.item(), target.token.item()) == (True, 7, -0.5, 3)
    box.write(0, RootUpdate(8, -1.5, (4,)))
    after = box._host.clone()
    for column in range(after.shape[1]):
        if whole[0, column] != after[0, column]:
            box._host.copy_(after)
            box._host[0, column] = whole[0, column]
            assert tracker.target(nothing).slot.item() == 7, f"column {column} was not written yet"
    box._host.copy_(after)
    assert tracker.target(nothing).slot.item() == 8


def test_a_worker_thread_receives_updates_while_its_steps_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph of a real worker waits in its first forward until another thread has sent the correction."""
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
    sent_updates: list[RootUpdate] = []
    write = RootMailbox.write

    def noted(box: RootMailbox, text: int, moved: RootUpdate) -> None:
        sent_updates.append(moved)
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
    assert sent_updates == [RootUpdate(0, 0.0, (9,))]
