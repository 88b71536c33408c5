"""The number of patches to draft in a round, by the planner's formula from measured times and acceptance."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from torch import Tensor

from outpace.core.theory import expected_tokens_by_position
from outpace.planning.latency_curve import LatencyCurve

MAX_LENGTH = 8
_TRIED = 4  # patches drafted while the draft is untimed
_TRUST = 4.0  # weight, in rounds, of the overall acceptance rate in that of each position
_GAIN = 1.05  # expected speedup below which nothing is drafted


class DraftLength(ABC):
    """Chooses K, the number of patches to draft, before each round."""

    @abstractmethod
    def choose(self, rows: int) -> int:
        """Return the patches to draft for each of these rows."""

    def learn(self, rows: int, length: int, accepted: Tensor, draft_seconds: float, target_seconds: float) -> None:
        """Record a round: the accepted drafts [rows], and the seconds of all draft steps and of the target pass."""
        return


@dataclass(frozen=True)
class FixedLength(DraftLength):
    """Always drafts the same number of patches."""

    length: int

    def choose(self, rows: int) -> int:
        """Return the length."""
        return self.length


@dataclass
class AcceptanceLength(DraftLength):
    """STRIDE's adaptive K, from 1 to 8: one more if over 70 % of the drafts were accepted, one less if below 30 %."""

    length: int = 3
    tried: int = 0
    accepted: int = 0

    def choose(self, rows: int) -> int:
        """Return the present length."""
        return self.length

    def learn(self, rows: int, length: int, accepted: Tensor, draft_seconds: float, target_seconds: float) -> None:
        """Count the drafts that were judged."""
        self.tried += int((accepted + 1).clamp(max=length).sum())
        self.accepted += int(accepted.sum())
        rate = self.accepted / max(1, self.tried)
        self.length = min(MAX_LENGTH, max(1, self.length + (rate > 0.7) - (rate < 0.3)))


@dataclass
class MeasuredLength(DraftLength):
    """Maximises expected patches over expected time, E(K) / (K t_draft + t_target(K + 1)); 0 is the target alone.

    Times are recorded by number of rows, in powers of two. Where there are none, those of the nearest number count.
    """

    tried: list[int] = field(default_factory=lambda: [0] * MAX_LENGTH)  # drafts judged, by position
    accepted: list[int] = field(default_factory=lambda: [0] * MAX_LENGTH)
    _target: dict[int, LatencyCurve] = field(default_factory=dict)  # by power of two of the rows: times by patches
    _draft: dict[int, LatencyCurve] = field(default_factory=dict)

    def choose(self, rows: int) -> int:
        """Return the length with the most expected patches per second, or one to try while times are unknown."""
        target, draft = _nearest(self._target, rows), _nearest(self._draft, rows)
        if target is None or not target.is_timed(1):
            return 0
        if draft is None or not draft.is_timed(1):
            return _TRIED
        rates = {
            length: self.patches(length) / self._seconds(target, draft, length) for length in range(MAX_LENGTH + 1)
        }
        best = max(rates, key=lambda length: rates[length])
        return best if rates[best] > _GAIN * rates[0] else 0

    @staticmethod
    def _seconds(target: LatencyCurve, draft: LatencyCurve, length: int) -> float:
        return target.seconds(length + 1) + length * draft.seconds(1)

    def patches(self, length: int) -> float:
        """Return the expected patches of a round, E(K)."""
        return expected_tokens_by_position(self.acceptances()[:length])

    def acceptances(self) -> list[float]:
        """Return the acceptance rate at each position, given that all drafts before it are accepted."""
        overall = (sum(self.accepted) + 1.0) / (sum(self.tried) + 2.0)
        return [(a + _TRUST * overall) / (t + _TRUST) for a, t in zip(self.accepted, self.tried, strict=True)]

    def learn(self, rows: int, length: int, accepted: Tensor, draft_seconds: float, target_seconds: float) -> None:
        """Learn from a round."""
        power = rows.bit_length()
        self._target.setdefault(power, LatencyCurve()).learn(length + 1, target_seconds)
        if length:
            self._draft.setdefault(power, LatencyCurve()).learn(1, draft_seconds / length)
        for position in range(length):
            self.tried[position] += int((accepted >= position).sum())
            self.accepted[position] += int((accepted > position).sum())


def _nearest(curves: dict[int, LatencyCurve], rows: int) -> LatencyCurve | None:
    """Return the curve of the nearest number of rows, at most four times as many or as few."""
    power = rows.bit_length()
    near = min(curves, key=lambda known: abs(known - power), default=None)
    return None if near is None or abs(near - power) > 2 else curves[near]
