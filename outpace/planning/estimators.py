"""What is learnt while decoding, on a machine which other programs use too.

Durations of rounds as a function of the rows that they verify, gains of draft levels, and when to try again what did
not pay.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from statistics import median_low

import numpy as np

from outpace.core.stats import DecayedMean

FADE = 0.95  # weight of the past in decayed means: about twenty samples count
PRIOR_WEIGHT = 2.0  # weight of a prior, in samples
WINDOW = 9  # samples kept for each key
MIN_SAMPLES = 2  # of a key whose time is known
STALE = 96  # rounds after which a row count is measured again, and times of more rows than any since are dropped
_LEVELS = 8  # levels whose acceptance is known separately
_MAX_FAILURES = 5  # failed trials that are counted
READ_EVERY = 4  # rounds after which the usual times are read again
_CONTEXT_WINDOW, _FIT_EVERY = 256, 16  # passes; within a few hundred texts begin and end
_FIRST = 4  # nodes that may be verified before any time is known
_ROW = 0.05  # prior: twice the rows take this fraction of a pass more
_WIDE = 16  # prompt tokens in a pass that is wide enough to tell what a row costs among many
Point = tuple[int, float]


class ContextCost:
    """How much longer a pass takes for each token in the texts of all requests, whose keys and values it reads.

    Least squares of relative errors over the latest passes, so that one that was delayed has little weight:
    seconds = fixed + each * rows + `slope` * tokens.
    """

    def __init__(self) -> None:
        self._passes: deque[tuple[int, int, float]] = deque(maxlen=_CONTEXT_WINDOW)  # rows, tokens, seconds
        self._num_learnt = 0
        self.slope = 0.0

    def learn(self, rows: int, tokens: int, seconds: float) -> bool:
        """Add a pass; return whether the slope was fitted anew."""
        if seconds > 0.0:
            self._passes.append((rows, tokens, seconds))
            self._num_learnt += 1
        if not self._passes or self._num_learnt % _FIT_EVERY:
            return False
        self.slope = self._fitted()
        return True

    def _fitted(self) -> float:
        """Return the slope. Two more passes are assumed, whose times depend neither on rows nor on tokens."""
        rows, tokens, seconds = self._passes[-1]
        passes = np.array([*self._passes, (rows, 0, seconds), (0, tokens, seconds)])
        relative = np.column_stack([np.ones(len(passes)), passes[:, :2]]) / passes[:, 2:]
        return max(float(np.linalg.lstsq(relative, np.ones(len(passes)))[0][2]), 0.0)


def below_median(values: Sequence[float]) -> float:
    """Return the value that three eighths of the others do not exceed: of timings what is usual, since delays only
    add, but not so low that times which really vary seem short."""
    return sorted(values)[3 * (len(values) - 1) // 8]


class LevelMeans:
    """The chance that the target accepts a token of a draft level after one of the level above, by level.

    A level's estimate starts from that of the level above, the first level's from `prior`.
    """

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._sums: list[tuple[float, float]] = []  # by level: decayed sums of accepted tokens and of samples
        self._values: list[float] = []  # cached prior and estimates; empty after a change

    def value(self, level: int) -> float:
        """Return the estimate for a level; below the deepest level that was seen, that level's."""
        if not self._values:
            self._values = [*accumulate(self._sums, _mean_below, initial=self._prior)]
        return self._values[min(level + 1, len(self._values) - 1)]

    def learn(self, level: int, accepted: float, requests: int = 1) -> None:
        """Add the sample of one of `requests` requests, which together count as one round. Levels from the `_LEVELS`th
        on share one estimate."""
        level = min(level, _LEVELS - 1)
        self._sums += [(0.0, 0.0)] * (level + 1 - len(self._sums))
        before, fade = self._sums[level], FADE ** (1.0 / requests)
        self._sums[level] = before[0] * fade + accepted, before[1] * fade + 1.0
        self._values = []

    @property
    def weight(self) -> float:
        """Decayed number of samples."""
        return sum([count for _, count in self._sums])

    def state_dict(self) -> list[float]:
        return [self.value(level) for level in range(_LEVELS)]

    def load_state_dict(self, kept: Sequence[float]) -> None:
        self._sums = [(float(value) * PRIOR_WEIGHT, PRIOR_WEIGHT) for value in kept[:_LEVELS]]
        self._values = []


def _mean_below(above: float, sums: tuple[float, float]) -> float:
    """Return a level's estimate: the mean of its own samples, with the estimate of the level above as the prior."""
    return (sums[0] + PRIOR_WEIGHT * above) / (sums[1] + PRIOR_WEIGHT)


