"""CARD with planned waits: the target verifies at once, or first waits for more draft layers where these pay.

Our own, after CARD, arXiv:2508.04462. Time is priced in tokens (Dinkelbach, 1967).

After a hit as after a miss the target waits for another layer while the tokens that this adds to the best tree outweigh
the wait. While the target runs, the drafter makes the layers that fit into the pass and then rests, so that it is free
when the correction comes. Where parallel drafting does not pay, it drafts only while the target waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, sqrt

from outpace.card.cache import CandidateCache
from outpace.core.drafting import DraftDirectives
from outpace.core.options import MethodOptions, number, whole
from outpace.core.types import Await, Source, Verify
from outpace.decoders.base import Decoder, DecoderGenerator, RequestContext, walk_and_correct
from outpace.planning.cost_model import YIELD, CostModel
from outpace.planning.estimators import DecayedMean

_UNKNOWN = 2  # most layers to wait for before a price is known
_SHARE = 1 / 8  # of the tree's nodes that one layer may use
_REACH = 16  # leaves that the next layer is assumed to expand
PARALLEL, ALTERNATING = "parallel", "alternating"
_LAYER = Source("awaited layer", True)


class Planned(Decoder):
    """Plans, waits, queries, verifies, corrects."""

    name = "planned"
    cost = "a pass with the draft running in parallel, and waits for the draft where these pay; host time for planning"
    drafting = "parallel"
    usual_nodes = 32

    @dataclass(frozen=True)
    class Options(MethodOptions):
        """`deepest`: the most layers to wait for in a round; `trials`: the share of time for trying again what did not
        pay.

        For ablations: `hits` false waits only after misses; `rests` false never pauses the drafter; `turns` false
        always drafts in parallel.
        """

        deepest: int = whole(16, 0, 256)
        trials: float = number(0.01, 0.0, 1.0)
        hits: bool = True
        rests: bool = True
        turns: bool = True

    def decode(self, context: RequestContext, options: Options) -> DecoderGenerator:
        candidates, planner = context.candidates, WaitPlanner(context, options)
        while True:
            planner.begin()
            while planner.is_worth_waiting:
                if planner.alternates:
                    context.set_directives(planner.next)
                yield Await(candidates.layers + 1)
                planner.waited()
            tree = candidates.query(planner.rows)
            context.set_directives(planner.during(len(tree)))
            picks = yield Verify(tree)
            commit = walk_and_correct(context, tree, picks)
            if not planner.alternates:  # sent at once, before the target has decided whether to wait
                context.set_directives(planner.next)
            planner.learn(tree.scores, len(commit.verdict.path) - 1)
            yield commit


class WaitPlanner:
    """Chooses for one request how long the target waits for drafts, and what the drafter does meanwhile."""

    def __init__(self, context: RequestContext, options: Planned.Options) -> None:
        self._context, self._options = context, options
        self._costs: CostModel = context.costs
        self._candidates: CandidateCache = context.candidates
        self._trust = self._costs.trust(PARALLEL)  # accepted tokens / sum of their predicted chances
        self._modes = _Modes(self._costs, options)
        self._waits = self._costs.statistic(
            "waits for a layer"
        )  # seconds of a forward and the communication with the worker
        self._layers = 0  # layers that were waited for in this round
        self._judged = 0  # verified rows of the last pass

    def begin(self) -> None:
        """Begin a round: update estimates with the last one and read the current prices."""
        self._price = self._costs.tokens_per_second(self._context.requests)
        self._step = self._context.draft_seconds()
        if self._layers:
            self._waits.learn(self._costs.last_round_seconds - self._costs.last_pass_seconds, self._layers)
        self._layers = 0
        self._is_miss = self._candidates.missed
        self._look()
        if self._judged:
            self._modes.learn(self._judged + self._context.rows_of_others, self._worth)

    def _look(self) -> None:
        """Compute what the best rows in the cache are worth now, and how much another layer may add."""
        chances, leaves = self._candidates.best_probabilities(self._context.budget - 1, _REACH)
        trust = min(1.0, self._trust.value)
        reach = min(1.0, sum(leaves)) * (trust if len(self._candidates) else 1.0)
        # Chance that the walk reaches the next layer, scaled by how much the leaves' chances are concentrated on a few.
        self._expected_reach = reach * min(1.0, sqrt(sum(leaf * leaf for leaf in leaves)))
        trusted = [trust * chance for chance in chances]
        self.rows, self._worth = self._costs.best_rows(trusted, self._context.rows_of_others, self._price)

    @property
    def _growth(self) -> DecayedMean:
        """Tokens that a layer added, relative to `_expected_reach` before it."""
        return self._costs.statistic("growth of an awaited layer", YIELD, 2.0)

    @property
    def _gain(self) -> float:
        """Tokens that the next layer is expected to add. The walk must reach the layer and continue below it, which is
        the less likely the more leaves share its chance: a draft that is unsure stays unsure."""
        return self._growth.value * self._expected_reach

    @property
    def is_worth_waiting(self) -> bool:
        """Whether to wait for the next layer because it pays or is due for a trial."""
        most = self._options.deepest if self._price and self._step else _UNKNOWN
        is_allowed = self._is_miss or self._options.hits
        if self._layers >= most or not is_allowed or self._context.budget < 2 or self._candidates.is_given_up:
            return False
        return self._pays or self._costs.exploration.is_due(_LAYER, self._wait, self._options.trials)

    @property
    def _wait(self) -> float:
        """Expected seconds of a wait for one layer."""
        return self._waits.value or self._step

    @property
    def _pays(self) -> bool:
        return self._gain > self._price * self._wait

    @property
    def alternates(self) -> bool:
        """Whether drafting and verification currently alternate instead of running in parallel."""
        return self._modes.mode == ALTERNATING

    @property
    def next(self) -> DraftDirectives:
        """Directives for the time before the next pass: one layer if drafting alternates with it, else no limit."""
        return DraftDirectives(layers=1 if self.alternates else None, floor=0.0, share=_SHARE)

    def waited(self) -> None:
        """Update the estimates after a wait for one layer."""
        before, expected_reach = self._worth, self._expected_reach
        self._costs.exploration.record_trial(_LAYER, self._pays)
        self._look()
        most = self._costs.max_extra_rows(self._context.rows_of_others)
        if self.rows <= most and expected_reach > 0:  # otherwise the limit on rows hides what it added
            self._growth.learn(max(0.0, self._worth - before), expected_reach)
        self._layers += 1

    def during(self, rows: int) -> DraftDirectives:
        """Return directives for a pass over `rows` rows: as many layers as fit into it, or none."""
        self._judged = rows
        first = max(self._growth.value, 0.05)  # yield of a round's first layer: the walk always reaches the root
        self._modes.choose(rows + self._context.rows_of_others, self._step, first)
        if self.alternates:
            return DraftDirectives(layers=0)
        seconds = self._costs.pass_seconds(rows + self._context.rows_of_others)
        if not (self._options.rests and self._step and seconds):
            return self.next
        return DraftDirectives(layers=max(1, int(seconds / self._step + 0.05)), floor=0.0, share=_SHARE)

    def learn(self, scores: Sequence[float], accepted: int) -> None:
        """Learn from a verified tree with these path scores, of whose nodes the target accepted `accepted`."""
        if len(scores) > 1:
            self._trust.learn(accepted, sum(map(exp, scores[1:])))


class _Modes:
    """Chooses whether drafting runs in parallel with the target or alternates with it: in parallel, while drafting the
    layers left for the next round would take longer than the target's passes are slowed down. Slowness is relative to
    the average time of a pass over as many rows."""

    def __init__(self, costs: CostModel, options: Planned.Options) -> None:
        self._costs, self._trials, self._may_alternate = costs, options.trials, options.turns
        self._slowness = {mode: costs.statistic(mode) for mode in (PARALLEL, ALTERNATING)}
        self._left = costs.statistic("left for the next round", 0.5, 4.0)  # tokens
        self.mode = PARALLEL

    def learn(self, rows: int, left: float) -> None:
        """Learn from a pass over `rows` rows, after which the drafted nodes are worth `left` tokens."""
        usual = self._costs.pass_seconds(rows)
        if usual and self._may_alternate:
            self._slowness[self.mode].learn(self._costs.last_pass_seconds, usual)
        if self.mode == PARALLEL:
            self._left.learn(left)

    def choose(self, rows: int, step: float, first: float) -> None:
        """Choose for the next pass: a layer takes `step` seconds, and a round's first layer adds `first` tokens."""
        if not self._may_alternate:
            return
        usual = self._costs.pass_seconds(rows)
        slower = usual * (self._slowness[PARALLEL].value - self._slowness[ALTERNATING].value)
        saved = step * self._left.value / first
        best, other = (PARALLEL, ALTERNATING) if saved >= slower else (ALTERNATING, PARALLEL)
        unknown = next((mode for mode, mean in self._slowness.items() if not mean.value), None)
        exploration = self._costs.exploration
        self.mode = unknown or (other if exploration.is_due(other, abs(slower - saved), self._trials) else best)
        exploration.record_trial(self.mode, self.mode == best)
