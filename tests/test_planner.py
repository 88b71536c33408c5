"""The planner on a clock of its own: it gains where drafts are good, and loses next to nothing where they are not."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from doubles import make_request

from outpace.core.errors import UserError
from outpace.core.tree import TokenTree
from outpace.core.types import Commit, Draft, Source, Verify
from outpace.decoders import Auto
from outpace.decoders.base import RequestContext
from outpace.planning.cost_model import CostModel
from outpace.planning.estimators import DecayedMean
from outpace.planning.planner import Planner
from outpace.planning.sources import BatchRows

PASS, ROW, STEP = 6.0, 0.15, 0.75  # seconds of a pass, of each row beyond the fourth, of the draft's step
RIGHT, WRONG, COPY = 1, 0, 2
COPIES, DRAFT = Source("ngram", False), Source("model", True)


def place_of(
    request: Any, budget: int, costs: CostModel, sources: tuple[Source, ...] = (COPIES, DRAFT)
) -> SimpleNamespace:
    """What a decoder sees of an engine that runs one request."""
    return SimpleNamespace(
        request=request,
        budget=budget,
        requests=1,
        rows_of_others=0,
        tokens_left=1000,
        committed=(RIGHT,),
        costs=costs,
        last_token=RIGHT,
        sources=sources,
    )


class World:
    """A target that always writes RIGHT and a drafter of chains, with stated times, served as by the engine."""

    def __init__(
        self,
        promise: float,
        is_right: Callable[[int], bool],
        step: float = STEP,
        row: float = ROW,
        budget: int = 16,
        **request: object,
    ) -> None:
        self.free_promise = 0.0  # of a wrong token that a drafter without a model adds below the root
        self.promise, self.is_right, self.step, self.row = promise, is_right, step, row
        self.costs, self.seconds, self.written, self.asked, self.lag = CostModel(), 0.0, 0, 0, 100
        rule = make_request((1,), **request)
        self.place = place_of(rule, budget, self.costs)

    def run(self, tokens: int, options: Auto.Options | None = None) -> float:
        """Writes `tokens` tokens; returns the speedup over plain decoding."""
        coroutine = Auto().decode(self.place, options or Auto.Options())
        ask, drafting = coroutine.send(None), 0.0
        while self.written < tokens:
            if isinstance(ask, Draft):
                is_free, ask.tree.current_source = ask.source == COPIES, ask.source.name
                if is_free and self.free_promise:
                    ask.tree.add(0, COPY, math.log(self.free_promise))
                seconds = 0.0 if is_free else self.step + self.lag * 0.05  # what was written is read first
                drafting += seconds
                self.costs.record_draft(seconds, 1, ask.source)
                ask = coroutine.send(0 if is_free else self.grow(ask.tree))
            elif isinstance(ask, Verify):
                rows = len(ask.tree)
                ask = coroutine.send([RIGHT] * rows)
                assert isinstance(ask, Commit)
                emitted = len(ask.verdict.path)
                seconds = PASS + self.row * max(rows - 4, 0) + drafting
                self.costs.record_round(1, rows, emitted, seconds, drafting)
                self.seconds, self.written = self.seconds + seconds, self.written + emitted
                self.lag += emitted
                drafting, ask = 0.0, coroutine.send(TokenTree(RIGHT))
        return self.written * PASS / self.seconds

    def grow(self, tree: TokenTree) -> int:
        """One more token at the end of the chain, with the promised chance."""
        self.asked, self.lag = self.asked + 1, 0
        leaf = tree_end(tree)
        token = RIGHT if self.is_right(self.written + tree.depth(leaf)) else WRONG
        tree.add(leaf, token, tree.scores[leaf] + math.log(self.promise))
        return 1


class WideWorld(World):
    """A drafter of trees: four tokens below each of four leaves, the best of them with the promised chance."""

    def grow(self, tree: TokenTree) -> int:
        self.asked, self.lag = self.asked + 1, 0
        for leaf in [node for node in range(len(tree)) if not tree.children(node)][:4]:
            is_right = self.is_right(self.written + tree.depth(leaf))
            for place, chance in enumerate((self.promise, 0.2, 0.1, 0.05)):
                token = RIGHT if is_right and not place else 10 + place
                tree.add(leaf, token, tree.scores[leaf] + math.log(chance))
        return 16


def tree_of(source: Source) -> TokenTree:
    """A root, below which this source plants."""
    tree = TokenTree(RIGHT)
    tree.current_source = source.name
    return tree


def tree_end(tree: TokenTree) -> int:
    """The end of the model's chain: the last node that is not a copy."""
    return next(node for node in reversed(range(len(tree))) if tree.tokens[node] != COPY)