class Line:
    """A line that does not fall through samples (x, y), by least squares with decayed weights."""

    def __init__(self) -> None:
        self._sums: tuple[float, ...] = (0.0,) * 5  # decayed sums of 1, x, x^2, y and x y
        self.center = 0.0  # mean x of the samples

    def learn(self, x: float, y: float) -> None:
        """Add a sample."""
        terms = (1.0, x, x * x, y, x * y)
        self._sums = tuple([FADE * total + term for total, term in zip(self._sums, terms, strict=True)])
        self.center = self._sums[1] / self._sums[0]

    def slope(self, expected: float) -> float:
        """Return the line's slope. The `expected` one weighs as much as one sample at distance 1, or at a tenth of the
        mean x."""
        count, first, second, total, mixed = self._sums
        if not count:
            return expected
        weight = max(1.0, (0.1 * self.center) ** 2)
        slope = (mixed - first * total / count + weight * expected) / (second - first * first / count + weight)
        return max(slope, 0.0)

    def start_and_slope(self, expected: float) -> tuple[float, float]:
        """Return the line's value at 0 and its slope, given the `expected` slope; before any sample it begins at 0."""
        count, first, _, total, _ = self._sums
        slope = self.slope(expected)
        return (total - slope * first) / count if count else 0.0, slope

    def value(self, x: float, expected: float) -> float:
        """Return the line's value at x, given the `expected` slope."""
        start, slope = self.start_and_slope(expected)
        return start + slope * x


class Excess:
    """Seconds that rounds take beyond what is expected of their passes and draft steps."""

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=WINDOW)
        self.plain = 0.0  # of a plain round: the median of the latest
        self._drafted = Line()
        self._mean = DecayedMean(0.0, 0.0)  # for each draft step
        self._lines: list[tuple[float, float]] = []  # cached: for fewer steps than usual, and for others

    def learn(self, steps: int, seconds: float) -> None:
        """Record a round with this many draft steps."""
        if not steps:
            self._plain.append(seconds)
            self.plain = median_low(self._plain)
            return
        self._mean.learn(seconds, steps)
        self._drafted.learn(steps, seconds)
        self._lines = []

    def drafted(self, steps: int) -> float:
        """Return what a round with this many draft steps takes beyond its pass and its steps. Until rounds differ in
        their steps, more are assumed to take the same, and half of it to be shared by fewer."""
        if not self._lines:
            self._lines = [*map(self._drafted.start_and_slope, (self._mean.value / 2, 0.0))]
        start, slope = self._lines[steps >= self._drafted.center]
        return start + slope * steps

    @property
    def of_drafts(self) -> float:
        """What a round with one draft step takes in excess, compared with a plain round; at least 0."""
        return max(self.drafted(1) - self.plain, 0.0)


class CaptureTimes:
    """How long a runtime needs to capture a graph for passes of a new shape, and the shapes that have occurred: powers
    of two of requests and of the most rows of a request."""

    def __init__(self) -> None:
        self._mean = DecayedMean(0.0, 0.0, 0.5)
        self._shapes: set[tuple[int, int]] = set()

    def record(self, requests: int, rows: int, seconds: float | None = None) -> None:
        """Record a pass of this shape, and the seconds of a graph's capture in it, if there was one."""
        self._shapes.add(_shape(requests, rows))
        if seconds is not None:
            self._mean.learn(max(seconds, 0.0))

    def seconds(self, requests: int, rows: int) -> float:
        """Return the expected seconds of capturing this shape: 0 after it has occurred, or if nothing is captured."""
        return 0.0 if not self._mean.value or _shape(requests, rows) in self._shapes else self._mean.value


def _shape(requests: int, rows: int) -> tuple[int, int]:
    """Return the bucket that a graph for a pass of this shape serves."""
    return (requests - 1).bit_length(), (rows - 1).bit_length()


@dataclass
class _Use:
    """The last round that used an option: when it was, what failed before it, and what it gained."""

    at: float
    failures: int
    failed_at: float
    gain: float = 0.0


