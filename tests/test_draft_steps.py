"""Several draft steps in one graph, by the stand-in for a capture: the trees of single steps, and the same texts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from files import model_folder
from passes import TINIES, build

import outpace
from outpace.core.drafting import BuildContext, DraftDirectives
from outpace.core.errors import UserError
from outpace.core.logits import stable_top_k
from outpace.core.sampling import GREEDY, Sampling
from outpace.core.tree import TokenTree
from outpace.core.types import Observation, Request
from outpace.drafters import model as model_drafter
from outpace.models.llama.config.llama_config import LlamaConfig
from outpace.models.llama.cuda import step_choice
from outpace.models.llama.cuda.multi_step_runtime import ExactGraphLlama, SteppingLlama
from outpace.rules import base, greedy, gumbel, match

RULES = {"greedy": greedy.Greedy, "gumbel": gumbel.Gumbel, "match": match.Match}
SAMPLED = Sampling(0.8)


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Single steps rank their rows as those of a device are ranked."""
    monkeypatch.setattr(base, "host_rows", lambda scores: None)


def exact(config: LlamaConfig = reference.TINY, dtype: torch.dtype = torch.float32, **more: Any) -> SteppingLlama:
    """In exact mode a row's bits depend on nothing but its path, so single steps and several give the same scores."""
    model: SteppingLlama = build(ExactGraphLlama, config, exact=True, dtype=dtype, is_eager=True, **more)
    return model


def request_of(rule: str, prompt: Sequence[int], seed: int = 3, sampling: Sampling | None = None) -> Request:
    own = GREEDY if rule == "greedy" else SAMPLED
    return Request(tuple(prompt), RULES[rule](), 200, sampling or own, seed)


def drafter_of(model: SteppingLlama, steps: int | None, **options: Any) -> Any:
    return model_drafter.build(model_drafter.Options(steps=steps, **options), given=BuildContext(draft=model))


def seen_of(tree: TokenTree) -> tuple[Any, ...]:
    return tree.tokens, tree.parents, tree.scores, tree.roles, tree.ids


class Pair:
    """The same requests by single steps and by several, grown and corrected alike."""

    def __init__(self, model: SteppingLlama, requests: Sequence[Request], steps: int, **options: Any) -> None:
        self.drafters = [drafter_of(model, number, **options) for number in (1, steps)]
        self.states = [[drafter.open(request) for request in requests] for drafter in self.drafters]
        self.trees = [[TokenTree(request.prompt[-1]) for request in requests] for _ in self.drafters]
        self.forwards = [0, 0]
        for number, drafter in enumerate(self.drafters):
            self._count(number, drafter)

    def _count(self, number: int, drafter: Any) -> None:
        score = drafter._expander.score

        def counted(jobs: Any) -> Any:
            self.forwards[number] += 1
            return score(jobs)

        drafter._expander.score = counted

    def grow(self, some: Sequence[int], most: int | None = None) -> None:
        """One step of these requests by both; they must be alike afterwards."""
        for number in some:
            for trees in self.trees:
                trees[number].max_nodes = most
        added = [
            drafter.grow([states[number] for number in some], [trees[number] for number in some])
            for drafter, states, trees in zip(self.drafters, self.states, self.trees, strict=True)
        ]
        assert added[0] == added[1]
        for number in some:
            assert seen_of(self.trees[0][number]) == seen_of(self.trees[1][number])

    def follow(self, number: int, path: Sequence[int], token: int, is_alone: bool = False) -> None:
        """The target walks these nodes and writes this token after the last. `is_alone`: nothing lives on but the new
        root, as with sequential drafting."""
        for drafter, states, trees in zip(self.drafters, self.states, self.trees, strict=True):
            tree = trees[number]
            tokens = [*(tree.tokens[node] for node in path[1:]), token]
            child = None if is_alone else tree.child(path[-1], token)
            ids = [tree.ids[node] for node in path]
            after = TokenTree(token, tree.next_id, tree.next_id + 1)
            after = after if child is None else tree.copy(tree.subtree(child))
            drafter.observe(states[number], Observation(ids, tokens, after))
            trees[number] = after

    def directives(self, number: int, directives: DraftDirectives) -> None:
        for states in self.states:
            states[number].directives = directives

    @property
    def tree(self) -> TokenTree:
        return self.trees[0][0]


