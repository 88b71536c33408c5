"""Chooses what a drafter in a worker does during a pass of the target: it adds the levels that fit, or rests."""

from __future__ import annotations

from collections.abc import Callable

from outpace.core.drafting import LEVEL_SHARE, DraftDirectives
from outpace.core.types import WORKER
from outpace.planning.sources import PlanningContext

_MIN_GAIN = 0.05
_LEVEL = DraftDirectives(levels=1, floor=0.0, share=LEVEL_SHARE)
_REST = DraftDirectives(levels=0)
PARALLEL, SEQUENTIAL = "parallel", "sequential"


class ParallelDraftPolicy:
    """Decides for one request whether the worker drafts during the target's passes (parallel) or only while the target
    waits (sequential), and how many levels it adds in a pass.

    Parallel drafting slows the passes down where both share a device or cores. It pays while this takes less time than
    drafting what it leaves for the next round, or less than these tokens are worth.

    A level that ends after the pass is begun if the part of it that fits is larger than the chance of a miss: a hit
    saves this part, and after a miss the remaining part delays the new tree.

    A drafter far away, on another machine, always drafts: the target does not wait for it.
    """

    def __init__(
        self,
        context: PlanningContext,
        step_seconds: Callable[[], float],
        trials: float,
        round_trip: Callable[[], float] = float,
    ) -> None:
        """`step_seconds` returns the mean duration of the worker's forwards, `round_trip` that of a message there and
        back; 0 if unknown."""
        self._context, self._costs, self._step_seconds, self._trials = context, context.costs, step_seconds, trials
        self._round_trip = round_trip
        self._passes = {mode: self._costs.mode_curve(mode) for mode in (PARALLEL, SEQUENTIAL)}
        self._left = self._costs.statistic("left for the next round", 0.5, 4.0)  # tokens
        self._hits = self._costs.statistic("hits", 0.5, 4.0)  # share of the rounds
        self._rows = 0  # of the last pass
        self.mode = PARALLEL

    def learn(self, is_hit: bool, worth: float) -> None:
        """Learn from the last round, which left candidates that are worth this many tokens."""
        if self._rows:
            self._passes[self.mode].learn(self._rows, self._costs.last_pass_seconds)
            if self.mode == PARALLEL:
                self._left.learn(worth)
                self._hits.learn(is_hit)

    def for_pass(self, rows: int, price: float) -> DraftDirectives:
        """Choose for a pass over `rows` rows of this request, where a second is worth `price` tokens."""
        self._rows = rows + self._context.rows_of_others
        step, seconds = self._step_seconds(), self._costs.pass_seconds(self._rows)
        if self.is_round_trip_long:
            self.mode = PARALLEL
            return self.before_pass
        self._choose(step, price)
        if self.mode == SEQUENTIAL:
            return _REST
        return _LEVEL._replace(levels=max(1, int(seconds / step + self._hits.value)) if step and seconds else None)

    @property
    def is_round_trip_long(self) -> bool:
        """Whether the round trip to the drafter takes longer than half a pass, too long to wait for an answer."""
        return self._round_trip() > self._costs.pass_seconds(self._rows or 1) / 2

    @property
    def before_pass(self) -> DraftDirectives:
        """Directives for the time before the next pass: one level if drafting is sequential, else no limit."""
        return _LEVEL if self.mode == SEQUENTIAL else _LEVEL._replace(levels=None)

    def _choose(self, step: float, price: float) -> None:
        seconds = {mode: curve.seconds(self._rows) for mode, curve in self._passes.items()}
        slower = seconds[PARALLEL] - seconds[SEQUENTIAL]
        first = max(self._costs.acceptance(WORKER).value(0), _MIN_GAIN)
        saved = self._left.value * min(step / first, 1.0 / price if price else step / first)
        best, other = (PARALLEL, SEQUENTIAL) if saved >= slower else (SEQUENTIAL, PARALLEL)
        unknown = next((mode for mode, known in seconds.items() if not known), None)
        exploration = self._costs.exploration
        self.mode = unknown or (other if exploration.is_due(other, abs(slower - saved), self._trials) else best)
        exploration.record_use(self.mode, float(self.mode == best))