class ExplorationBudget:
    """Decides when options that are not known to pay are tried.

    A trial may cost a `share` of the time since the option last failed. Where earlier trials say little, such as for a
    new text, all of them together may also cost a `credit` in seconds. Each consecutive failure halves both, so that
    all failures of an option cost at most the share of all time and twice one credit.
    """

    def __init__(self) -> None:
        self._seconds = 0.0  # duration of all rounds so far
        self._last: dict[Hashable, _Use] = {}  # by option

    def advance(self, seconds: float) -> None:
        """Add the duration of a round."""
        self._seconds += seconds

    def is_due(self, option: Hashable, cost: float, share: float, credit: float = 0.0, spent: float = 0.0) -> bool:
        """Return whether a trial that takes `cost` seconds is affordable by now; `spent` seconds of the credit are not
        left."""
        failures, failed_at = self._failures(option)
        return cost < share * (self._seconds - failed_at) / 2**failures or spent + cost < credit / 2**failures

    def record_use(self, option: Hashable, gain: float) -> None:
        """Note that the option was used in this round, as a trial or because it pays, and gained this much above its
        price. Uses by several requests in one round add up: a trial has failed if their sum is not above 0."""
        last = self._last.get(option)
        if last is None or last.at != self._seconds:
            last = self._last[option] = _Use(self._seconds, *self._failures(option))
        last.gain += gain

    def _failures(self, option: Hashable) -> tuple[int, float]:
        """Return the number of failed trials in a row, and the time of the last failure."""
        last = self._last.get(option)
        if last is None:
            return 0, 0.0
        return (0, last.failed_at) if last.gain > 0.0 else (min(last.failures + 1, _MAX_FAILURES), last.at)