def words(model: Any, count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(model.vocab_size) for _ in range(count)]


CASES = [
    ("greedy", 4, "tiny"),
    ("gumbel", 4, "mixed"),
    ("match", 3, "tiny"),
    ("greedy", 8, "tiny"),
    ("gumbel", 2, "tiny"),
]


@pytest.mark.parametrize(("rule", "steps", "name"), CASES)
def test_several_steps_grow_the_tree_of_single_ones(rule: str, steps: int, name: str) -> None:
    """One of the models has sliding windows, and keys and values in int8."""
    model = exact(TINIES[name], kv_dtype="int8" if name == "mixed" else "auto")
    pair = Pair(model, [request_of(rule, words(model, 20))], steps)
    for _ in range(steps):
        pair.grow([0])
    assert len(pair.tree) > 4 * steps
    assert pair.forwards == [steps, 1], "one forward, and the graph behind it"


def test_tokens_of_equal_scores_are_ordered_alike() -> None:
    """Each token has a twin with the same score; whole branches tie."""
    tensors = reference.random_tensors(reference.TINY)
    embedding = tensors["model.embed_tokens.weight"]
    half = len(embedding) // 2
    embedding[half : 2 * half] = embedding[:half]
    model = ExactGraphLlama.from_tensors(reference.TINY, tensors.__getitem__, exact=True, is_eager=True)
    pair = Pair(model, [request_of("greedy", words(model, 9))], 4)
    for _ in range(8):
        pair.grow([0])
    scores = pair.tree.scores
    assert len(set(scores)) < len(scores) - 8, "ties were to be tried"
    assert pair.forwards[1] == 2


@pytest.mark.parametrize("seed", [7, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(20))])
@pytest.mark.parametrize("rule", ["greedy", "gumbel"])
def test_walks_of_many_requests_are_alike(rule: str, seed: int) -> None:
    """The trees are equal after corrections, misses, directives, bounds, other widths, new and finished requests."""
    model, rng = exact(), random.Random(seed)
    requests = [request_of(rule, words(model, 5 + 9 * number, number), number) for number in range(3)]
    pair = Pair(model, requests, 4, tree_nodes=90, draft_window=12 if seed % 2 else 0)
    for turn in range(60):
        some = sorted(rng.sample(range(3), rng.randrange(1, 4)))
        pair.grow(some, rng.choice([None, None, 12, 40]))
        if turn % 7 == 3:
            width, share = rng.choice([0, 2, 3]), rng.choice([1.0, 0.1])
            pair.directives(
                rng.choice(some), DraftDirectives(width=width, share=share, floor=rng.choice([None, 0.0, 0.05]))
            )
        if rng.random() < 0.4:
            number = rng.choice(some)
            tree = pair.trees[0][number]
            node = rng.randrange(len(tree))
            path = tree.path(node)
            below = [tree.tokens[child] for child in tree.children(node)]
            token = rng.choice(below) if below and rng.random() < 0.7 else rng.randrange(model.vocab_size)
            pair.follow(number, path, token, rng.random() < 0.5)
    assert pair.forwards[1] < 0.75 * pair.forwards[0]


def test_steps_taken_ahead_outlive_a_correction() -> None:
    """Also where the tree has not asked for it yet, and where it begins anew at the target's token."""
    model = exact()
    for is_alone in (False, True):
        pair = Pair(model, [request_of("gumbel", words(model, 20))], 8)
        pair.grow([0])
        child = pair.tree.children(0)[0]
        pair.follow(0, [0], pair.tree.tokens[child], is_alone)
        for _ in range(3):
            pair.grow([0])
        assert pair.forwards == [4, 1]
        node = max(range(len(pair.tree)), key=pair.tree.depth)
        path = pair.tree.path(node)
        pair.follow(0, path[:-1], pair.tree.tokens[node], is_alone)
        for _ in range(2):
            pair.grow([0])
        assert pair.forwards[1] <= 2