def test_a_perfect_draft_gains_what_its_cost_allows() -> None:
    """Chains of g tokens give (g + 1) PASS / (PASS + g STEP + rows): some 4.6 at the best g below the budget's 16."""
    assert World(0.97, lambda place: True).run(600) > 4.0


def test_a_draft_that_is_mostly_right_gains() -> None:
    assert World(0.7, lambda place: place % 10 < 7).run(600) > 1.4


@pytest.mark.parametrize("right", [2, 3])
def test_the_first_answer_does_not_pay_for_the_planners_ignorance(right: int) -> None:
    """Rows that were never timed are tried from few to many: from many to few costs the first answer a fifth."""
    assert WideWorld(right / 5, lambda place: place % 5 < right, row=0.45, budget=32).run(100) > 1.05


@pytest.mark.parametrize("promise", [0.95, 0.5, 0.05])
def test_a_garbage_draft_loses_next_to_nothing(promise: float) -> None:
    assert World(promise, lambda place: False).run(512) > 0.97


def test_a_draft_that_turns_to_garbage_is_left() -> None:
    world = World(0.9, lambda place: place < 256)
    world.run(256)
    before, asked = world.seconds, world.asked
    world.run(768)
    assert 512 * PASS / (world.seconds - before) > 0.97
    assert world.asked - asked < 80


def test_a_draft_that_recovers_is_taken_up_again() -> None:
    world = World(0.9, lambda place: place >= 400)
    world.run(400)
    before = world.seconds
    world.run(2400)
    assert 2000 * PASS / (world.seconds - before) > 1.5


def test_a_draft_that_recovers_within_an_answer_is_taken_up_again() -> None:
    """Only a trial can find that out: nothing else is drafted where nothing pays."""
    assert World(0.9, lambda place: place >= 400).run(2400) > 1.5


def test_a_draft_that_fails_is_tried_ever_more_seldom() -> None:
    """It is believed for some thirty rounds, for a few bad rounds may be chance."""
    world = World(0.9, lambda place: False)
    world.run(100)
    first = world.asked
    world.run(2000)
    assert first < 40
    assert world.asked - first < 12