class LatencyCurve:
    """Seconds of a target pass or a draft step by its number of rows, those of all requests together."""

    def __init__(self, prior: Callable[[int], float] | None = None, context: ContextCost | None = None) -> None:
        """`prior` returns the expected seconds of a number of rows, whose ratios also hold beyond the row counts that
        were timed. What `context` says of the tokens of texts is left out of all times."""
        self._prior, self._context = prior, context or ContextCost()
        self._samples: dict[int, deque[Point]] = {}  # by bucket of rows: tokens in all texts, and seconds
        self._profile: dict[int, float] = {}  # seconds by bucket, from a profile
        self._last: dict[int, int] = {}  # by bucket: the round that was timed last
        self._token = DecayedMean(0.0, 0.0)  # seconds of a further prompt token in a pass over many
        self._curve: tuple[list[int], list[float]] | None = None  # cached: row counts and seconds
        self._seconds: dict[int, float] = {}  # cached `seconds`
        self._extra: dict[int, list[float]] = {}  # cached `extra_seconds`
        self.num_rounds = 0

    def learn(self, rows: int, seconds: float, tokens: int = 0) -> None:
        """Record a round, with this many tokens in all texts."""
        bucket = _bucket(rows)
        samples = self._samples.get(bucket) or deque(maxlen=WINDOW)
        samples.append((tokens, seconds))
        self._samples[bucket] = samples  # stored with its first sample: Ctrl-C may come between any two lines
        self._last[bucket] = self.num_rounds
        self.num_rounds += 1
        if self.num_rounds % READ_EVERY == 0:
            self._forget_old()
        if self.num_rounds % READ_EVERY == 0 or len(samples) <= MIN_SAMPLES:
            self.clear_caches()

    def learn_prefill(self, tokens: int, seconds: float) -> None:
        """Record a pass that read `tokens` prompt tokens and nothing else."""
        if tokens >= _WIDE:
            self._token.learn(max(seconds - self.seconds(1), 0.0), tokens - 1)
            self.clear_caches()

    def clear_caches(self) -> None:
        """Compute everything again, after new times or a change of the prior."""
        self._curve = None
        self._seconds.clear()
        self._extra.clear()

    def _forget_old(self) -> None:
        """Drop timings of more rows than any recent round had: the machine may have been busy then. Such row counts are
        tried again where smaller ones suggest that they pay."""
        widest = max(bucket for bucket, last in self._last.items() if self.num_rounds - last <= STALE)
        for bucket in [bucket for bucket in self._last if bucket > widest]:
            for times in (self._samples, self._profile, self._last):
                times.pop(bucket, None)

    def is_timed(self, rows: int, samples: int = MIN_SAMPLES) -> bool:
        """Return whether a pass over `rows` rows was timed at least `samples` times."""
        bucket = _bucket(rows)
        return len(self._samples.get(bucket, ())) >= samples or bucket in self._profile

    @property
    def _timed(self) -> list[int]:
        """The row counts that were timed often enough."""
        return [rows for rows, samples in self._samples.items() if len(samples) >= MIN_SAMPLES]

    def seconds(self, rows: int) -> float:
        """Return the expected seconds of a round over `rows` rows, or 0 while nothing is known."""
        counts, known = self._curve or self._convex()
        if not counts:
            return self._prior(rows) if self._prior else 0.0  # not cached: the prior changes
        if rows not in self._seconds:
            self._seconds[rows] = self._interpolated(rows, counts, known)
        return self._seconds[rows]

    def _interpolated(self, rows: int, counts: Sequence[int], seconds: Sequence[float]) -> float:
        """Interpolate between the points of the curve, or extrapolate; fewer rows never take longer."""
        index = bisect.bisect_left(counts, rows)
        if index == len(counts):
            row = self._token.value or self._row_seconds(counts[-2:], seconds[-2:])
            return seconds[-1] + (rows - counts[-1]) * row
        if index == 0:
            below = seconds[0] - (counts[0] - rows) * self._row_seconds(counts[:2], seconds[:2])
            return min(max(below, self._prior(rows) if self._prior else 0.0), seconds[0])
        share = (rows - counts[index - 1]) / (counts[index] - counts[index - 1])
        return seconds[index - 1] + share * (seconds[index] - seconds[index - 1])

    def _row_seconds(self, counts: Sequence[int], seconds: Sequence[float]) -> float:
        """Return what one more row costs beyond these neighbouring counts at an end of the curve: as much as between
        them. From one count it follows from the prior."""
        if len(counts) > 1:
            return (seconds[1] - seconds[0]) / (counts[1] - counts[0])
        prior = self._prior(counts[0]) if self._prior else 0.0
        return seconds[0] * (self._prior(counts[0] + 1) / prior - 1.0 if self._prior and prior else _ROW / counts[0])

    def extra_seconds(self, rows: int, count: int) -> Sequence[float]:
        """Return how much longer a round takes with 1, 2, ... `count` more rows than `rows`."""
        extra = self._extra.setdefault(rows, [])
        if len(extra) < count:
            base = self.seconds(rows)
            extra += [self.seconds(rows + more) - base for more in range(len(extra) + 1, count + 1)]
        return extra[:count]

    def is_known(self, rows: int) -> bool:
        """Return whether a pass over at least `rows` rows was timed often enough."""
        return rows <= max([*self._timed, *self._profile], default=0)

    def max_extra_rows(self, others: int) -> int:
        """Return how many rows a request may try besides its root, while other requests have `others` rows: a round may
        have twice as many rows as the widest that was timed."""
        widest = max([*self._samples, *self._profile], default=0)
        return max(_FIRST, 2 * widest - others - 1)

    def state_dict(self) -> dict[str, float]:
        """Return what a profile stores: the time of each row count, unless the clock saw none."""
        return {str(rows): seconds for rows, seconds in self._known_times().items() if seconds > 0}

    def load_state_dict(self, kept: Mapping[str, float]) -> None:
        """Start from what a profile stored. The machine may have been busier then: once some of its row counts are
        timed, its other times are scaled to match."""
        self._profile = {_bucket(int(rows)): float(seconds) for rows, seconds in kept.items()}
        self._last |= dict.fromkeys(self._profile, self.num_rounds)
        self.clear_caches()

    def _known_times(self) -> dict[int, float]:
        """Return the usual time of each row count, without what the tokens of texts take, and the scaled times of the
        profile for others. One timing counts only for fewer rows than were timed more often."""
        slope = self._context.slope
        fewest = min([*self._timed, *self._profile], default=inf)
        usual = {
            rows: below_median([seconds - slope * tokens for tokens, seconds in samples])
            for rows, samples in self._samples.items()
            if len(samples) >= MIN_SAMPLES or rows < fewest
        }
        both = usual.keys() & self._profile.keys()
        scale = sum(usual[rows] for rows in both) / sum(self._profile[rows] for rows in both) if both else 1.0
        return {rows: scale * seconds for rows, seconds in self._profile.items()} | usual

    def _convex(self) -> tuple[list[int], list[float]]:
        """Compute the curve: the lower convex hull of the known times, made non-decreasing.

        A pass is bound by memory first and by arithmetic later, so its time is convex in its rows except for the
        kernels' tiles. Usual times of few samples are not: between two of them rows would seem to be free by chance,
        and everything that was drafted would be verified.
        """
        known = self._known_times()
        hull: list[Point] = []  # from the widest down: no count takes longer than a larger one
        for rows in sorted(known, reverse=True):
            point = rows, min(known[rows], hull[-1][1]) if hull else known[rows]
            while len(hull) > 1 and _is_above(hull[-1], point, hull[-2]):
                hull.pop()
            hull.append(point)
        hull.reverse()
        self._curve = [rows for rows, _ in hull], [seconds for _, seconds in hull]
        return self._curve


def _is_above(point: Point, left: Point, right: Point) -> bool:
    """Return whether a point lies on or above the line between its neighbours."""
    rise, run = right[1] - left[1], right[0] - left[0]
    return (point[1] - left[1]) * run >= rise * (point[0] - left[0])


def _bucket(rows: int) -> int:
    """Round a row count up so that similar counts share their samples: exact to 8, then in steps of 2, 4, 16, 64."""
    step = 1 if rows <= 8 else 2 if rows <= 16 else 4 if rows <= 64 else 16 if rows <= 256 else 64
    return -(-rows // step) * step