def test_another_drafters_nodes_take_another_forward() -> None:
    """What the device did not know of is expanded by the host's choice; the trees are alike."""
    model = exact()
    pair = Pair(model, [request_of("greedy", words(model, 10))], 4)
    pair.grow([0])
    for trees in pair.trees:
        node = trees[0].add(0, 5, -0.01)
        trees[0].add(0 if node is None else node, 6, -0.02)
    for _ in range(4):
        pair.grow([0])
    assert 1 < pair.forwards[1] < pair.forwards[0]


@pytest.mark.parametrize("sampling", [Sampling(0.8, top_p=0.9), Sampling(0.8, top_k=5)], ids=["top_p", "top_k"])
def test_filters_are_drafted_step_by_step(sampling: Sampling) -> None:
    model = exact()
    pair = Pair(model, [request_of("gumbel", words(model, 10), sampling=sampling)], 4)
    for _ in range(4):
        pair.grow([0])
    assert pair.forwards == [4, 4]


def test_steps_follow_the_rounds() -> None:
    """By default as many as rounds took lately: a power of two, and the rest one by one."""
    model = exact()
    drafter = drafter_of(model, None, floor=0.0)
    assert drafter._multi_step._chosen == 1, "on a CPU they are taken one by one"
    drafter._multi_step._chosen, drafter._multi_step.takes_several = None, True  # as on a GPU
    taken, draft_steps = [], model.draft_steps
    model.draft_steps = lambda *given: taken.append(given[2]) or draft_steps(*given)
    request = request_of("greedy", words(model, 10))
    state, tree = drafter.open(request), TokenTree(request.prompt[-1])
    for length in [2] * 20 + [7] * 20:
        del taken[:]
        for _ in range(length):
            drafter.grow([state], [tree])
        after = TokenTree(1, tree.next_id, tree.next_id + 1)
        drafter.observe(state, Observation([tree.ids[0]], [1], after))
        tree = after
        if length == 2:
            twos = list(taken)
    assert (twos, taken) == ([2], [4, 2])


def test_steps_of_one_graph_share_its_time() -> None:
    model = exact()
    drafter = drafter_of(model, 4)
    request = request_of("greedy", words(model, 10))
    state, tree = drafter.open(request), TokenTree(request.prompt[-1])
    drafter.grow([state], [tree])
    assert state.num_steps == 4
    for _ in range(3):
        drafter.grow([state], [tree])
        assert state.num_steps == 0
    drafter.grow([state], [tree])
    assert state.num_steps != 0


def test_a_draft_without_graphs_refuses_several_steps(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    with pytest.raises(UserError, match=r"steps is 4, .* needs? a draft with\s+graphs|one at a time"):
        outpace.load(folder, "layers:0", dtype="float32", method="speculative", drafter="model", steps=4)
    with pytest.raises(UserError, match="steps"):
        model_drafter.Options(steps=9)


def test_another_choice_of_the_device_costs_only_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the device expands, the trees are those of single steps."""
    monkeypatch.setattr(step_choice.NodeSelection, "_log_chances", lambda choice, values: -values)
    model = exact()
    pair = Pair(model, [request_of("greedy", words(model, 20))], 4)
    for _ in range(4):
        pair.grow([0])
    assert pair.forwards[1] > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_stable_top_k_orders_equal_values_by_place(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    values = torch.randn(20, 300).mul(4).round().to(dtype)  # many are equal
    values[0, ::7], values[1] = 0.0, -torch.inf
    values[0, 1::7] = -0.0
    values[2, 5] = torch.inf
    places, best = stable_top_k(values, 12)
    order = values.add(0.0).sort(dim=-1, descending=True, stable=True)
    assert torch.equal(places, order.indices[:, :12])
    assert torch.equal(best.double(), values.gather(-1, places).double())
