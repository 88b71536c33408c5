"""The planner on a simulated clock: it gains where drafts are good, and loses next to nothing where they are not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from doubles import make_request
from test_costs import COPIES, DRAFT, costs_of

from outpace.core.errors import UserError
from outpace.core.tree import TokenTree
from outpace.core.types import Commit, Draft, DraftSource, Verify
from outpace.decoders.auto import Auto
from outpace.decoders.base import RequestContext
from outpace.planning.cost_model import READ_WITH_STEP, CostModel
from outpace.planning.plan import BatchState
from outpace.planning.planner import Planner
from outpace.planning.sources import AcceptanceModel, BatchRows, ModelSource

PASS, ROW, STEP = 6.0, 0.15, 0.75  # seconds of a pass, of each row beyond the fourth, of a draft step
RIGHT, WRONG, COPY = 1, 0, 2


def place_of(
    request: Any, budget: int, costs: CostModel, sources: tuple[DraftSource, ...] = (COPIES, DRAFT), requests: int = 1
) -> RequestContext:
    """What a decoder sees of an engine that runs this number of requests, the others with one row each."""
    place = RequestContext(
        request=request,
        budget=budget,
        requests=requests,
        tokens_left=1000,
        committed=[RIGHT],
        costs=costs,
        sources=sources,
    )
    place.batch = batch_of(place)
    return place


def batch_of(place: RequestContext, readers: int = 0) -> BatchRows:
    """The batch of this request and of others like it; the draft model has read the texts of `readers` requests."""
    requests, length = place.requests, len(place.committed)
    left = float(requests * place.expected_tokens)
    state = BatchState(requests, readers, 0, length * (requests - readers), left)
    return BatchRows(place.costs, requests, state)


class World:
    """A target that always writes RIGHT and a drafter of chains or trees, with simulated times, served as by the
    engine."""

    def __init__(
        self,
        promise: float,
        is_right: Callable[[int], bool],
        step: float = STEP,
        row: float = ROW,
        budget: int = 16,
        width: int = 1,
        costs: CostModel | None = None,
        tokens_left: int = 1000,
        **request: object,
    ) -> None:
        self.free_promise = 0.0  # of a wrong token that a drafter without a model adds below the root
        self.promise, self.is_right, self.step, self.row = promise, is_right, step, row
        self.width = width
        self.costs, self.seconds, self.written, self.asked, self.lag = costs or CostModel(), 0.0, 0, 0, 100
        self.place = place_of(make_request((1,), **request), budget, self.costs)
        self.place.tokens_left = tokens_left

    def run(self, tokens: int, options: Auto.Options | None = None) -> float:
        """Writes `tokens` tokens; returns the speedup over plain decoding."""
        coroutine = Auto().decode(self.place, options or Auto.Options())
        ask, drafting = coroutine.send(None), 0.0
        while self.written < tokens:
            if isinstance(ask, Draft):
                is_free, ask.tree.current_source = ask.source == COPIES, ask.source.name
                if is_free and self.free_promise:
                    ask.tree.add(0, COPY, math.log(self.free_promise))
                reading = 0.0 if is_free else self.lag * 0.05  # what was written is read first
                drafting += reading + (0.0 if is_free else self.step)
                if self.lag > READ_WITH_STEP and not is_free:
                    self.costs.record_reading(ask.source, self.lag, reading)
                else:
                    self.costs.record_draft(ask.source, 0.0 if is_free else self.step + reading, max(ask.width, 1))
                ask = coroutine.send(0 if is_free else self.grow(ask.tree))
            elif isinstance(ask, Verify):
                rows = len(ask.tree)
                ask = coroutine.send([RIGHT] * rows)
                assert isinstance(ask, Commit)
                emitted = len(ask.verdict.path)
                seconds = PASS + self.row * max(rows - 4, 0) + drafting
                self.costs.record_round(1, rows, emitted, seconds, drafting)
                self.costs.begin_round(None)
                self.seconds, self.written = self.seconds + seconds, self.written + emitted
                self.lag += emitted
                self.place.batch = batch_of(self.place, int(self.place.num_read > 0))
                drafting, ask = 0.0, coroutine.send(TokenTree(RIGHT))
        return self.written * PASS / self.seconds

    def grow(self, tree: TokenTree) -> int:
        """Tokens below the end of the chain, or below four leaves; the first of each has the promised chance."""
        self.asked, self.lag, before = self.asked + 1, 0, len(tree)
        leaves = [tree_end(tree)] if self.width == 1 else tree.leaves()[:4] or [0]
        for leaf in leaves:
            is_right = self.is_right(self.written + tree.depth(leaf))
            for place, chance in enumerate((self.promise, 0.2, 0.1, 0.05)[: self.width]):
                token = place + 10 if place else RIGHT if is_right else WRONG
                tree.add(leaf, token, tree.scores[leaf] + math.log(chance))
        return len(tree) - before


def tree_of(source: DraftSource, *chances: float) -> TokenTree:
    """A root, and below it this source's tokens 1, 2, ... with these chances."""
    tree = TokenTree(RIGHT)
    tree.current_source = source.name
    for token, chance in enumerate(chances, 1):
        tree.add(0, token, math.log(chance))
    return tree


