"""CARD with planned waits: the target verifies at once, or first waits for more draft layers where these pay.

Our own, after CARD, arXiv:2508.04462. Time is priced in tokens (Dinkelbach, 1967).

After a hit as after a miss the target waits for another layer while the tokens that this adds to the best tree outweigh
the wait. While the target runs, the drafter makes the layers that fit into the pass and then rests, so that it is free
when the correction comes; or, where working beside one another does not pay, it rests all the time and drafts in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, sqrt

from outpace.card.cache import CandidateCache
from outpace.core.drafting import DraftDirectives
from outpace.core.errors import check_range, check_whole
from outpace.core.types import Await, Commit, Source, Verify
from outpace.decoders.base import Coroutine, RequestContext
from outpace.planning.cost_model import CostModel
from outpace.planning.estimators import DecayedMean, ExplorationBudget

LOSSLESS = True
COST = "a pass with the draft running beside it, and waits for the draft where these pay; host time for planning"
NEEDS = "worker"
_UNKNOWN = 2  # layers that are waited for at most before there is a price
_SHARE = 1 / 8  # of the tree's room, that one layer may take
_REACH = 16  # leaves that the next layer is expected to expand
BESIDE, IN_TURN = "beside", "in turn"
_LAYER = Source("a layer that was waited for", True)


@dataclass(frozen=True)
class Options:
    """`deepest`: the most layers to wait for in a round; `trials`: the share of time for trying again what did not pay.

    To measure what a part contributes: `hits` false waits only after misses; `rests` false never pauses the drafter;
    `turns` false never drafts in turn with the target.
    """

    deepest: int = 16
    trials: float = 0.01
    hits: bool = True
    rests: bool = True
    turns: bool = True

    def __post_init__(self) -> None:
        check_whole("deepest", self.deepest, 0, 256)
        check_range("trials", self.trials, 0.0, 1.0)


def decode(place: RequestContext, options: Options) -> Coroutine:
    """Plan, wait, query, verify, correct."""
    candidates, planner = place.candidates, _Planner(place, options)
    while True:
        planner.begin()
        while planner.is_worth_waiting:
            if planner.is_in_turn:
                place.order(planner.next)
            yield Await(candidates.layers + 1)
            planner.waited()
        tree = candidates.query(planner.rows)
        place.order(planner.during(len(tree)))
        picks = yield Verify(tree)
        candidates.late(tree)
        verdict = place.request.rule.walk(tree, picks)
        hit, correction = candidates.correct(tree, verdict, len(picks))
        place.correct(correction)
        if not planner.is_in_turn:  # whether the target waits or not, and before it knows
            place.order(planner.next)
        planner.learn(tree.scores, len(verdict.path) - 1)
        yield Commit(tree, verdict, hit)


class _Planner:
    """What is known of a request's drafts, and what follows from it for this round. Only verbs change it."""

    def __init__(self, place: RequestContext, options: Options) -> None:
        self._place, self._options = place, options
        self._costs: CostModel = place.costs
        self._candidates: CandidateCache = place.candidates
        self._ledger = ExplorationBudget(options.trials)
        self._trust = self._costs.trust(BESIDE)  # accepted tokens over the chances that were given them
        self._modes = _Modes(self._costs, self._ledger, options.turns)
        self._waits = self._costs.mode("waits for a layer")  # seconds: a forward, and the way there and back
        self._layers = 0  # waited for in this round
        self._judged = 0  # rows of the last pass

    def begin(self) -> None:
        """A round begins: the prices that hold in it."""
        self._ledger.elapsed(self._costs.latest_round)
        self._price = self._costs.price(self._place.requests)
        self._step = self._place.step_seconds()
        if self._layers:
            self._waits.learn(self._costs.latest_round - self._costs.latest_pass, self._layers)
        self._layers = 0
        self._is_miss = self._candidates.missed
        self._look()
        if self._judged:
            self._modes.learn(self._judged + self._place.rows_of_others, self._worth)

    def _look(self) -> None:
        """What the cache holds now: what its best rows are worth, and what a further layer promises."""
        chances, leaves = self._candidates.outlook(self._place.budget - 1, _REACH)
        trust = min(1.0, self._trust.value)
        reach = min(1.0, sum(leaves)) * (trust if len(self._candidates) else 1.0)
        self._promise = reach * min(1.0, sqrt(sum(leaf * leaf for leaf in leaves)))
        trusted = [trust * chance for chance in chances]
        self.rows, self._worth = self._costs.best(trusted, self._place.rows_of_others, self._price)

    @property
    def _growth(self) -> DecayedMean:
        """Tokens that a layer adds, over its promise."""
        return self._costs.growth(_LAYER, 0)

    @property
    def _gain(self) -> float:
        """Tokens that the next layer is expected to add. The walk has to reach the layer, and then to go on below it:
        which it does the less, the more leaves its chance is spread over, for a draft that is unsure stays so."""
        return self._growth.value * self._promise

    @property
    def is_worth_waiting(self) -> bool:
        """Whether the next layer pays, or is due for a trial."""
        most = self._options.deepest if self._price and self._step else _UNKNOWN
        is_allowed = self._is_miss or self._options.hits
        if self._layers >= most or not is_allowed or self._place.budget < 2 or self._candidates.is_given_up:
            return False
        return self._pays or self._ledger.is_due(_LAYER, self._wait)

    @property
    def _wait(self) -> float:
        """Seconds that a wait for one layer is expected to take."""
        return self._waits.value or self._step

    @property
    def _pays(self) -> bool:
        return self._gain > self._price * self._wait

    @property
    def is_in_turn(self) -> bool:
        """Whether the drafter rests while the target runs, as far as was decided."""
        return self._modes.mode == IN_TURN

    @property
    def next(self) -> DraftDirectives:
        """Until the target runs: in turn a layer and no more, else on and on, for the next may follow at once."""
        return DraftDirectives(layers=1 if self.is_in_turn else None, floor=0.0, share=_SHARE)

    def waited(self) -> None:
        """The wait is over."""
        before, promise = self._worth, self._promise
        self._ledger.tried(_LAYER, self._pays)
        self._look()
        most = self._costs.most_more(self._place.rows_of_others)
        if self.rows <= most and promise > 0:  # else the rows that are known hide what it added
            self._growth.learn(max(0.0, self._worth - before), promise)
        self._layers += 1

    def during(self, rows: int) -> DraftDirectives:
        """While the target runs over so many rows: as many layers as end with it, or none."""
        self._judged = rows
        first = max(self._growth.value, 0.05)  # of a round: the walk is at its root in any case
        self._modes.choose(rows + self._place.rows_of_others, self._step, first)
        if self.is_in_turn:
            return DraftDirectives(layers=0)
        seconds = self._costs.target(rows + self._place.rows_of_others)
        if not (self._options.rests and self._step and seconds):
            return self.next
        return DraftDirectives(layers=max(1, int(seconds / self._step + 0.05)), floor=0.0, share=_SHARE)

    def learn(self, scores: Sequence[float], accepted: int) -> None:
        """The target has judged a tree with these path scores, and accepted so many of its nodes."""
        if len(scores) > 1:
            self._trust.learn(accepted, sum(map(exp, scores[1:])))