def test_a_few_bad_rounds_do_not_end_a_draft_that_pays() -> None:
    """Half of what is proposed is right, in runs of four as of text: it is asked for in nearly every round."""
    world = World(0.5, lambda place: place // 4 * 7919 % 13 < 7, step=0.8)
    assert world.run(600) > 1.15
    assert world.asked > 0.9 * world.costs.num_rounds


@pytest.mark.parametrize("row", [0.0, 0.6])
def test_a_layer_promises_less_below_four_unlikely_leaves_than_below_a_likely_one(row: float) -> None:
    """Where rows cost: each child is as unlikely as its leaf, and has its price."""
    found = []
    for chances in ((0.8,), (0.2, 0.2, 0.2, 0.2)):
        costs = CostModel()
        for rows in (1, 2, 4, 8) * 3:
            costs.record_round(1, rows, 1, PASS + row * (rows - 1), 0.0)
        planner = Planner(place_of(make_request((1,)), 32, costs, [DRAFT]), Auto.Options())
        planner.begin()
        tree = tree_of(DRAFT)
        for token, chance in enumerate(chances):
            tree.add(0, token, math.log(chance))
        grower = planner.models[0]
        planner.grown(tree, grower)
        found.append(planner._reach(tree, grower))
    assert found[0] == pytest.approx(found[1]) if not row else found[0] > 1.5 * found[1] > 0


@pytest.mark.parametrize(("trust", "is_asked"), [(0.5, True), (0.2, False)])
def test_a_model_that_did_badly_in_a_short_text_is_tried_in_the_next(trust: float, is_asked: bool) -> None:
    """Where rows are dear too; but not one whose word came to nothing."""
    costs = CostModel()
    for rows in (1, 2, 4, 8) * 3:
        costs.record_round(1, rows, 1, PASS * (1 + 0.15 * (rows - 1)), 0.0)
    costs.expect(DRAFT, 0.1)
    costs.trust(DRAFT.name).learn(0.0, 2.0 / trust - 2.0)
    for layer in range(4):
        costs.layer_yield(DRAFT, layer).learn(0.0, 100.0)
    planner = Planner(place_of(make_request((1,)), 32, costs, [DRAFT]), Auto.Options())
    planner.begin()
    assert costs.initial_trust(DRAFT.name).value == pytest.approx(trust, abs=0.02)
    assert planner.pays(tree_of(DRAFT), planner.models[0]) is is_asked


def test_bad_copies_do_not_bring_a_good_model_into_disrepute() -> None:
    alone, beside = World(0.9, lambda place: True), World(0.9, lambda place: True)
    beside.free_promise = 0.9
    assert beside.run(600) > 0.8 * alone.run(600) > 3.0


@pytest.mark.parametrize(("left", "is_read"), [(4, False), (1000, True)])
def test_a_long_prompt_is_not_read_for_a_few_tokens(left: int, is_read: bool) -> None:
    world = World(0.97, lambda place: True)
    world.place.committed = (RIGHT,) * 1000
    world.place.tokens_left = left
    world.costs.expect(DRAFT, 0.1)
    world.costs.record_prefill(100, 10.0)  # so the draft is expected to need 10 seconds, more than one pass
    world.run(40)
    assert (world.asked > 0) is is_read


def test_what_a_draft_is_worth_is_found_out_in_each_text() -> None:
    """Ten answers that the draft predicts badly: fewer and fewer try it in more than one round. Then an answer that
    it predicts well gains, although all others lost."""
    costs = CostModel()

    def answer(share: float) -> tuple[float, int]:
        world = World(max(share, 0.1), lambda place: place % 10 < 10 * share, step=1.5)
        world.costs = world.place.costs = costs
        world.place.tokens_left = 128
        return world.run(128), world.asked

    lost = [answer(0.0) for _ in range(10)]
    assert sum(1 / ratio for ratio, _ in lost) / 10 < 1 / 0.97
    assert lost[1][1] > lost[-1][1] == 1
    assert answer(0.8)[0] > 1.3


def test_after_texts_that_a_draft_knows_one_that_it_does_not_know_loses_little() -> None:
    costs = CostModel()
    for share in (0.8, 0.8, 0.8, 0.0, 0.8, 0.0):
        world = World(max(share, 0.1), lambda place, share=share: place % 10 < 10 * share, step=1.5)
        world.costs = world.place.costs = costs
        world.place.tokens_left = 128
        ratio = world.run(128)
        assert ratio > 1.3 if share else ratio > 0.96


def test_trust_and_costs_are_kept_by_source() -> None:
    """Two sources of copies, one right and one wrong: neither changes what is held of the other, or of the model."""
    costs, guesses = CostModel(), Source("prediction", False)
    place = place_of(None, 16, costs, (COPIES, guesses, DRAFT))
    planner = Planner(place, Auto.Options())
    for _ in range(20):
        tree = TokenTree(RIGHT)
        planner.begin()
        for copier, token in zip(planner.lookups, (WRONG, RIGHT), strict=True):
            costs.record_draft(0.01 if copier.source == COPIES else 0.04, 1, copier.source)
            copier.is_asked = True
            tree.current_source = copier.source.name
            tree.add(0, token, math.log(0.5))
            planner.looked_up(tree, copier)
        planner.learn(tree, [0, 2])
    trust = costs.state_dict()["trust"]
    assert trust["ngram"] < 0.2
    assert trust["prediction"] > 1.5
    assert "model" not in trust or trust["model"] == 1.0
    assert costs.draft_seconds(COPIES) == 0.01
    assert costs.draft_seconds(guesses) == 0.04


@pytest.mark.parametrize("comes_true", [True, False])
def test_chances_that_the_drafter_fits_itself_are_taken_at_their_word(comes_true: bool) -> None:
    """Where short copies came true a common factor would take a long one for sure, and pay for rows that it is not
    worth; where they failed it would leave out what the drafter has learnt to offer more rarely."""
    costs, copies = CostModel(), Source("suffix", False, is_calibrated=True)
    for _ in range(3):
        for rows in range(1, 9):
            costs.record_round(1, rows, 1, 6.0 + 3.0 * (rows - 1), 0.0)  # a row costs half a token
    planner = Planner(place_of(None, 8, costs, (copies, DRAFT)), Auto.Options())
    for _ in range(20):
        tree = tree_of(copies)
        planner.begin()
        node = 0
        for chance in (0.9, 0.8, 0.7, 0.45):
            node = tree.add(node, RIGHT, math.log(chance)) or 0
        planner.looked_up(tree, planner.lookups[0])
        assert planner.chosen(tree) == [0, 1, 2, 3]
        planner.learn(tree, [0, 1, 2, 3, 4] if comes_true else [0])
    assert copies.name not in costs.state_dict()["trust"]


def test_a_draft_slower_than_the_target_is_not_used() -> None:
    world = World(0.9, lambda place: True, step=9.0)
    assert world.run(512) > 0.97
    assert world.asked < 20


def test_without_trials_nothing_is_tried_again() -> None:
    world = World(0.9, lambda place: False)
    world.run(400, Auto.Options(trials=0.0))
    asked = world.asked
    world.run(800, Auto.Options(trials=0.0))
    assert world.asked - asked < 12  # a new request trusts the engine's experience, which is bad


def test_rows_that_cost_are_not_verified_for_small_chances() -> None:
    """A node worth .1 token is not verified where its row costs .3 of a pass."""
    costs = CostModel()
    for _ in range(3):
        for rows, seconds in ((1, 6.0), (2, 7.8), (4, 11.4), (8, 18.6), (10, 40.0)):
            costs.record_round(1, rows, 1, seconds, 0.0)
    place = place_of(None, 8, costs)
    planner = Planner(place, Auto.Options())
    planner.begin()
    tree = tree_of(DRAFT)
    for token, chance in enumerate((0.6, 0.1, 0.1, 0.05), 1):
        tree.add(0, token, math.log(chance))
    planner.grown(tree, planner.models[0])
    assert planner.chosen(tree) == [0, 1]
    place.rows_of_others = 3
    assert planner.chosen(tree) == [0, 1]
    place.rows_of_others = 7
    assert planner.chosen(tree) == [0]  # from eight to nine it costs two


def chosen_rows(planner: Any, place: Any, chance: float, nodes: int) -> int:
    """How many rows a planner asks for, of a chain whose tokens come true with this chance."""
    planner.begin()
    tree = tree_of(DRAFT)
    for node in range(nodes):
        tree.add(node, RIGHT, (node + 1) * math.log(chance))
    planner.grown(tree, planner.models[0])
    rows = len(planner.chosen(tree))
    place.set_rows(rows)
    return rows


def test_requests_share_the_rows_that_cost_little() -> None:
    """Up to eight rows cost nothing, each further one half a pass. Each of four requests would take all eight,
    take eight together, in the first round already."""
    costs, load = CostModel(), BatchRows(4)
    for _ in range(3):
        for rows, seconds in ((4, 6.0), (8, 6.0), (10, 12.0), (16, 30.0)):
            costs.record_round(4, rows, 4, seconds, 0.0)
    places = [
        RequestContext(
            request=make_request((1,)), committed=[1], costs=costs, sources=(DRAFT,), budget=8, requests=4, batch=load
        )
        for _ in range(4)
    ]
    planners = [Planner(place, Auto.Options()) for place in places]
    for _ in range(3):
        rows = [chosen_rows(planner, place, 0.9, 7) for planner, place in zip(planners, places, strict=True)]
        assert sum(rows) == load.rows == 8
        assert [place.rows_of_others for place in places] == [8 - its for its in rows]


@pytest.mark.parametrize(("accepted", "is_asked"), [(0, False), (2, True)])
def test_in_a_crowd_only_those_ask_who_copy_well(accepted: int, is_asked: bool) -> None:
    """A row costs half a token: who gains nothing is asked in one round of many, who copies goes on."""
    costs = CostModel()
    for _ in range(3):
        for rows, seconds in ((4, 6.0), (8, 9.0), (16, 15.0)):
            costs.record_round(4, rows, 4, seconds, 0.0)
    place = place_of(None, 8, costs, (COPIES,))
    place.requests, place.rows_of_others = 4, 3
    planner = Planner(place, Auto.Options())
    asked = 0
    for _ in range(200):
        planner.begin()
        tree = tree_of(COPIES)
        if not planner.is_plain and planner.lookups[0].is_asked:
            asked += 1
            costs.record_draft(0.001, 1, COPIES)
            tree.add(tree.add(0, RIGHT, math.log(0.95)), RIGHT, math.log(0.9))
            planner.looked_up(tree, planner.lookups[0])
        planner.learn(tree, range(1 + min(accepted, len(tree) - 1)))
        costs.record_round(4, 4, 4, 6.0, 0.0)
    assert asked > 150 if is_asked else 4 < asked < 20, asked


def rounds_with_the_model(requests: int, answers: int) -> int:
    """In how many rounds one of several requests that write short answers, one behind the other, asks a draft model
    whose tokens never come true."""
    costs, asked = CostModel(), 0
    for _ in range(3):
        for rows, seconds in ((4, 6.0), (8, 9.0), (16, 15.0)):
            costs.record_round(requests, rows, requests, seconds, 0.0)
    for _ in range(answers):
        place = place_of(make_request((1,)), 8, costs, (DRAFT,))
        place.requests, place.rows_of_others = requests, requests - 1
        planner = Planner(place, Auto.Options())
        for _ in range(60):
            planner.begin()
            tree = tree_of(DRAFT)
            while not planner.is_plain and planner.pays(tree, planner.models[0]):
                asked += 1
                costs.record_draft(0.5 * requests, requests, DRAFT)
                tree.add(tree_end(tree), WRONG, math.log(0.5))
                planner.grown(tree, planner.models[0])
            planner.learn(tree, [0])
            costs.record_round(requests, requests + len(tree) - 1, requests, 6.0, 0.0)
    return asked


def test_a_crowd_remembers_for_the_next_request_that_trials_failed() -> None:
    """One alone does not: the next text may be one that the draft knows."""
    assert rounds_with_the_model(4, 60) < 20
    assert rounds_with_the_model(1, 60) > 60


def test_many_at_once_draft_until_it_is_known_what_a_row_costs() -> None:
    """Only plain rounds of eight were timed, which does not show that they are a crowd."""
    costs = CostModel()
    for _ in range(40):
        costs.record_round(8, 8, 8, 6.0, 0.0)
    place = place_of(None, 8, costs, (COPIES,))
    place.requests, place.rows_of_others = 8, 7
    planner = Planner(place, Auto.Options())
    planner.begin()
    assert not planner.is_plain
    for _ in range(3):
        costs.record_round(8, 12, 8, 12.0, 0.0)
    planner.lookups[0].gain = DecayedMean(-0.1, 1.0)
    planner.begin()
    assert planner.is_plain


def test_rules_that_judge_draws_are_refused() -> None:
    """Cutting a chain by what was drawn would favour tokens."""
    place = World(0.9, lambda place: True, rule="rejection", temperature=1.0).place
    with pytest.raises(UserError, match="a rule whose text depends on the drafts"):
        Auto().decode(place, Auto.Options()).send(None)