def chain_of(source: DraftSource, chances: Sequence[float]) -> TokenTree:
    """A chain of RIGHT by this source, whose nodes are reached with these chances."""
    tree = tree_of(source)
    for node, chance in enumerate(chances):
        tree.add(node, RIGHT, math.log(chance))
    return tree


def tree_end(tree: TokenTree) -> int:
    """The end of the model's chain: the last node that is not a copy."""
    return next(node for node in reversed(range(len(tree))) if tree.tokens[node] != COPY)


def planner_of(costs: CostModel, *sources: DraftSource, budget: int = 8, requests: int = 1) -> Planner:
    return Planner(place_of(make_request((1,)), budget, costs, sources, requests), Auto.Options())


def always(place: int) -> bool:
    return True


def never(place: int) -> bool:
    return False


def share(right: float) -> Callable[[int], bool]:
    """Right in this share of ten places."""
    return lambda place: place % 10 < 10 * right


@pytest.mark.parametrize(
    ("promise", "is_right", "options", "tokens", "least"),
    [
        # Chains of g tokens give (g + 1) PASS / (PASS + g STEP + rows): 4.6 at the best g below the budget of 16.
        (0.97, always, {}, 600, 4.0),
        (0.7, share(0.7), {}, 600, 1.4),
        # Only a trial can find out that a draft has recovered.
        (0.9, lambda place: place >= 400, {}, 2400, 1.5),
        (0.95, never, {}, 512, 0.97),
        (0.5, never, {}, 512, 0.97),
        (0.05, never, {}, 512, 0.97),
        (0.9, always, {"step": 9.0}, 512, 0.97),  # slower than the target
    ],
)
def test_speedups(
    promise: float, is_right: Callable[[int], bool], options: dict[str, Any], tokens: int, least: float
) -> None:
    assert World(promise, is_right, **options).run(tokens) > least


@pytest.mark.parametrize("right", [2, 3])
def test_exploration_does_not_slow_the_first_answer_down(right: int) -> None:
    """Rows that were never timed are tried from few to many: from many to few costs the first answer a fifth."""
    world = World(right / 5, lambda place: place % 5 < right, row=0.45, budget=32, width=4)
    assert world.run(100) > 1.05


def test_a_draft_that_recovers_is_used_again_in_the_next_answer() -> None:
    world = World(0.9, lambda place: place >= 400)
    world.run(400)
    before = world.seconds
    world.run(2400)
    assert 2000 * PASS / (world.seconds - before) > 1.5


def test_a_draft_that_fails_is_tried_less_and_less() -> None:
    """It is trusted for some thirty rounds, for a few bad rounds may be chance."""
    world = World(0.9, never)
    world.run(100)
    first = world.asked
    world.run(2000)
    assert first < 40
    assert world.asked - first < 30
    untried = World(0.9, never)
    untried.run(400, Auto.Options(trials=0.0))
    asked = untried.asked
    untried.run(800, Auto.Options(trials=0.0))
    assert untried.asked - asked < 24, "a new request trusts the engine's experience, which is bad"


