"""The number of patches to draft in a round, by the planner's formula from measured times and acceptance."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

import numpy as np
from torch import Tensor

from outpace.planning.estimators import RollingMedian

MAX_LENGTH = 8
_TRIED = 4  # patches drafted while the draft is untimed
_TRUST = 4.0  # weight, in rounds, of the overall acceptance rate in that of each position
_GAIN = 1.05  # expected speedup below which nothing is drafted


class DraftLength(ABC):
    """Chooses K, the number of patches to draft, before each round."""

    @abstractmethod
    def choose(self, rows: int, patches: int) -> int:
        """Return how many patches to draft in each of `rows` rows; the slowest row still needs `patches` patches."""

    def learn(self, length: int, accepted: Tensor, seconds: float) -> None:
        """Record a round: the patches drafted in each row, how many were accepted [rows], and its seconds."""
        return


@dataclass(frozen=True)
class FixedLength(DraftLength):
    """Always drafts the same number of patches."""

    length: int

    def choose(self, rows: int, patches: int) -> int:
        """Return the length."""
        return self.length


@dataclass
class AcceptanceLength(DraftLength):
    """STRIDE's adaptive K, from 1 to 8: one more if over 70 % of the drafts were accepted, one less if below 30 %."""

    length: int = 3
    tried: int = 0
    accepted: int = 0

    def choose(self, rows: int, patches: int) -> int:
        """Return the present length."""
        return self.length

    def learn(self, length: int, accepted: Tensor, seconds: float) -> None:
        """Count the drafts that were judged."""
        self.tried += int((accepted + 1).clamp(max=length).sum())
        self.accepted += int(accepted.sum())
        rate = self.accepted / max(1, self.tried)
        self.length = min(MAX_LENGTH, max(1, self.length + (rate > 0.7) - (rate < 0.3)))


@dataclass
class MeasuredLength(DraftLength):
    """Minimises the expected time until the slowest row is done; 0 is the target alone.

    A row gets E(K) patches per round on average, with variance V(K). N patches take it about N / E rounds with
    variance N V / E^3, and the slowest of R rows about sqrt(2 ln R) standard deviations more. The time of a round is
    the median of earlier rounds of this process, by length and number of rows (in powers of two). Of two rounds it is
    the faster one, because caches are cold in the first. Times of other lengths are interpolated.
    """

    tried: list[int] = field(default_factory=lambda: [0] * MAX_LENGTH)  # drafts judged, by position
    accepted: list[int] = field(default_factory=lambda: [0] * MAX_LENGTH)
    _seconds: dict[int, RollingMedian] = field(default_factory=dict)  # by power of two of the rows: rounds by length

    def choose(self, rows: int, patches: int) -> int:
        """Return the length with the least expected time, or one to try while times are unknown."""
        timed = self._timed(rows)
        if 0 not in timed:
            return 0
        if len(timed) == 1:
            return _TRIED
        lengths = range(MAX_LENGTH + 1)
        seconds = [self.rounds(length, rows, patches) * _interpolated(timed, length) for length in lengths]
        best = min(lengths, key=lambda length: seconds[length])
        return best if seconds[best] * _GAIN < seconds[0] else 0

    def _timed(self, rows: int) -> Mapping[int, float]:
        """Return the median seconds of a round by length, measured with a similar number of rows: at most two powers of
        two away. Numbers of rows for which drafting was timed come first, then the nearest one."""
        power = rows.bit_length()
        near = [(abs(known - power), own.medians) for known, own in self._seconds.items() if abs(known - power) <= 2]
        usable = [(len(own) == 1, distance, own) for distance, own in near if 0 in own]
        return min(usable, key=lambda one: one[:2], default=(False, 0, {}))[2]

    def rounds(self, length: int, rows: int, patches: int) -> float:
        """Return the expected rounds until all of `rows` rows have `patches` patches."""
        reached = [1.0, *accumulate(self.acceptances()[:length], mul)]  # the chance of more than 0, 1, ... patches
        mean = sum(reached)
        square = sum((2 * more + 1) * chance for more, chance in enumerate(reached))
        return patches / mean + math.sqrt(2.0 * math.log(rows) * patches * (square - mean**2) / mean**3)

    def acceptances(self) -> list[float]:
        """Return the acceptance rate at each position, given that all drafts before it are accepted. Where few drafts
        were judged it is two standard errors above the estimate: nothing more is learnt once nothing is drafted."""
        weight = sum(self.tried) + 2.0
        mean = (sum(self.accepted) + 1.0) / weight
        overall = min(1.0, mean + 2.0 * math.sqrt(mean * (1.0 - mean) / weight))
        return [(a + _TRUST * overall) / (t + _TRUST) for a, t in zip(self.accepted, self.tried, strict=True)]

    def learn(self, length: int, accepted: Tensor, seconds: float) -> None:
        """Learn from a round."""
        self._seconds.setdefault(len(accepted).bit_length(), RollingMedian()).learn(length, seconds)
        for position in range(length):
            self.tried[position] += int((accepted >= position).sum())
            self.accepted[position] += int((accepted > position).sum())


def _interpolated(timed: Mapping[int, float], length: int) -> float:
    """Return the time of a length, by the slope from 0 if it is above all that were timed."""
    known = sorted(timed)
    if length <= known[-1]:
        return float(np.interp(length, known, [timed[one] for one in known]))
    return timed[0] + length * (timed[known[-1]] - timed[0]) / known[-1]
