"""Several draft steps in one graph, by the stand-in for a capture: what single passes propose, and the same texts."""

from __future__ import annotations

import math
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
from outpace.core.drafting import BuildContext
from outpace.core.errors import UserError
from outpace.core.logits import stable_top_k
from outpace.core.sampling import GREEDY, Sampling
from outpace.core.tree import TokenTree
from outpace.core.types import Observation, Request, Row
from outpace.drafters import multi_step
from outpace.drafters._tree_expander import SPARE
from outpace.models.base import chain
from outpace.models.llama.config.llama_config import LlamaConfig
from outpace.models.llama.cuda.runtime import ExactGraphLlama
from outpace.rules import base, greedy, gumbel, match

RULES = {"greedy": greedy.Greedy, "gumbel": gumbel.Gumbel, "match": match.Match}


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are ranked as those of a device are ranked."""
    monkeypatch.setattr(base, "host_rows", lambda scores: None)


def exact(config: LlamaConfig = reference.TINY, **more: Any) -> ExactGraphLlama:
    """In exact mode a row's bits depend on nothing but its path, so passes and graphs give the same scores."""
    options = {"dtype": torch.float32, "is_eager": True} | more
    model: ExactGraphLlama = build(ExactGraphLlama, config, exact=True, **options)
    return model


def request_of(rule: str, prompt: Sequence[int], seed: int = 3, sampling: Sampling | None = None) -> Request:
    own = GREEDY if rule == "greedy" else Sampling(0.8)
    return Request(tuple(prompt), RULES[rule](), 200, sampling or own, seed)


def words(model: Any, count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(model.vocab_size) for _ in range(count)]


class Drafting:
    """Requests of one drafter with their trees; counts passes and graphs."""

    def __init__(self, model: Any, requests: Sequence[Request], steps: int = 4, **options: Any) -> None:
        self.model, self.options = model, multi_step.Options(steps=steps, floor=0.0, **options)
        self.drafter: Any = multi_step.build(self.options, given=BuildContext(draft=model))
        self.states = [self.drafter.open(request) for request in requests]
        self.trees = [TokenTree(request.prompt[-1]) for request in requests]
        self.passes = self.graphs = 0
        score, run = self.drafter._expander.score, self.drafter._graph.run

        def counted(jobs: Any) -> Any:
            self.passes += 1
            return score(jobs)

        def counted_run(*given: Any) -> Any:
            self.graphs += 1
            return run(*given)

        self.drafter._expander.score = counted
        object.__setattr__(self.drafter._graph, "run", counted_run)

    def grow(self, some: Sequence[int]) -> None:
        self.drafter.grow([self.states[number] for number in some], [self.trees[number] for number in some])

    def follow(self, number: int, node: int, token: int, keeps: bool = False) -> None:
        """The target walks to this node and writes this token after it. `keeps`: what the draft has below lives on."""
        tree = self.trees[number]
        path = tree.path(node)
        child = tree.child(node, token) if keeps else None
        after = TokenTree(token, tree.next_id, tree.next_id + 1)
        after = after if child is None else tree.copy(tree.subtree(child))
        seen = Observation([tree.ids[node] for node in path], [*(tree.tokens[one] for one in path[1:]), token], after)
        self.drafter.observe(self.states[number], seen)
        self.trees[number] = after

    def check(self, number: int) -> int:
        """Compare the proposals below each expanded node with those of a pass of its own; return their number."""
        state, tree, count = self.states[number], self.trees[number], self.options.width + SPARE
        expanded = [node for node in range(len(tree)) if tree.ids[node] in state.slots]
        for node in expanded:
            below = tree.path_tokens(node)
            session = self.model.open(300, 300)
            held = self.model.score_sparse(
                [chain(session, [*state.tokens, *below], [len(state.tokens) + len(below) - 1])]
            )
            row = Row(state.request, state.tokens, tuple(below))
            [(tokens, values)] = base.top_k_rows(held, [row], count)
            offered, found = state.offers.get(tree.ids[node])
            assert list(offered) == list(tokens), f"node {node} of {len(tree)}"
            assert list(found) == pytest.approx(list(values), abs=1e-5)
        return len(expanded)


CASES = [
    ("greedy", 4, "tiny"),
    ("gumbel", 4, "mixed"),
    ("match", 3, "tiny"),
    ("greedy", 8, "tiny"),
    ("gumbel", 2, "tiny"),
]


