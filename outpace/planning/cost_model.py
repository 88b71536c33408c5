"""The cost model: times of target passes, draft steps and the host, and the gain of drafts, learnt while decoding.

All values are usual times or decayed means over the recent past, so that they adapt when other programs load
the machine. What was never measured is extrapolated from what is known, so that it is tried once and then measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

from outpace.core.stats import DecayedMean
from outpace.core.types import WORKER, Drafter, DraftSource
from outpace.models.base import Model
from outpace.planning.estimators import (
    READ_EVERY,
    CaptureTimes,
    ContextCost,
    Excess,
    ExplorationBudget,
    LatencyCurve,
    LevelMeans,
    Line,
)
from outpace.planning.plan import Estimates, best_rows

LOOKUP_WEIGHT = 8.0  # weight of the prior of what lookups add, in rounds
_LOOKUP_GAIN = 0.2  # prior: tokens that lookups add to a round
_ACCEPTANCE = 0.6  # prior: chance that the target accepts a drafted token
_CALIBRATION_FADE = (
    0.99  # slower than other means: a profile describes a pair of models, not the end of the last answer
)
_RARE_FADE = 0.9  # of means of rare samples
_SHORT_TEXT = 2048  # tokens; the factors of longer texts are kept by their length
_MAX_UNTIMED = 8  # rounds that decode plainly at most until such rounds are timed
_PLAIN_SHARE = 0.005  # of the time, that rounds of plain decoding may cost which only time it
_MIN_PAUSE = 4.0  # rounds between those, for each of them
_SETTLING = 0.08  # seconds in which drafts still slow plain decoding: a processor's frequency recovers slowly
_MAX_EXCESS = 4.0  # plain rounds; a longer pause says nothing about the next round
READ_WITH_STEP = 2  # tokens that a model reads with its next draft step
_READING = 0.2  # seconds; shorter passes would read the weights too often for too few prompt tokens


@dataclass
class DraftTimes:
    """What drafting took in a part of a round."""

    seconds: float = 0.0  # with waits for a worker
    expected: float = 0.0  # seconds that were expected of this, as far as anything was known
    steps: int = 0
    has_read: bool = False  # whether a model has read texts


class CostModel:
    """Seconds of passes and draft steps, tokens per second, and calibration of drafters. Not thread-safe.

    `rows` are those of the whole pass, of all requests together.
    """

    def __init__(self) -> None:
        self._context = ContextCost()
        self._tokens = 0  # in the texts of all requests
        self._plain = LatencyCurve(context=self._context)  # rounds of plain decoding, by requests
        self._drafted = LatencyCurve(self._plain.seconds, self._context)  # rounds with drafts, by rows
        self._num_plain = 0  # rounds of plain decoding in a row, up to the last round
        self._round = 0  # number of the round
        self._plain_rounds: dict[int, int] = {}  # by requests: the round from which plain decoding was timed last
        self._plain_until = 0  # rounds before this one decode plainly, to be timed
        self._excess: dict[int, Excess] = {}  # by the bit length of requests
        self._ended: tuple[int, int, float, float] | None = None  # requests, draft steps, excess, and end of a round
        self.exploration = ExplorationBudget()
        self.last_pass_seconds = 0.0  # seconds of the last round without its drafting
        self._steps: dict[str, LatencyCurve] = {}  # by source: a draft step by nodes expanded; a lookup by request
        self._shares: dict[str, float] = {}  # by source: prior for a draft step as a fraction of a target pass
        self._prefill = DecayedMean(0.0, 0.0)  # seconds of the target for each prompt token
        self._reading = defaultdict[str, Line](Line)  # by source: seconds in which its model reads a number of tokens
        self.captures = defaultdict[str, CaptureTimes](CaptureTimes)  # by source; the target's are those of ""
        self._rates = defaultdict[int, DecayedMean](partial(DecayedMean, 0.0, 0.0))  # requests -> tokens per second
        self._factors = defaultdict[str, DecayedMean](partial(DecayedMean, 1.0, 2.0, _CALIBRATION_FADE))  # by source
        self._acceptance: dict[str, LevelMeans] = {}  # by source
        gain = partial(DecayedMean, _LOOKUP_GAIN, LOOKUP_WEIGHT, _CALIBRATION_FADE)
        self._lookup_gains = defaultdict[tuple[str, int], DecayedMean](gain)  # by source and requests
        self._modes = defaultdict[str, LatencyCurve](LatencyCurve)  # passes by how a worker drafts during them
        self._statistics: dict[str, DecayedMean] = {}  # see `statistic`

    @property
    def num_rounds(self) -> int:
        return self._plain.num_rounds + self._drafted.num_rounds

    def estimates(self, source: DraftSource, acceptance: LevelMeans, requests: int) -> Estimates:
        """Return what is known of rounds of this many requests that draft with this source."""
        target, graphs, excess = self.captures[""], self.captures[source.name], self.excess(requests)
        return Estimates(
            self.plain_seconds(requests) + excess.plain,
            self.pass_seconds,
            self._step_curve(source).seconds,
            excess.drafted,
            acceptance.value,
            partial(self.draft_prefill_seconds, source),
            lambda drafting, levels: target.seconds(requests, levels + 1) + graphs.seconds(drafting, 1),
        )

    def excess(self, requests: int) -> Excess:
        """Return what rounds of about this many requests take beyond what is expected; of a new number, a copy of the
        nearest one's."""
        key = requests.bit_length()
        if key not in self._excess:
            near = min(self._excess, key=lambda known: (abs(known - key), -known), default=None)
            self._excess[key] = Excess() if near is None else deepcopy(self._excess[near])
        return self._excess[key]

    def begin_round(self, start: float | None) -> None:
        """Begin a round: the pause since the last one is part of what that took. `start` is None if no request has
        waited."""
        self._round += 1
        if self._ended is None:
            return
        requests, steps, excess, end = self._ended
        self._ended, limit = None, _MAX_EXCESS * self.plain_seconds(requests)
        excess = max(min(excess + (0.0 if start is None else start - end), limit), -limit)
        self.excess(requests).learn(steps, excess)

    def set_context(self, tokens: int) -> None:
        """Set the number of tokens in the texts of all requests, before a round."""
        self._tokens = tokens

    def end_round(self, requests: int, rows: int, drafting: DraftTimes, seconds: float, end: float) -> None:
        """End a round, before it is recorded. A plain round soon after drafts says nothing: it may pay for them."""
        if not drafting.steps and (rows > requests or self._num_plain < self._settling_rounds(requests)):
            return
        excess = drafting.seconds - drafting.expected
        curve, count = (self._drafted, rows) if drafting.steps else (self._plain, requests)
        if curve.is_timed(count):
            excess += seconds - drafting.seconds - self._with_context(curve.seconds(count))
        self._ended = requests, drafting.steps, excess, end

    def record_round(
        self, requests: int, rows: int, tokens: int, seconds: float, drafting: float, every: bool = False
    ) -> None:
        """Record a round in which all requests together wrote `tokens`, with `drafting` seconds of it before the pass.
        Unless `every` round is timed, it is only after others of its kind: drafts may cost time later."""
        self.last_pass_seconds = seconds - drafting
        self.exploration.advance(seconds - drafting)
        is_plain, taken = rows <= requests, seconds - drafting
        if self._context.learn(rows, self._tokens, taken):
            self._plain.clear_caches()
            self._drafted.clear_caches()
        is_settled = self._num_plain >= self._settling_rounds(requests) or not self._plain.is_timed(requests)
        if is_plain and (every or is_settled):
            self._plain.learn(requests, taken, self._tokens)
            self._plain_rounds[requests] = self._round
            self._drafted.clear_caches()
        elif not is_plain and (every or not self._num_plain):
            self._drafted.learn(rows, taken, self._tokens)
        self._num_plain = self._num_plain + 1 if is_plain else 0
        self._rates[requests].learn(tokens, seconds)

    def _settling_rounds(self, requests: int) -> int:
        """Return after how many rounds of plain decoding in a row, at least one, such a round is timed."""
        seconds = self.plain_seconds(requests)
        return max(int(_SETTLING / seconds), 1) if seconds > 0.0 else 1

    def needs_plain_round(self, requests: int) -> bool:
        """Return whether all requests should run a round of plain decoding: until it was timed for this many requests,
        and then in several rounds in a row, as often as costs a share of the time. The first of these may pay for
        drafts before them, and rounds in the same passes as another request's prompt are not timed."""
        number = self._round
        if number >= self._plain_until:
            age = number - self._plain_rounds.setdefault(requests, number)
            if not self._plain.is_known(requests):
                self._plain_until = number + (age < _MAX_UNTIMED)
            else:
                settling = self._settling_rounds(requests)
                count = settling + min(settling, READ_EVERY)
                if age > count * max((self.speedup(requests) - 1.0) / _PLAIN_SHARE, _MIN_PAUSE):
                    self._plain_rounds[requests], self._plain_until = number, number + count
        return number < self._plain_until

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

    def mode_curve(self, mode: str) -> LatencyCurve:
        """Return the times of passes, by rows, during which a worker drafts in this way."""
        return self._modes[mode]

    def statistic(self, name: str, prior: float = 0.0, weight: float = 0.0) -> DecayedMean:
        """Return the decayed mean that a decoder keeps under this name."""
        return self._statistics.setdefault(name, DecayedMean(prior, weight, _RARE_FADE))

    def acceptance(self, source: DraftSource) -> LevelMeans:
        """Return the chance that the target accepts a token of a level of this source after one of the level above."""
        return self._acceptance.setdefault(source.name, LevelMeans(_ACCEPTANCE))

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
        if source.runs_model and source.name != WORKER.name:
            self._step_curve(source).learn(width, seconds)
        else:
            self._step_curve(source).learn(1, seconds / requests)

    def step_seconds(self, source: DraftSource, width: int) -> float:
        """Return the expected seconds of a draft step that expands `width` nodes of all requests together."""
        return self._step_curve(source).seconds(width)

    def draft_seconds(self, source: DraftSource, requests: int = 1, width: int = 1) -> float:
        """Return one request's share of a draft step in which each of `requests` requests expands `width` nodes, or 0
        while nothing is known. Requests do not share lookups or waits for a worker."""
        if source.runs_model and source.name != WORKER.name:
            return self.step_seconds(source, width * requests) / requests
        return self.step_seconds(source, 1)

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
        self._plain.learn_prefill(tokens, seconds)
        self._drafted.learn_prefill(tokens, seconds)

    def record_reading(self, source: DraftSource, tokens: int, seconds: float) -> None:
        """Record that a source's model read this many tokens of texts in one growth."""
        self._reading[source.name].learn(tokens, seconds)

    def draft_prefill_seconds(self, source: DraftSource, tokens: int) -> float:
        """Return the expected seconds that a source's model needs to read `tokens` tokens of texts. A few are read with
        the next draft step."""
        read = tokens if source.reads is None else min(tokens, source.reads)
        expected = self._expected_token_seconds(source)
        return max(self._reading[source.name].value(read, expected), 0.0) if read > READ_WITH_STEP else 0.0

    def reading_token_seconds(self, source: DraftSource) -> float:
        """Return how much longer a source's model reads texts for each further token; 0: unknown."""
        return self._reading[source.name].slope(self._expected_token_seconds(source))

    def _expected_token_seconds(self, source: DraftSource) -> float:
        """Return a source's share of what the target takes to read a token."""
        return self._shares.get(source.name, 0.0) * self._prefill.value

    def reading_seconds(self, rows: int) -> float:
        """Return how long texts may be read in a round in which requests that write verify `rows` rows: as long as
        their pass takes or `_READING`, so that neither side waits for the other."""
        return max(self.pass_seconds(rows), _READING)

    def is_timed(self, rows: int, samples: int) -> bool:
        """Return whether a pass over `rows` rows was timed at least `samples` times."""
        return self._plain.is_timed(rows, samples) or self._drafted.is_timed(rows, samples)

    def plain_seconds(self, requests: int) -> float:
        """Return the expected seconds of a round of plain decoding, or 0 while unknown."""
        return self._with_context(self._plain.seconds(requests) or self._drafted.seconds(requests))

    def pass_seconds(self, rows: int) -> float:
        """Return the expected seconds of a round over `rows` rows without its drafting, or 0 while unknown."""
        return self._with_context(self._drafted.seconds(rows))

    def _with_context(self, seconds: float) -> float:
        """Return the time of a pass with that for reading the texts' keys and values; 0 stays 0."""
        return seconds + self._context.slope * self._tokens if seconds else 0.0

    def extra_seconds(self, rows: int, count: int) -> Sequence[float]:
        """Return how much longer a round takes with 1, 2, ... `count` more rows than `rows`."""
        return self._drafted.extra_seconds(rows, count)

    def max_extra_rows(self, others: int) -> int:
        """Return how many rows a request may try besides its root, while other requests have `others` rows."""
        return self._drafted.max_extra_rows(others)

    def best_rows(self, chances: Sequence[float], others: int, price: float, share: float = 0.0) -> tuple[int, float]:
        """Apply `best_rows` to nodes with these falling chances, while other requests have `others` rows. Any row
        besides the root's takes `share` seconds more."""
        count = min(self._drafted.max_extra_rows(others), len(chances))
        extra = self._drafted.extra_seconds(others + 1, count)
        return best_rows(chances, [share + seconds for seconds in extra] if share else extra, price)

    def share_of_drafts(self, requests: int) -> float:
        """Return each request's share of what a round with drafts takes more than a plain one, without its rows."""
        return max(self.pass_seconds(requests) - self.plain_seconds(requests), 0.0) / requests

    def tokens_per_second(self, requests: int) -> float:
        """Return the price of a second in tokens: the current rate, at least that of plain decoding; 0: unknown."""
        plain = self.plain_seconds(requests)
        speedup = self.speedup(nearest(self._rates, requests)) if self._rates else 1.0
        return max(speedup, 1.0) * requests / plain if plain else 0.0

    def forget_rates(self) -> None:
        """Forget the current rates and what rounds take beyond their parts, where the next texts have nothing to do
        with the last."""
        self._rates.clear()
        self._excess.clear()
        self._ended = None

    def speedup(self, requests: int) -> float:
        """Return the current rate divided by that of plain decoding of as many requests; 0: unknown."""
        plain = self.plain_seconds(requests)
        return self._rates[requests].value * plain / requests if requests in self._rates else 0.0

    def state_dict(self) -> dict[str, Any]:
        factors = {name: mean.value for name, mean in self._factors.items()}
        draft = {name: curve.state_dict() for name, curve in self._steps.items()}
        return {
            "plain": self._plain.state_dict(),
            "rounds": self._drafted.state_dict(),
            "draft": draft,
            "trust": factors,
            "acceptance": {name: chances.state_dict() for name, chances in self._acceptance.items()},
        }

    def load_state_dict(self, profile: Mapping[str, Any]) -> None:
        """Start from what a profile stored."""
        self._plain.load_state_dict(profile["plain"])
        self._drafted.load_state_dict(profile["rounds"])
        for name, times in profile["draft"].items():
            self._step_curve(DraftSource(name, True)).load_state_dict(times)
        self._factors |= {
            name: DecayedMean(float(value), 2.0, _CALIBRATION_FADE) for name, value in profile["trust"].items()
        }
        for name, values in profile["acceptance"].items():
            self.acceptance(DraftSource(name, True)).load_state_dict(values)


def nearest(known: Iterable[int], requests: int) -> int:
    """Return the known number of requests that is nearest to `requests`; of two the smaller."""
    return min(known, key=lambda count: (abs(count - requests), count))
