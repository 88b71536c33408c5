"""Running statistics that follow a machine which other programs use too."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from statistics import median_low

WINDOW = 9  # samples kept for each key; their median counts
MIN_SAMPLES = 2  # a key with fewer samples has no median
_REFRESH_EVERY = 4  # samples after which the median of a full window is taken again
FADE = 0.95  # weight of the past, for each new sample


class RollingMedian:
    """Rolling medians of recent timings, keyed by an integer (rows or requests).

    Medians are computed when they are read: after every new sample until a key's window is full, then after every
    fourth.
    """

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._stale: set[int] = set()  # keys whose median must be computed again
        self._since: dict[int, int] = {}  # by key with a full window: samples that its median does not include

    def __iter__(self) -> Iterator[int]:
        """The keys that have a sample."""
        return iter(self._samples)

    def learn(self, key: int, seconds: float) -> None:
        """Record another timing."""
        samples = self._samples.get(key)
        if samples is None:
            samples = self._samples[key] = deque(maxlen=WINDOW)
        since = self._since.get(key, 0) + 1 if len(samples) == WINDOW else _REFRESH_EVERY
        samples.append(seconds)
        if since >= _REFRESH_EVERY:
            self._stale.add(key)
            since = 0
        self._since[key] = since

    def expect(self, key: int, seconds: float) -> None:
        """Set a prior that weighs as much as two fresh samples, so that measurements soon replace it."""
        self._samples[key] = deque([seconds] * MIN_SAMPLES, maxlen=WINDOW)
        self._stale.add(key)

    def forget(self, key: int) -> None:
        """Drop the samples of a key."""
        self._stale.discard(key)
        self._medians.pop(key, None)
        del self._samples[key]

    def count(self, key: int) -> int:
        """Number of samples kept for a key."""
        return len(self._samples.get(key, ()))

    @property
    def medians(self) -> Mapping[int, float]:
        """Medians of the keys with at least `MIN_SAMPLES` samples."""
        while self._stale:
            samples = self._samples[key := self._stale.pop()]
            if len(samples) >= MIN_SAMPLES:
                self._medians[key] = median_low(samples)
        return self._medians

    @property
    def minima(self) -> Mapping[int, float]:
        """The shortest timing of each key."""
        return {key: min(samples) for key, samples in self._samples.items()}


class DecayedMean:
    """A ratio of two exponentially decayed sums that starts from a prior of the given weight."""

    def __init__(self, prior: float, weight: float, fade: float = FADE) -> None:
        self._numerator, self._denominator, self._fade = prior * weight, weight, fade
        self.value = prior if weight else 0.0

    def learn(self, numerator: float, denominator: float = 1.0) -> None:
        """Add one sample to both sums."""
        self._numerator = self._numerator * self._fade + numerator
        self._denominator = self._denominator * self._fade + denominator
        self.value = self._numerator / self._denominator if self._denominator else 0.0


class ExplorationBudget:
    """Decides when options that did not pay are tried again.

    A trial may cost a fixed `share` of the time since the option was last tried; each trial in a row that did not pay
    halves the share.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._seconds = 0.0  # duration of all rounds so far
        self._tried_at: dict[Hashable, float] = {}  # on that time scale
        self._failures: dict[Hashable, int] = {}  # trials since the option last paid

    def advance(self, seconds: float) -> None:
        """Add the duration of a round."""
        self._seconds += seconds

    def is_due(self, option: Hashable, cost: float) -> bool:
        """Return whether a trial that takes `cost` seconds is affordable by now."""
        idle = self._seconds - self._tried_at.get(option, 0.0)
        return cost < self._share / 2 ** self._failures.get(option, 0) * idle

    def record_trial(self, option: Hashable, has_paid: bool) -> None:
        """Note that the option was used in this round, as a trial or because it pays."""
        self._tried_at[option] = self._seconds
        self._failures[option] = 0 if has_paid else min(self._failures.get(option, 0) + 1, 10)