@pytest.mark.parametrize(("rule", "steps", "name"), CASES)
def test_proposals_are_those_of_passes_of_their_own(rule: str, steps: int, name: str) -> None:
    """One of the models has sliding windows, and keys and values in int8."""
    model = exact(TINIES[name], kv_dtype="int8" if name == "mixed" else "auto")
    drafting = Drafting(model, [request_of(rule, words(model, 20))], steps)
    for _ in range(3):
        drafting.grow([0])
    assert drafting.check(0) == 1 + 4 * (steps - 1)
    assert (drafting.passes, drafting.graphs) == (1, 1), "one pass and the graph behind it, once in a round"


def test_the_likeliest_nodes_are_expanded() -> None:
    """The chance of a node is the product of its and its ancestors' shares among the proposals."""
    model = exact()
    drafting = Drafting(model, [request_of("gumbel", words(model, 20))])
    drafting.grow([0])
    state, tree = drafting.states[0], drafting.trees[0]
    chances, pool = {0: 0.0}, [0]
    chosen: list[int] = []
    for step in range(4):
        best = sorted(pool, key=lambda node: -chances[node])[: 4 if step else 1]
        pool = [node for node in pool if node not in best]
        chosen += best
        for node in best:
            offer = state.offers.get(tree.ids[node])
            assert offer is not None, f"node {node} is not expanded"
            tokens, values = offer
            total = max(values) + math.log(sum(math.exp(value - max(values)) for value in values))
            for token, value in list(zip(tokens, values, strict=True))[:4]:
                child = tree.child(node, token)
                if child is not None:
                    chances[child] = chances[node] + value - total
                    pool.append(child)
    assert {tree.ids[node] for node in chosen} == {node_id for node_id in tree.ids if node_id in state.slots}


@pytest.mark.parametrize("seed", [7, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(20))])
@pytest.mark.parametrize("rule", ["greedy", "gumbel"])
def test_rounds_of_many_requests(rule: str, seed: int) -> None:
    """Also after corrections and misses, where the draft's own nodes live on or not, and after single steps."""
    model, rng = exact(), random.Random(seed)
    requests = [request_of(rule, words(model, 5 + 9 * number, number), number) for number in range(3)]
    drafting = Drafting(model, requests, tree_nodes=90)
    checked = 0
    for _ in range(16):
        some = sorted(rng.sample(range(3), rng.randrange(1, 4)))
        for _ in range(rng.randrange(1, 3)):
            drafting.grow(some)
        for number in some:
            checked += drafting.check(number)
        number = rng.choice(some)
        tree = drafting.trees[number]
        node = rng.randrange(len(tree))
        below = [tree.tokens[child] for child in tree.children(node)]
        token = rng.choice(below) if below and rng.random() < 0.7 else rng.randrange(model.vocab_size)
        drafting.follow(number, node, token, rng.random() < 0.5)
    assert checked > 200
    assert drafting.graphs > 8


@pytest.mark.parametrize("sampling", [Sampling(0.8, top_p=0.9), Sampling(0.8, top_k=5)], ids=["top_p", "top_k"])
def test_what_the_graph_cannot_rank_is_drafted_step_by_step(sampling: Sampling) -> None:
    model = exact()
    drafting = Drafting(model, [request_of("gumbel", words(model, 10), sampling=sampling)])
    for _ in range(4):
        drafting.grow([0])
    assert (drafting.passes, drafting.graphs) == (4, 0)
    drafting.check(0)


def test_near_the_end_of_an_answer_steps_are_single() -> None:
    model = exact()
    drafting = Drafting(model, [request_of("greedy", words(model, 10))])
    drafting.trees[0].max_depth = 3
    for _ in range(3):
        drafting.grow([0])
    assert (drafting.passes, drafting.graphs) == (3, 0)
    assert drafting.trees[0].deepest <= 3


def test_bad_choices_are_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    with pytest.raises(UserError, match="drafter multi_step needs a draft model with graphs"):
        outpace.load(folder, "layers:0", dtype="float32", method="speculative", drafter="multi_step", steps=4)
    with pytest.raises(UserError, match="width is 65, 2 steps in one graph take at most 64"):
        Drafting(exact(), [], 2, width=65)
    with pytest.raises(UserError, match="width is 40, 8 steps in one graph take at most 36"):
        Drafting(exact(), [], 8, width=40)
    with pytest.raises(UserError, match="steps is 9"):
        multi_step.Options(steps=9)


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
