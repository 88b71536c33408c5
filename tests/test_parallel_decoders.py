"""PEARL and SSD against their papers' formulas, what they verify and direct; `planned` on simulated times."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from functools import cache
from heapq import nlargest
from math import log
from typing import Any

import pytest
import torch
from doubles import QuickToy, decode, make_drafter, make_request, write
from test_costs import costs_of

import outpace
from outpace.card.cache import CandidateCache, Correction
from outpace.card.inline import InlineWorker, SimulatedClock
from outpace.card.loop import Correct, DraftLoop, Open, SetDirectives, StepTimes
from outpace.core import theory
from outpace.core.drafting import DraftDirectives
from outpace.core.tree import Role, TokenTree, depths
from outpace.core.types import WORKER
from outpace.decoders.base import RequestContext
from outpace.decoders.card import Card
from outpace.decoders.planned import Planned
from outpace.drafters._tree_expander import level_frontier
from outpace.planning.cost_model import CostModel
from outpace.planning.estimators import ExplorationBudget
from outpace.planning.parallel_policy import PARALLEL, ParallelDraftPolicy
from outpace.planning.plan import best_rows
from outpace.planning.planner import Planner
from outpace.simulate.models import index_trace
from outpace.simulate.run import Outcome, run_setup
from outpace.simulate.setups import Setup, by_ratio
from outpace.simulate.trace import synthetic_trace

TARGET = QuickToy(16, 3, 0)
REQUESTS = [make_request((3, 1, 4), max_tokens=40), make_request((7,), "gumbel", 40, temperature=0.9, seed=3)]


def simulated(method: str, alpha: float, length: int, ratio: float, width: int = 1, tokens: int = 4000) -> Outcome:
    """`tokens` tokens of a pair that accepts each token independently with chance `alpha`."""
    scripts = index_trace(synthetic_trace(alpha, 2, tokens // 2))
    options = {"width": width, "tree_nodes": 4096, "floor": 0.0}
    return run_setup(scripts, Setup(method, method, method, 64, options), by_ratio(ratio), 2, length)


def plain_over(outcome: Outcome) -> float:
    return outcome.tokens * outcome.ratio / outcome.seconds


@pytest.mark.parametrize("gamma", [2, pytest.param(6, marks=pytest.mark.long)])
@pytest.mark.parametrize("alpha", [pytest.param(0.5, marks=pytest.mark.long), 0.9])
def test_pearl_gives_what_its_formula_says(alpha: float, gamma: int) -> None:
    """A pass takes gamma draft steps, rows cost nothing; 4,000 tokens leave some 2 % to chance."""
    outcome = simulated("pearl", alpha, gamma, float(gamma))
    assert plain_over(outcome) == pytest.approx(theory.pearl_speedup(alpha, gamma, 1 / gamma), rel=0.03)
    assert outcome.figures.mean_accepted_length == pytest.approx(plain_over(outcome), rel=0.01)


def outcome_chances(alpha: float, length: int) -> list[float]:
    """All outcomes (number of accepted tokens, rank of the draft's token that is written next), likeliest first."""
    ranks = [alpha * (1 - alpha) ** rank for rank in range(60)]
    inside = [alpha**count * chance for count in range(length) for chance in ranks[1:]]
    return sorted([*inside, *(alpha**length * chance for chance in ranks)], reverse=True)


@pytest.mark.parametrize(
    ("length", "width", "alpha"),
    [(4, 4, 0.9), *(pytest.param(4, *long, marks=pytest.mark.long) for long in ((4, 0.5), (12, 0.5), (12, 0.9)))],
)
def test_ssd_gives_what_its_paper_expects(alpha: float, length: int, width: int) -> None:
    """All outcomes' chains are ready before the pass ends; the draft that is made after a miss is the same."""
    outcome = simulated("ssd", alpha, length, length + 2.0, width)
    hit, tokens = sum(outcome_chances(alpha, length)[:width]), theory.expected_tokens(alpha, length)
    primary, backup = ((length + more) / (length + 2.0) for more in (1, 0))
    expected = tokens / (hit * max(1.0, primary) + (1.0 - hit) * (1.0 + backup))
    assert plain_over(outcome) == pytest.approx(expected, rel=0.03)
    assert outcome.figures.mean_accepted_length == pytest.approx(tokens, rel=0.03)


def test_ssd_gains_by_the_outcomes_that_it_drafts_for() -> None:
    few, many = (plain_over(simulated("ssd", 0.7, 4, 6.0, width, 300)) for width in (1, 12))
    assert many > 1.2 * few


def test_pearl_verifies_the_root_after_a_miss_and_else_a_chain() -> None:
    worker = InlineWorker(make_drafter("model", TARGET), SimulatedClock(lambda: 1.0, lambda rows: 4.0))
    run = decode(REQUESTS[:1], "pearl", worker=worker, target=TARGET, draft_length=4)
    steps = run.steps[0]
    assert run.texts == [write(TARGET, REQUESTS[0])]
    left = REQUESTS[0].max_tokens
    for before, step in itertools.pairwise(steps):
        left -= before.emitted
        assert step.verified_rows == (1 if before.hit == "miss" else min(4, left))
        assert step.depth_offered == step.verified_rows - 1 + (step.hit == "late")
        assert step.hit != "miss" or step.accepted < 4
    assert "late" in {step.hit for step in steps}


@pytest.mark.parametrize("method", ["pearl", "ssd"])
@pytest.mark.parametrize("worker", ["inline", "thread"])
def test_a_perfect_drafter_is_waited_for(method: str, worker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of any length come in time, whatever the clock: a wait for depth is part of both."""
    monkeypatch.setattr("outpace.card.thread._PATIENCE", 1e4)  # on a busy machine too
    drafter = make_drafter("perfect", TARGET)
    run = decode(REQUESTS, method, drafter, worker=worker, target=TARGET, draft_length=5)
    assert run.texts == [write(TARGET, request) for request in REQUESTS]
    assert all(step.emitted >= 5 for steps in run.steps for step in steps[1:-1])


def grown(directives: DraftDirectives, forwards: int = 50) -> TokenTree:
    """The tree of a drafter that was given these directives, after at most this number of forwards."""
    loop, cache = DraftLoop(make_drafter("model", TARGET, width=3, floor=0.0)), CandidateCache(4)
    loop.inbox.put(Open(0, REQUESTS[0]))
    loop.inbox.put(SetDirectives(0, directives))
    for _ in range(forwards):
        for _, level in loop.grow():
            cache.insert(level)
    return cache.query(1000)


def test_the_drafter_walks_corrections_in_its_own_tree() -> None:
    """Also if the target missed; what the target may lack is published again, once."""
    loop, request = DraftLoop(make_drafter("model", TARGET, width=3, floor=0.0)), REQUESTS[0]
    loop.post(Open(0, request))
    for _ in range(4):
        levels = loop.grow()
    old = loop._requests[0].tree
    below = max(old.children(0), key=lambda node: len(old.subtree(node)))
    kept = old.below(below)
    for _ in range(2):  # a correction that comes twice counts once
        loop.post(Correct(0, Correction([old.tokens[below]], 1, -1)))
    levels = loop.grow()
    ((_, level),) = levels
    assert (level.root_id, level.alias) == (-1, kept.ids[0])
    assert level.nodes[0][: len(kept) - 1] == kept.ids[1:]
    ((_, level),) = loop.grow()
    assert min(level.nodes[0]) > max(kept.ids)
    for root_id in (-2, -2):
        absent = next(token for token in range(TARGET.vocab_size) if loop._requests[0].tree.child(0, token) is None)
        loop.post(Correct(0, Correction([old.tokens[below], absent], 2, root_id)))  # partly known
    ((_, level),) = loop.grow()
    fresh = DraftLoop(make_drafter("model", TARGET, width=3, floor=0.0))
    fresh.post(Open(0, replace(request, prompt=(*request.prompt, old.tokens[below], absent))))
    ((_, first),) = fresh.grow()
    assert (level.root_id, level.alias, level.nodes[2]) == (-2, None, first.nodes[2])
    assert loop._requests[0].state.tokens == [*request.prompt, old.tokens[below], absent]


@pytest.mark.parametrize(
    ("directives", "deepest"),
    [(DraftDirectives(depth=3), 3), (DraftDirectives(levels=2), 2), (DraftDirectives(depth=5), 5)],
)
def test_the_drafter_obeys_its_directives(directives: DraftDirectives, deepest: int) -> None:
    assert max(depths(grown(directives).parents)) == deepest
    chain = grown(directives._replace(width=1))
    assert chain.parents == list(range(-1, deepest)), "of width 1 it is a chain"


@cache
def planned(method: str, ratio: float, devices: int = 2, **options: Any) -> Outcome:
    """360 tokens of a pair whose draft is right in six places of ten."""
    setup = Setup(method, method, method, 16, {"width": 6, "tree_nodes": 512} | options)
    return run_setup(index_trace(synthetic_trace(0.6, 2, 180)), setup, by_ratio(ratio), devices)


def test_an_exploration_budget_halves_after_each_failure() -> None:
    budget = ExplorationBudget()
    assert not budget.is_due("level", 1.0, 0.1)
    assert budget.is_due("level", 1.0, 0.1, credit=1.1), "something new begins"
    budget.advance(11.0)
    assert budget.is_due("level", 1.0, 0.1)
    assert budget.is_due("level", 1.0, 0.1), "asking changes nothing"
    budget.record_use("level", -1.0)
    budget.record_use("level", 0.9)  # by another request in the same round
    budget.advance(11.0)
    assert not budget.is_due("level", 1.0, 0.1)
    assert not budget.is_due("level", 1.0, 0.0, credit=1.9)
    assert budget.is_due("rows", 1.0, 0.1), "of each thing separately"
    budget.advance(11.0)
    assert budget.is_due("level", 1.0, 0.1)
    budget.record_use("level", -1.0)
    budget.record_use("level", 1.1)
    budget.advance(11.0)
    assert budget.is_due("level", 1.0, 0.1)


@pytest.mark.parametrize(
    ("chances", "more", "price", "expected"),
    [
        ([], [], 1.0, (1, 0.0)),
        ([0.5, 0.2, 0.1], [0.0, 0.0, 0.0], 1.0, (4, 0.8)),
        ([0.5, 0.2, 0.1], [0.1, 0.2, 0.4], 1.0, (3, 0.5)),
        ([0.5, 0.2, 0.1], [1.0, 2.0, 3.0], 1.0, (1, 0.0)),
        ([0.3, 0.3, 0.3], [0.4, 0.4, 0.4], 1.0, (4, 0.5)),  # a first row that does not pay alone
        ([0.5, 0.2, 0.1], [0.0], 1.0, (2, 0.5)),  # the others' time is not known yet
    ],
)
def test_rows_are_taken_while_they_pay(
    chances: list[float], more: list[float], price: float, expected: tuple[int, float]
) -> None:
    assert best_rows(chances, more, price) == pytest.approx(expected)


def gain(*leaves: float) -> float:
    """Tokens that waiting for a level below such leaves of the candidate cache gains above its price."""
    costs = costs_of(*((rows, 6.0 + 0.3 * rows) for rows in (1, 2, 8)))
    costs.record_draft(WORKER, 0.5, 1)
    sources = (WORKER,)
    context = RequestContext(request=make_request((1, 2)), committed=[1, 2], costs=costs, budget=8, sources=sources)
    planner = Planner(context, Planned.Options())
    planner.begin()
    tree = TokenTree(2)
    for token, leaf in enumerate(leaves):
        tree.add(0, token, log(leaf))
    worker = planner.models[0]
    planner.load_candidates(tree, worker)
    return max(planner._level_gains(tree, worker, leaves or (1.0,))[-1] - planner._second_price(worker) * 0.5, 0.0)


def test_waiting_gains_more_below_few_likely_leaves() -> None:
    assert gain() > gain(0.9) > gain(0.6) > gain(0.3, 0.3), "below a root alone the walk is there in any case"
    assert gain(0.1, 0.1, 0.1, 0.1, 0.1, 0.1) == 0.0


def test_planned_waits_longer_for_cheaper_levels() -> None:
    found = {ratio: planned("planned", ratio) for ratio in (2.0, 7.0, 30.0)}
    waits = [outcome.target_idle * ratio for ratio, outcome in found.items()]  # in draft steps
    assert waits == sorted(waits)
    lengths = [outcome.figures.mean_accepted_length for outcome in found.values()]
    assert lengths == sorted(lengths)


@pytest.mark.parametrize(
    ("ratio", "most"), [(7.0, 0.96), (15.0, 0.98), pytest.param(3.5, 1.02, marks=pytest.mark.long)]
)
def test_planned_is_no_slower_than_card_and_auto(ratio: float, most: float) -> None:
    known = min(planned(method, ratio).seconds for method in ("card", "auto"))
    assert planned("planned", ratio).seconds < most * known


def test_planned_gains_by_waits() -> None:
    assert planned("planned", 15.0).seconds < planned("planned", 15.0, deepest=0).seconds


def test_planned_drafts_sequentially_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned("planned", 7.0, 1)
    monkeypatch.setattr(ParallelDraftPolicy, "_choose", lambda self, step, price: None)
    parallel = planned.__wrapped__("planned", 7.0, 1)
    assert found.seconds < 0.95 * parallel.seconds
    assert found.draft_idle > parallel.draft_idle


def test_a_drafter_begins_a_level_that_ends_after_the_pass_if_hits_are_frequent() -> None:
    """A pass of 2.6 draft steps: the third level is begun if misses are rarer than 0.6."""
    costs = CostModel()
    context = RequestContext(request=make_request((1, 2)), committed=[1, 2], costs=costs)
    for hits, levels in ((True, 3), (False, 2)):
        policy = ParallelDraftPolicy(context, lambda: 1.0, 0.0)
        for _ in range(200):
            costs.record_round(1, 1, 1, 2.6, 0.0)
            directives = policy.for_pass(1, 0.0)
            policy.learn(hits, 0.5)
        assert policy.mode == PARALLEL
        assert directives.levels == levels


@pytest.mark.parametrize(("round_trip", "levels"), [(1.0, 2), (2.0, None)])
def test_a_drafter_far_away_never_rests(round_trip: float, levels: int | None) -> None:
    """Its answer takes longer than half a pass of 2.6 draft steps, so the target does not wait for it."""
    costs = CostModel()
    context = RequestContext(request=make_request((1, 2)), committed=[1, 2], costs=costs)
    policy = ParallelDraftPolicy(context, lambda: 1.0, 0.0, lambda: round_trip)
    for _ in range(200):
        costs.record_round(1, 1, 1, 2.6, 0.0)
        directives = policy.for_pass(1, 0.0)
        policy.learn(False, 0.5)
    assert (policy.is_round_trip_long, directives.levels) == (levels is None, levels)


@pytest.mark.parametrize(
    ("per_node", "width"), [(0.0, 4), (0.2, 3), (10.0, 1)], ids=["rows are free", "rows cost", "rows are all it costs"]
)
def test_a_step_expands_the_nodes_that_give_most_per_second(per_node: float, width: int) -> None:
    times, tree, chances = StepTimes(), TokenTree(1), [0.9, 0.5, 0.4, 0.05]
    for token, chance in enumerate(chances):
        tree.add(0, token, math.log(chance))
    assert tree.best_width(4, *times.line) == 4  # nothing is known yet
    assert tree.best_width(2, *times.line) == 2
    for rows in (1, 2, 4, 3, 1, 4):
        times.learn(rows, 1e-3 * (1.0 + per_node * rows))
    times.learn(2, 1.0)  # an interruption counts little
    for _ in range(20):
        times.learn(4, 1e-3 * (1.0 + per_node * 4))
        times.learn(1, 1e-3 * (1.0 + per_node))
    best = max(range(1, 5), key=lambda count: sum(chances[:count]) / (1.0 + per_node * count))
    assert tree.best_width(4, *times.line) == best == width


def test_a_narrow_step_shows_what_a_node_costs() -> None:
    """Without them all steps are equally wide, and no line through their times shows the price of a node."""
    loop = DraftLoop(make_drafter("model", TARGET, width=8, tree_nodes=4096, floor=0.0))
    loop.post(Open(0, REQUESTS[0]))
    for _ in range(20):
        loop.grow()
        loop.learn_time(1e-3 * (0.1 + loop._rows))
    assert loop._times.line == pytest.approx((1e-4, 1e-3))


def test_card_as_published_grows_whole_levels_by_the_product_of_q() -> None:
    """K nodes of the last level are expanded, each gets its K best tokens, and a path's score is the sum of log q."""
    width = 3
    drafter = make_drafter("model", TARGET, width=width, tree_nodes=4096, floor=0.0)
    loop = DraftLoop(drafter)
    loop.post(Open(0, REQUESTS[0]))
    loop.post(SetDirectives(0, DraftDirectives(in_levels=True)))
    for _ in range(4):
        loop.grow()
    tree = loop._requests[0].tree
    parents = Counter(parent for parent in tree.parents if parent >= 0)
    by_depth = [sorted(node for node in parents if tree.depth(node) == depth) for depth in range(4)]
    assert [len(some) for some in by_depth] == [1, width, width, width]
    assert set(parents.values()) == {width}
    for depth in range(1, 4):
        level = [node for node in range(len(tree)) if tree.depth(node) == depth]
        assert by_depth[depth] == sorted(nlargest(width, level, key=lambda node: (tree.scores[node], -node)))
    model = drafter._expander.model
    for node in range(1, len(tree)):
        text = [*REQUESTS[0].prompt, *tree.path_tokens(node)]
        log_q = torch.log_softmax(model._row(text[:-1]).double(), -1)[text[-1]]
        assert tree.scores[node] - tree.scores[tree.parents[node]] == pytest.approx(float(log_q), abs=1e-4)


def test_after_a_correction_a_level_without_primary_nodes_is_made_of_secondary_ones() -> None:
    tree = TokenTree(1)
    first, second = (tree.add(0, token, -0.1 * token) for token in (2, 3))
    expanded = {tree.ids[0], tree.ids[first]}
    below = [tree.add(first, token, -1.0 - token, Role.SECONDARY) for token in (4, 5, 6)]
    assert level_frontier(tree, expanded, 2) == below[:2]
    primary = tree.add(first, 7, -9.0)
    assert level_frontier(tree, expanded, 2) == [primary]
    tree.add(second, 8, -0.4)  # below a node that was not expanded
    assert level_frontier(tree, expanded, 2) == [primary]


@pytest.mark.parametrize("lockstep", [0, 2])
@pytest.mark.parametrize("request_number", [0, 1])
def test_card_as_published_writes_the_same_text(lockstep: int, request_number: int) -> None:
    request = REQUESTS[request_number]
    worker = InlineWorker(make_drafter("model", TARGET, width=3, tree_nodes=4096), SimulatedClock())
    run = decode([request], "card", worker=worker, target=TARGET, as_published=True, lockstep=lockstep)
    assert run.texts == [write(TARGET, request)]
    assert run.counts["primary"] + run.counts["late"] > 0


@pytest.mark.parametrize("values", [{}, {"width": 32}, {"width": "100"}, {"width": 128}])
def test_the_tree_of_card_as_published_holds_the_children_of_every_step(values: dict[str, Any]) -> None:
    options = Card.Options(as_published=True)
    width = int(values.get("width", 16))
    assert Card.drafter_defaults(options, values)["tree_nodes"] > 7 * width**2
    assert Card.drafter_defaults(Card.Options(), values)["tree_nodes"] == 1024


def test_card_as_published_writes_as_many_tokens_per_pass_at_the_papers_width() -> None:
    """At 100 a tree of 8,192 nodes was full after two of the seven draft steps."""

    def tokens_per_pass(width: int) -> float:
        with outpace.LLM(method="card", as_published=True, width=width, worker="inline") as llm:
            [answer] = llm.generate(["def fibonacci(n):"], outpace.SamplingParams(max_tokens=32))
        return answer.figures.mean_accepted_length

    assert tokens_per_pass(100) > 0.97 * tokens_per_pass(32)


def test_without_correction_card_writes_the_same_text() -> None:
    worker = InlineWorker(make_drafter("model", TARGET, width=3, tree_nodes=256), SimulatedClock())
    run = decode([REQUESTS[0]], "card", worker=worker, target=TARGET, correction=False)
    assert run.texts == [write(TARGET, REQUESTS[0])]
