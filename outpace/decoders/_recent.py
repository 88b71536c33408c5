"""The latest times of what is told apart by a whole number, as rows or requests are, and their medians."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from statistics import median_low

KEPT = 9  # times of one number; their median counts
TRIED = 2  # so many times make a median


class Recent:
    """Seconds by number. A median is taken when it is asked for, and anew when its times have changed."""

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._changed: set[int] = set()  # numbers whose medians are not those of their times any more

    def __iter__(self) -> Iterator[int]:
        """The numbers that have a time."""
        return iter(self._times)

    def learn(self, number: int, seconds: float) -> None:
        """It took so long once more."""
        if number not in self._times:
            self._times[number] = deque(maxlen=KEPT)
        self._times[number].append(seconds)
        self._changed.add(number)

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
