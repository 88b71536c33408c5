"""The cost model: times of target passes, draft steps and the host, and the gain of drafts, learnt while decoding.

All values are medians or decayed means over the recent past, so that they adapt when other programs load
the machine. What was never measured is extrapolated from what is known, so that it is tried once and then measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from outpace.core.stats import DecayedMean
from outpace.core.types import WORKER, Drafter, DraftSource
from outpace.models.base import Model
from outpace.planning.estimators import ExplorationBudget, LatencyCurve, LevelGains

_CALIBRATION_FADE = (
    0.99  # slower than other means: a profile describes a pair of models, not the end of the last answer
)
_SHORT_TEXT = 2048  # tokens; the factors of longer texts are kept by their length
_GAIN_FADE = 0.9  # faster, because samples are rare: a few trials must undo what bad first rounds suggested
_EVERY = 12  # at most one round in this many is a plain round that is run to measure its time
_CLEAR = 1.5  # speedup from which the time of plain decoding hardly matters
_LEVELS = 8  # draft levels with estimates of their own
MAX_PAUSE = 4  # longest run of rounds that decode plainly without a plan
_LOOKUP_GAIN, _LOOKUP_WEIGHT = 0.2, 8.0  # prior: tokens that lookups add to a round, and its weight in rounds
PRIOR_GAIN = 0.6  # prior: tokens that a level adds, per unit of acceptance probability at the leaves
_READING = 0.2  # seconds; shorter passes would read the weights too often for too few prompt tokens
_REQUEST_GAIN_FADE = 0.93  # the same for the gains of levels: a draft that turns bad must be given up


class Prices(NamedTuple):
    """Prices by which the rounds of some number of requests are planned."""

    tokens_per_second: float
    is_known: bool  # whether a round of plain decoding was timed


class CostModel:
    """Seconds of passes and draft steps, tokens per second, and calibration of drafters. Not thread-safe.

    `rows` are those of the whole pass, of all requests together.
    """

    def __init__(self) -> None:
        self._rounds = LatencyCurve()
        self._pause, self._planned_from = 0, 0  # see `is_paused`
        self.exploration = ExplorationBudget()
        self.last_pass_seconds = 0.0  # seconds of the last round without its drafting
        self._steps: dict[str, LatencyCurve] = {}  # by source: a draft step by nodes expanded; a lookup by request
        self._catching_up: set[str] = set()  # see `note_catch_up`
        self._shares: dict[str, float] = {}  # by source: prior for a draft step as a fraction of a target pass
        self._sharing = defaultdict[tuple[int, int], DecayedMean](partial(DecayedMean, 1.0, 4.0))  # see `sharing`
        self._prefill = DecayedMean(0.0, 0.0)  # seconds of the target for each prompt token
        self._rates = defaultdict[int, DecayedMean](partial(DecayedMean, 0.0, 0.0))  # requests -> tokens per second
        self._factors = defaultdict[str, DecayedMean](partial(DecayedMean, 1.0, 2.0, _CALIBRATION_FADE))  # by source
        self._level_gains: dict[str, dict[int, LevelGains]] = {}  # by source and requests
        self._prices: dict[int, Prices] = {}  # by requests; cleared when a measurement changes them
        gain = partial(DecayedMean, _LOOKUP_GAIN, _LOOKUP_WEIGHT, _CALIBRATION_FADE)
        self._lookup_gains = defaultdict[tuple[str, int], DecayedMean](gain)  # by source and requests
        self._statistics: dict[str, DecayedMean] = {}  # see `statistic`

    @property
    def num_rounds(self) -> int:
        return self._rounds.num_rounds

    def record_round(self, requests: int, rows: int, tokens: int, seconds: float, drafting: float) -> None:
        """Record a round in which all requests together wrote `tokens`, with `drafting` seconds of it before the
        pass."""
        was_planned = not self.is_paused(requests)
        self.last_pass_seconds = seconds - drafting
        self.exploration.advance(seconds - drafting)
        known = self._prices.get(requests)
        if self._rounds.learn(rows, seconds - drafting) or known is None or not known.is_known:
            self._prices.clear()
        self._rates[requests].learn(tokens, seconds)
        if rows > requests:
            self._pause = self._planned_from = 0
        elif was_planned:
            self._pause = min(2 * self._pause or 1, MAX_PAUSE)
            self._planned_from = self.num_rounds + self._pause

    def is_paused(self, requests: int) -> bool:
        """Return whether requests without a worker whose lookups gain nothing decode plainly without a plan in the next
        round. Planning costs host time: if none drafted in the last planned round, up to four are not planned."""
        return requests > 1 and self.num_rounds < self._planned_from

    def prices(self, requests: int) -> Prices:
        """Return the prices of the next round of this many requests: the same for each, recomputed after changes."""
        prices = self._prices.get(requests)
        if prices is None:
            prices = Prices(self.tokens_per_second(requests), requests <= self._rounds.widest)
            self._prices[requests] = prices
        return prices

    def needs_plain_round(self, requests: int) -> bool:
        """Return whether all requests should run one round of plain decoding, because none was timed recently and
        drafting is not much faster than the last that was."""
        is_close = self.num_rounds % _EVERY == 0 and self.speedup(requests) < _CLEAR
        return is_close and self._rounds.is_stale(requests)

    def calibration_factor(self, source: str, length: int = 0) -> DecayedMean:
        """Return the ratio of accepted tokens to the sum of their predicted chances, for the source with this name.

        For texts of at least 2,048 tokens (`length`), there is one value for each power of two; a new one starts from
        that of texts of half the length.
        """
        if length < _SHORT_TEXT:
            return self._factors[source]
        name = f"{source}@{1 << (length.bit_length() - 1)}"
        if name not in self._factors:
            self._factors[name] = DecayedMean(
                self.calibration_factor(source, length // 2).value, 2.0, _CALIBRATION_FADE
            )
        return self._factors[name]

    def lookup_gain(self, source: str, requests: int) -> DecayedMean:
        """Return the tokens that a lookup source adds to a round that asks it, minus the price of its rows."""
        return self._lookup_gains[source, requests]

    def initial_lookup_gain(self, source: str, requests: int) -> DecayedMean:
        """Return a mean of one request's own gain, which starts from the common value."""
        return DecayedMean(self.lookup_gain(source, requests).value, _LOOKUP_WEIGHT)

    def statistic(self, name: str, prior: float = 0.0, weight: float = 0.0) -> DecayedMean:
        """Return the decayed mean that a decoder keeps under this name."""
        return self._statistics.setdefault(name, DecayedMean(prior, weight, _GAIN_FADE))

    def level_gains(self, source: DraftSource, requests: int = 1) -> LevelGains:
        """Return the tokens that levels of this source add, less the price of their rows, per unit of the chance that
        the walk reaches them. Those of a new number of requests start from the nearest one's."""
        known = self._level_gains.setdefault(source.name, {})
        if requests not in known:
            gains = LevelGains(PRIOR_GAIN, _GAIN_FADE)
            if known:
                gains.load_state_dict(known[nearest(known, requests)].state_dict())
            known[requests] = gains
        return known[requests]

    def initial_level_gains(self, source: DraftSource) -> LevelGains:
        """Return `level_gains` for one request that runs alone, which start from the common first level's."""
        return LevelGains(self.level_gains(source).value(0), _REQUEST_GAIN_FADE)

    def _step_curve(self, source: DraftSource) -> LatencyCurve:
        """Return the times of a source's draft steps. Until they are known, a step is assumed to take its share of a
        target pass over as many rows."""
        curve = self._steps.get(source.name)
        if curve is None:
            share = self._shares.get(source.name, 0.0)
            curve = LatencyCurve(lambda rows: share * self.pass_seconds(rows))
            self._steps[source.name] = curve
        return curve

    def record_draft(self, source: DraftSource, seconds: float, width: int, requests: int = 1) -> None:
        """Record a growth of the trees of `requests` requests by one source: a forward that expanded `width` nodes of
        all of them together, or lookups; `seconds` include the host's time for planning the next growth."""
        if source.name in self._catching_up:
            self._catching_up.remove(source.name)
        elif source.runs_model and source.name != WORKER.name:
            self._step_curve(source).learn(width, seconds)
        else:
            self._step_curve(source).learn(1, seconds / requests)

    def note_catch_up(self, source: DraftSource) -> None:
        """Note that in its next growth this model reads text that it did not propose, so that its time is not that of a
        draft step."""
        self._catching_up.add(source.name)

    def draft_seconds(self, source: DraftSource, requests: float = 1, width: int = 1) -> float:
        """Return one request's share of a draft step in which each of `requests` requests expands `width` nodes, or 0
        while nothing is known. Requests do not share lookups or waits for a worker."""
        curve = self._steps.get(source.name) or self._step_curve(source)
        if source.runs_model and source.name != WORKER.name:
            return curve.seconds(round(width * requests)) / requests
        return curve.seconds(1)

    def sharing(self, requests: int, level: int) -> DecayedMean:
        """Return the share of the requests with the level above (all for the first) that grow this level where any
        does: they share its forward."""
        return self._sharing[requests, min(level, _LEVELS)]

    def record_levels(self, requests: int, levels: Sequence[int]) -> None:
        """Record in how many of the round's requests each draft level was grown."""
        before = requests
        for level, growing in enumerate(levels if requests > 1 else ()):
            self.sharing(requests, level).learn(growing, before)
            before = growing

    def expect_draft_steps(self, target: Model, drafters: Iterable[Drafter]) -> None:
        """Set priors for draft steps from the sizes of the weights: passes over few rows are bound by memory."""
        whole = target.weight_bytes
        if not whole:
            return
        for drafter in drafters:
            for source in drafter.capabilities.sources:
                if source.weight_bytes:
                    self.expect(source, source.weight_bytes / whole)

    def expect(self, source: DraftSource, share: float) -> None:
        """Set a prior for a draft step's cost as a fraction of a target pass, replaced by the first measurement."""
        self._shares[source.name] = share

    def record_prefill(self, tokens: int, seconds: float) -> None:
        """Record a target pass that read `tokens` prompt tokens and nothing else."""
        self._prefill.learn(seconds, tokens)
        self._rounds.learn_prefill(tokens, seconds)
        self._prices.clear()

    def draft_prefill_seconds(self, source: DraftSource, tokens: int) -> float:
        """Return the expected seconds that a source's model needs to read a text of `tokens` tokens."""
        read = tokens if source.reads is None else min(tokens, source.reads)
        return self._shares.get(source.name, 0.0) * self._prefill.value * read

    def reading_seconds(self, rows: int) -> float:
        """Return how long texts may be read in a round in which requests that write verify `rows` rows: as long as
        their pass takes or `_READING`, so that neither side waits for the other."""
        return max(self.pass_seconds(rows), _READING)

    def is_timed(self, rows: int, samples: int) -> bool:
        """Return whether a pass over `rows` rows was timed at least `samples` times."""
        return self._rounds.is_timed(rows, samples)

    def is_untimed(self, rows: int) -> bool:
        """Return whether the time of a pass over `rows` rows is unknown or stale."""
        return self._rounds.is_untimed(rows)

    def pass_seconds(self, rows: int) -> float:
        """Return the expected seconds of a round over `rows` rows without its drafting, or 0 while unknown."""
        return self._rounds.seconds(rows)

    def extra_seconds(self, rows: int, count: int) -> Sequence[float]:
        """Return how much longer a round takes with 1, 2, ... `count` more rows than `rows`."""
        return self._rounds.extra_seconds(rows, count)

    def max_extra_rows(self, others: int) -> int:
        """Return how many rows a request may try besides its root, while other requests have `others` rows."""
        return self._rounds.max_extra_rows(others)

    def best_rows(self, chances: Sequence[float], others: int, price: float) -> tuple[int, float]:
        """Apply `best_rows` to nodes with these falling chances, while other requests have `others` rows."""
        rounds = self._rounds
        extra = rounds.extra_seconds(others + 1, min(rounds.max_extra_rows(others), len(chances)))
        return best_rows(chances, extra, price)

    def tokens_per_second(self, requests: int) -> float:
        """Return the price of a second in tokens: the current rate, at least that of plain decoding; 0: unknown."""
        plain = self.pass_seconds(requests)
        speedup = self.speedup(nearest(self._rates, requests)) if self._rates else 1.0
        return max(speedup, 1.0) * requests / plain if plain else 0.0

    def forget_rates(self) -> None:
        """Forget the current rates, where the next texts have nothing to do with the last."""
        self._rates.clear()
        self._prices.clear()

    def speedup(self, requests: int) -> float:
        """Return the current rate divided by that of plain decoding of as many requests; 0: unknown."""
        plain = self.pass_seconds(requests)
        return self._rates[requests].value * plain / requests if requests in self._rates else 0.0

    def state_dict(self) -> dict[str, Any]:
        growth = {name: known[min(known)].state_dict() for name, known in self._level_gains.items() if known}
        factors = {name: mean.value for name, mean in self._factors.items()}
        draft = {name: curve.state_dict() for name, curve in self._steps.items()}
        return {"rounds": self._rounds.state_dict(), "draft": draft, "trust": factors, "growth": growth}

    def load_state_dict(self, profile: Mapping[str, Any]) -> None:
        """Start from what a profile stored."""
        self._rounds.load_state_dict(profile["rounds"])
        for name, times in profile["draft"].items():
            self._step_curve(DraftSource(name, True)).load_state_dict(times)
        self._factors |= {
            name: DecayedMean(float(value), 2.0, _CALIBRATION_FADE) for name, value in profile["trust"].items()
        }
        for name, values in profile["growth"].items():
            self.level_gains(DraftSource(name, True)).load_state_dict(values)
        self._prices.clear()


def nearest(known: Iterable[int], requests: int) -> int:
    """Return the known number of requests that is nearest to `requests`; of two the smaller."""
    return min(known, key=lambda count: (abs(count - requests), count))


def best_rows(chances: Sequence[float], extra: Sequence[float], price: float) -> tuple[int, float]:
    """Return how many rows pay, the root's included, and their chances minus their price.

    `chances` of the nodes fall; `extra` are the seconds of 1, 2, ... rows besides the root's.
    """
    best, best_worth, gain = 0, 0.0, 0.0
    for count, (chance, seconds) in enumerate(zip(chances, extra, strict=False), 1):
        gain += chance
        worth = gain - price * seconds
        if worth > best_worth:
            best, best_worth = count, worth
    return best + 1, best_worth
