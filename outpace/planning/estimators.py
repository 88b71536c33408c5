"""The latest times of what is told apart by a whole number, as rows or requests are, and their medians."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from statistics import median_low

KEPT = 9  # times of one number; their median counts
TRIED = 2  # so many times make a median
_RENEWED = 4  # times after which a median of many is taken anew


class RollingMedian:
    """Seconds by number. A median is taken when it is asked for: anew when its times have changed, and where they are
    as many as are kept, when some of them have."""

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._changed: set[int] = set()  # numbers whose medians are to be taken anew
        self._since: dict[int, int] = {}  # by number that has as many times as are kept: how many its median lacks

    def __iter__(self) -> Iterator[int]:
        """The numbers that have a time."""
        return iter(self._times)

    def learn(self, number: int, seconds: float) -> None:
        """It took so long once more."""
        times = self._times.get(number)
        if times is None:
            times = self._times[number] = deque(maxlen=KEPT)
        since = self._since.get(number, 0) + 1 if len(times) == KEPT else _RENEWED
        times.append(seconds)
        if since >= _RENEWED:
            self._changed.add(number)
            since = 0
        self._since[number] = since

    def expect(self, number: int, seconds: float) -> None:
        """What it took is known from elsewhere: as much as two fresh times, so that it is soon overruled."""
        self._times[number] = deque([seconds] * TRIED, maxlen=KEPT)
        self._changed.add(number)

    def forget(self, number: int) -> None:
        """Its times do not hold any more."""
        del self._times[number]
        self._medians.pop(number, None)
        self._changed.discard(number)

    def count(self, number: int) -> int:
        """Times that are kept of a number."""
        return len(self._times.get(number, ()))

    @property
    def medians(self) -> Mapping[int, float]:
        """Of the numbers that have `TRIED` times."""
        while self._changed:
            times = self._times[number := self._changed.pop()]
            if len(times) >= TRIED:
                self._medians[number] = median_low(times)
        return self._medians

    @property
    def least(self) -> Mapping[int, float]:
        """Each number's shortest time."""
        return {number: min(times) for number, times in self._times.items()}


FADE = 0.95  # of the past's weight, a round


class DecayedMean:
    """A running ratio of two sums, which starts from a prior worth `weight`."""

    def __init__(self, prior: float, weight: float, fade: float = FADE) -> None:
        self._above, self._below, self._fade = prior * weight, weight, fade
        self.value = prior if weight else 0.0

    def learn(self, above: float, below: float = 1.0) -> None:
        self._above = self._above * self._fade + above
        self._below = self._below * self._fade + below
        self.value = self._above / self._below if self._below else 0.0


class ExplorationBudget:
    """Says what is due for another trial; to ask changes nothing.

    A trial may cost a `share` of the time since the thing was last tried, half as much after each trial that did not
    pay.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._seconds = 0.0  # of rounds so far
        self._tried: dict[Hashable, float] = {}  # when, in these seconds
        self._failures: dict[Hashable, int] = {}  # since it last paid

    def elapsed(self, seconds: float) -> None:
        """A round took so long."""
        self._seconds += seconds

    def is_due(self, what: Hashable, cost: float) -> bool:
        """Whether a trial of this kind, which costs so many seconds, is affordable by now."""
        idle = self._seconds - self._tried.get(what, 0.0)
        return cost < self._share / 2 ** self._failures.get(what, 0) * idle

    def tried(self, what: Hashable, has_paid: bool) -> None:
        """It was tried, or chosen because it pays."""
        self._tried[what] = self._seconds
        self._failures[what] = 0 if has_paid else min(self._failures.get(what, 0) + 1, 10)
