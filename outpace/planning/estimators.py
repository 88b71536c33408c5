"""Running statistics that follow a machine which other programs use too."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

WINDOW = 9  # samples kept for each key; their median counts
MIN_SAMPLES = 2  # a key with fewer samples has no median
_REFRESH_EVERY = 4  # samples after which the median of a full window is taken again
_YIELD_WEIGHT, _LAYERS = 2.0, 8  # weight of a layer's prior; layers whose yield is known separately
_MAX_FAILURES = 5  # failed trials that are counted


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
        return iter(self._samples)

    def learn(self, key: int, seconds: float) -> None:
        """Record another timing."""
        samples = self._samples.get(key) or deque(maxlen=WINDOW)
        since = self._since.get(key, 0) + 1 if len(samples) == WINDOW else _REFRESH_EVERY
        samples.append(seconds)
        self._samples[key] = samples  # stored with its first sample: Ctrl-C may come between any two lines
        if since >= _REFRESH_EVERY:
            self._stale.add(key)
            since = 0
        self._since[key] = since

    def forget(self, key: int) -> None:
        """Drop the samples of a key, if it has any."""
        self._stale.discard(key)
        self._medians.pop(key, None)
        self._samples.pop(key, None)

    def count(self, key: int) -> int:
        """Return the number of samples kept for a key."""
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
        return {key: min(samples) for key, samples in self._samples.items()}


class LayerYields:
    """The tokens that a draft layer adds, per unit of the chance that the walk reaches it, by layer.

    A layer's estimate starts from that of the layer above, the first layer's from `prior`.
    """

    def __init__(self, prior: float, fade: float) -> None:
        self._prior, self._fade = prior, fade
        self._sums: list[tuple[float, float]] = []  # by layer: decayed sums of tokens and of chances

    def value(self, layer: int) -> float:
        """Return the estimate for a layer; below the deepest layer that was grown, that layer's."""
        value = self._prior
        for tokens, chances in self._sums[: layer + 1]:
            value = (tokens + _YIELD_WEIGHT * value) / (chances + _YIELD_WEIGHT)
        return value

    def learn(self, layer: int, tokens: float, chance: float) -> None:
        """Add a sample; layers from the `_LAYERS`th on share one estimate. A layer never takes tokens away."""
        layer = min(layer, _LAYERS - 1)
        self._sums += [(0.0, 0.0)] * (layer + 1 - len(self._sums))
        before = self._sums[layer]
        self._sums[layer] = before[0] * self._fade + max(tokens, 0.0), before[1] * self._fade + chance

    def state_dict(self) -> list[float]:
        return [self.value(layer) for layer in range(_LAYERS)]

    def load_state_dict(self, kept: Sequence[float]) -> None:
        self._sums = [(float(value) * _YIELD_WEIGHT, _YIELD_WEIGHT) for value in kept[:_LAYERS]]


@dataclass
class _Use:
    """The last round that used an option: when it was, what failed before it, and what it gained."""

    at: float
    failures: int
    failed_at: float
    gain: float = 0.0


class ExplorationBudget:
    """Decides when options that are not known to pay are tried.

    A trial may cost a `share` of the time since the option last failed, plus a `credit` in seconds where earlier trials
    say little, such as at the beginning of an answer. Each consecutive failure halves both, so that all failures of an
    option cost at most the share of all time and twice one credit.
    """

    def __init__(self) -> None:
        self._seconds = 0.0  # duration of all rounds so far
        self._last: dict[Hashable, _Use] = {}  # by option

    def advance(self, seconds: float) -> None:
        """Add the duration of a round."""
        self._seconds += seconds

    def is_due(self, option: Hashable, cost: float, share: float, credit: float = 0.0) -> bool:
        """Return whether a trial that takes `cost` seconds is affordable by now."""
        failures, failed_at = self._failures(option)
        return cost < (share * (self._seconds - failed_at) + credit) / 2**failures

    def was_used(self, option: Hashable) -> bool:
        """Return whether the option was used in an earlier round."""
        return option in self._last and self._last[option].at < self._seconds

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
