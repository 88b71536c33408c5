"""Figures as folds over Steps: no counter is kept anywhere else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outpace.core.types import Step

HITS = ("primary", "secondary", "late")


@dataclass(frozen=True)
class Figures:
    """What a run amounts to. Times in seconds, lengths in tokens."""

    passes: int
    emitted: int
    drafted: int
    accepted: int
    hits: int
    misses: int
    by_kind: dict[str, int]  # hits by where they stood, and misses
    acceptance_by_position: tuple[float, ...]
    draft_seconds: float
    target_seconds: float

    @property
    def mean_accepted_length(self) -> float:
        """Emitted tokens a target pass (tau), the target's own token included."""
        return self.emitted / self.passes if self.passes else 0.0

    @property
    def draft_acceptance(self) -> float | None:
        """Accepted over drafted; None where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def hit_rate(self) -> float | None:
        """CARD: how often the next committed token stood in the cache; None where no cache was asked."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else None


def fold(steps: Iterable[Step]) -> Figures:
    """All figures of a sequence of rounds."""
    rounds = list(steps)
    kinds = Counter(step.hit for step in rounds if step.hit)
    return Figures(
        passes=len(rounds),
        emitted=sum(step.emitted for step in rounds),
        drafted=sum(step.drafted for step in rounds),
        accepted=sum(step.accepted for step in rounds),
        hits=sum(kinds[kind] for kind in HITS),
        misses=kinds["miss"],
        by_kind=dict(kinds),
        acceptance_by_position=_by_position(rounds),
        draft_seconds=sum(step.draft_seconds for step in rounds),
        target_seconds=sum(step.target_seconds for step in rounds),
    )


def _by_position(steps: Sequence[Step]) -> tuple[float, ...]:
    """Of the rounds that offered a branch of length i, the share that accepted at least i tokens."""
    longest = max((step.depth_offered for step in steps), default=0)
    rates = []
    for length in range(1, longest + 1):
        offered = [step for step in steps if step.depth_offered >= length]
        rates.append(sum(step.accepted >= length for step in offered) / len(offered))
    return tuple(rates)