class _Modes:
    """Whether the drafter works beside the target or in turn with it: beside, while what that leaves for the next
    round would take longer to draft in turn than it slows the target's passes down. Passes are compared with what so
    many rows take on average."""

    def __init__(self, costs: CostModel, ledger: ExplorationBudget, turns: bool) -> None:
        self._costs, self._ledger, self._turns = costs, ledger, turns
        self._slowness = {mode: costs.mode(mode) for mode in (BESIDE, IN_TURN)}
        self._left = costs.mode("left for the next round", 0.5, 4.0)  # tokens
        self.mode = BESIDE

    def learn(self, rows: int, left: float) -> None:
        """A pass over so many rows is over; what is drafted is worth so many tokens as it stands."""
        usual = self._costs.target(rows)
        if usual and self._turns:
            self._slowness[self.mode].learn(self._costs.latest_pass, usual)
        if self.mode == BESIDE:
            self._left.learn(left)

    def choose(self, rows: int, step: float, first: float) -> None:
        """For the next pass: a layer takes `step` seconds, and a round's first one gives `first` tokens."""
        if not self._turns:
            return
        usual = self._costs.target(rows)
        slower = usual * (self._slowness[BESIDE].value - self._slowness[IN_TURN].value)
        saved = step * self._left.value / first
        best, other = (BESIDE, IN_TURN) if saved >= slower else (IN_TURN, BESIDE)
        unknown = next((mode for mode, mean in self._slowness.items() if not mean.value), None)
        self.mode = unknown or (other if self._ledger.is_due(other, abs(slower - saved)) else best)
        self._ledger.tried(self.mode, self.mode == best)