def test_a_few_bad_rounds_do_not_end_a_draft_that_pays() -> None:
    """Half of what is proposed is right, in runs of four as in text: it drafts in nearly every round."""
    world = World(0.5, lambda place: place // 4 * 7919 % 13 < 7, step=0.8)
    assert world.run(600) > 1.19
    assert world.asked > 0.9 * world.costs.num_rounds


@pytest.mark.parametrize("row", [0.0, 0.6])
def test_a_level_gains_less_below_four_unlikely_leaves_than_below_a_likely_one(row: float) -> None:
    """If rows cost time: each child is as unlikely as its leaf, and has its price."""
    found = []
    for chances in ((0.8,), (0.2, 0.2, 0.2, 0.2)):
        costs = costs_of(*((rows, PASS + row * (rows - 1)) for rows in (1, 2, 4, 8)), samples=3)
        planner = planner_of(costs, DRAFT._replace(width=4), budget=32)
        planner.begin()
        tree, model = tree_of(DRAFT, *chances), planner.models[0]
        model.levels += 1
        found.append(planner._level_gains(tree, model)[-1])
    assert found[0] == pytest.approx(found[1]) if not row else found[0] > 1.5 * found[1] > 0


def test_bad_copies_do_not_lower_the_factor_of_a_good_model() -> None:
    alone, with_copies = World(0.9, always), World(0.9, always)
    with_copies.free_promise = 0.9
    assert with_copies.run(600) > 0.8 * alone.run(600) > 3.0


@pytest.mark.parametrize(("left", "is_read"), [(4, False), (1000, True)])
def test_a_long_prompt_is_not_read_for_a_few_tokens(left: int, is_read: bool) -> None:
    world = World(0.97, always, tokens_left=left)
    world.place.committed = (RIGHT,) * 1000
    world.costs.expect(DRAFT, 0.1)
    world.costs.record_prefill(100, 10.0)  # so the draft is expected to need 10 seconds, more than one pass
    world.run(40)
    assert (world.asked > 0) is is_read


@pytest.mark.parametrize("left", [1, 2, 3, 6])
def test_no_level_is_planned_that_cannot_be_written(left: int) -> None:
    """The target itself writes the last token, so that many levels that would pay are one less than what is left."""
    costs = costs_of((1, 6.0), (4, 6.0), (8, 6.0), (16, 6.0), samples=3)
    costs.record_draft(DRAFT, 0.01, 1)
    planner = planner_of(costs, DRAFT)
    planner._context.tokens_left = left
    planner.begin()
    tree, model = TokenTree(RIGHT), planner.models[0]
    tree.current_source = DRAFT.name
    while planner.next_width(tree, model):
        tree.add(len(tree) - 1, RIGHT, tree.scores[-1] - 0.01)
        model.levels += 1
    assert tree.deepest == left - 1
    assert len(planner.nodes_to_verify(tree)) == left
    tree.max_depth = left - 2
    assert len(planner.nodes_to_verify(tree)) == max(left - 1, 1), "what a drafter adds below that is not verified"


def test_a_level_has_no_parents_where_the_text_ends() -> None:
    """Copies that reach the end: the model extends what is above."""
    planner = planner_of(costs_of((1, 6.0), (8, 6.0)), COPIES, DRAFT)
    tree = tree_of(COPIES, 0.9)
    tree.add(1, RIGHT, tree.scores[1])
    planner.begin()
    planner.record_lookup(tree)
    reaches = []
    for left in (1000, 4, 3):
        planner._context.tokens_left = left
        reaches.append(planner._level_gains(tree, planner.models[0]))
    assert reaches[0] == reaches[1] == pytest.approx([0.6 * 0.9])
    assert reaches[2] == pytest.approx([0.6 * 0.1]), "the root, if the copies are wrong"


def answer(costs: CostModel, right: float) -> tuple[float, int]:
    """The speedup of 128 tokens and the draft steps for them, if the draft predicts this share of them."""
    world = World(max(right, 0.1), share(right), step=1.5, costs=costs, tokens_left=128)
    return world.run(128), world.asked


def test_each_text_finds_out_what_its_draft_is_worth() -> None:
    """Ten answers that the draft predicts badly: fewer and fewer try it in more than one round. Then an answer that
    it predicts well gains, although all others lost."""
    costs = CostModel()
    lost = [answer(costs, 0.0) for _ in range(10)]
    assert sum(1 / ratio for ratio, _ in lost) / 10 < 1 / 0.97
    assert lost[0][1] > max(asked for _, asked in lost[1:])
    assert answer(costs, 0.8)[0] > 1.3


def test_trials_of_a_text_cost_at_most_what_the_model_may_save() -> None:
    """Texts that the draft predicts badly are tried ever less; the first costs the most."""
    costs, spent = CostModel(), []
    for _ in range(6):
        world = World(0.9, never, costs=costs, tokens_left=128)
        world.run(128)
        spent.append(world.seconds - 128 * PASS)
    assert max(spent[1:]) < spent[0] < 0.15 * 128 * PASS
    assert spent[-1] < 0.02 * 128 * PASS


def test_factors_and_costs_are_kept_by_source() -> None:
    """Two sources of copies, one right and one wrong, do not change the factors of each other or of the model."""
    costs, guesses = CostModel(), DraftSource("prediction", False)
    planner = planner_of(costs, COPIES, guesses, DRAFT, budget=16)
    for _ in range(20):
        tree = TokenTree(RIGHT)
        planner.begin()
        for copier, token in zip(planner.lookups, (WRONG, RIGHT), strict=True):
            costs.record_draft(copier.source, 0.01 if copier.source == COPIES else 0.04, 1)
            copier.is_active = True
            tree.current_source = copier.source.name
            tree.add(0, token, math.log(0.5))
            planner.record_lookup(tree)
        planner.uses_drafts = True
        planner.learn(tree, [0, 2])
    trust = costs.state_dict()["trust"]
    assert trust["ngram"] < 0.2
    assert trust["prediction"] > 1.5
    assert "model" not in trust or trust["model"] == 1.0
    assert costs.draft_seconds(COPIES) == 0.01
    assert costs.draft_seconds(guesses) == 0.04


def test_the_factor_of_a_head_is_kept_by_the_length_of_the_text() -> None:
    """Heads that were trained on short texts are right there and wrong in long ones."""
    costs, head = CostModel(), DraftSource("eagle", True, by_length=True)

    def of(length: int) -> AcceptanceModel:
        return AcceptanceModel(costs, (head,), [0] * length)

    for length, path in ((100, [0, 1]), (9000, [0])):
        model = of(length)
        for _ in range(60):
            model.learn(chain_of(head, (0.8,)), path)
        model.flush()
    assert of(2047).calibration_factor(head) > 1.1
    assert of(8192).calibration_factor(head) < 0.3
    assert of(4000).calibration_factor(head) == of(100).calibration_factor(head), "not seen yet, so as in shorter texts"
    assert of(40000).calibration_factor(head) == of(9000).calibration_factor(head)
    again = CostModel()
    again.load_state_dict(costs.state_dict())
    assert AcceptanceModel(again, (head,), [0] * 9000).calibration_factor(head) < 0.3
    assert AcceptanceModel(again, (head,), [0] * 100).calibration_factor(head) > 1.1


@pytest.mark.parametrize("are_accepted", [True, False])
def test_chances_of_a_calibrated_drafter_are_not_corrected(are_accepted: bool) -> None:
    """If short copies were accepted, a common factor would take a long one for certain, and pay for rows that it is not
    worth; if they failed, it would leave out what the drafter has learnt to offer more rarely."""
    copies = DraftSource("suffix", False, is_calibrated=True)
    # A row costs half a token.
    costs = costs_of(*((rows, 6.0 + 3.0 * (rows - 1)) for rows in range(1, 9)), samples=3)
    for _ in range(20):
        planner, tree = planner_of(costs, copies, DRAFT), chain_of(copies, (0.9, 0.8, 0.7, 0.45))
        planner.begin()
        planner.record_lookup(tree)
        assert planner.nodes_to_verify(tree) == [0, 1, 2, 3]
        planner.learn(tree, [0, 1, 2, 3, 4] if are_accepted else [0])
        planner.end()
    assert copies.name not in costs.state_dict()["trust"]


def test_nodes_with_small_chances_are_not_verified_if_rows_cost_time() -> None:
    """A node worth .1 token is not verified where its row costs .3 of a pass."""
    costs = costs_of((1, 6.0), (2, 7.8), (4, 11.4), (8, 18.6), (10, 40.0), samples=3)
    place = place_of(None, 8, costs)
    planner = Planner(place, Auto.Options())
    planner.begin()
    tree = tree_of(DRAFT, 0.6, 0.1, 0.1, 0.05)
    planner.models[0].levels += 1
    # From eight to nine rows it costs two.
    for rows_of_others, chosen in ((0, [0, 1]), (3, [0, 1]), (7, [0])):
        place.batch.rows = rows_of_others + 1
        assert planner.nodes_to_verify(tree) == chosen


def test_requests_share_the_rows_that_cost_little() -> None:
    """Up to eight rows cost nothing, each further one half a pass. Each of four requests would take all eight, and
    together they take eight, in the first round already."""
    costs = costs_of((4, 6.0), (8, 6.0), (10, 12.0), (16, 30.0), samples=3, requests=4)
    shared = {"costs": costs, "sources": (DRAFT,), "budget": 8, "tokens_left": 8}
    places = [RequestContext(request=make_request((1,)), committed=[1], **shared) for _ in range(4)]
    load = BatchRows.of(places)
    planners = [Planner(place, Auto.Options()) for place in places]
    for _ in range(3):
        counts = []
        for planner, place in zip(planners, places, strict=True):
            planner.begin()
            tree = chain_of(DRAFT, [0.9**depth for depth in range(1, 8)])
            planner.models[0].levels += 1
            counts.append(len(planner.nodes_to_verify(tree)))
            place.set_rows(counts[-1])
        assert sum(counts) == load.rows == 8
        assert [place.rows_of_others for place in places] == [8 - count for count in counts]


@pytest.mark.parametrize(("accepted", "is_active"), [(0, False), (1, False), (3, True)])
def test_in_a_crowded_batch_only_requests_with_good_copies_look_them_up(accepted: int, is_active: bool) -> None:
    """A row costs half a token: a request whose copies do not pay for their rows looks up in one round of many, one
    that copies always."""
    costs = costs_of((4, 6.0), (8, 9.0), (16, 15.0), samples=3, requests=4)
    planner = planner_of(costs, COPIES, requests=4)
    asked = 0
    for _ in range(200):
        planner.begin()
        tree = tree_of(COPIES)
        if not planner.is_plain and planner.lookups[0].is_active:
            asked += 1
            costs.record_draft(COPIES, 0.1, 1)
            tree = chain_of(COPIES, (0.95, 0.9, 0.9))
            planner.record_lookup(tree)
        planner.learn(tree, range(1 + min(accepted, len(tree) - 1)))
        costs.record_round(4, 3 + len(tree), 4, 6.0 + 0.75 * (len(tree) - 1), 0.0)
        costs.begin_round(None)
    assert asked > 150 if is_active else 1 < asked < 20, asked


def test_a_batch_tries_its_draft_at_once() -> None:
    """What further rows cost is not known yet, so that a draft does not pay as far as is known."""
    costs = costs_of((32, 7.8), samples=3, requests=32)
    planner = planner_of(costs, DRAFT, requests=32)
    planner._context.tokens_left = 128
    planner.begin()
    assert planner.next_width(tree_of(DRAFT), planner.models[0]) == 1
    assert planner._context.batch.num_drafting == 1, "one request tries it for all"


def steps_of_a_bad_model(requests: int, answers: int) -> int:
    """How many steps one of several requests, that write short answers one after the other, takes of a draft model
    whose tokens are never accepted."""
    costs, asked = costs_of((4, 6.0), (8, 9.0), (16, 15.0), samples=3, requests=requests), 0
    for _ in range(answers):
        planner = planner_of(costs, DRAFT, requests=requests)
        for _ in range(60):
            planner.begin()
            tree = tree_of(DRAFT)
            while not planner.is_plain and (width := planner.next_width(tree, planner.models[0])):
                asked += 1
                costs.record_draft(DRAFT, 0.5 * requests, width * requests, requests)
                tree.add(tree_end(tree), WRONG, math.log(0.5))
                planner.models[0].levels += 1
            planner.learn(tree, [0])
            costs.record_round(requests, requests + len(tree) - 1, requests, 6.0, 0.0)
            costs.begin_round(None)
            planner._context.batch = batch_of(planner._context, requests * (planner._context.num_read > 0))
    return asked


def test_a_crowded_batch_remembers_for_the_next_request_that_trials_failed() -> None:
    """One request alone does not: the draft may predict the next text well."""
    assert steps_of_a_bad_model(4, 60) < 20
    assert steps_of_a_bad_model(1, 60) > 60


def test_rules_that_judge_draws_are_refused() -> None:
    """Cutting a chain by what was drawn would favour tokens."""
    place = World(0.9, always, rule="rejection", temperature=1.0).place
    with pytest.raises(UserError, match="a rule whose text depends on the drafts"):
        Auto().decode(place, Auto.Options()).send(None)


@pytest.mark.parametrize(("most", "is_read"), [(64, False), (512, True), (4096, True)])
def test_a_large_limit_of_tokens_does_not_make_a_long_prompt_worth_reading(most: int, is_read: bool) -> None:
    """Clients that set no limit get one of thousands of tokens, and write ten."""
    place = place_of(None, 8, costs_of((1, 0.03)))
    place.tokens_left = most
    source = ModelSource(DRAFT, place)
    assert place.expected_tokens == min(most, 512)
    assert source.may_try(2.0, 0.01) is is_read, "a prompt that takes two seconds to read"
    assert not source.may_try(30.0, 0.01), "one that takes half a minute"
