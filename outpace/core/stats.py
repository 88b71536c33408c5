"""Figures as folds over Steps: no counter is kept anywhere else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Generic, NamedTuple, TypeVar

HITS = ("primary", "secondary", "late")
Positions = tuple[tuple[int, int], ...]
"""For each position of a branch: the rounds that offered a token there after accepting all before it, and how many of
these rounds accepted it."""


class RoundStats(NamedTuple):
    """The record of one round of one request; every figure that is printed is a fold over Steps."""

    drafted: int  # candidates that the target judged
    accepted: int  # of them, on the path
    emitted: int  # tokens written: accepted, and the target's own
    depth_offered: int = 0  # length of the longest branch judged
    hit: str | None = None
    verified_rows: int = 1  # rows of the target's pass, the root's included
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    seconds: float = 0.0
    predicted: int = 0  # judged tokens that the caller predicted
    predicted_accepted: int = 0  # of them, written
    relaxed: int = 0  # of the accepted, those that the exact rule would have rejected


@dataclass(frozen=True)
class RunStats:
    """What a run amounts to. Times in seconds, lengths in tokens."""

    passes: int
    emitted: int
    drafted: int
    accepted: int
    hits: int
    misses: int
    by_kind: dict[str, int]  # hits by where they stood, and misses
    positions: Positions
    draft_seconds: float
    target_seconds: float
    predicted: int = 0
    predicted_accepted: int = 0
    relaxed: int = 0

    @property
    def predicted_rejected(self) -> int:
        """Tokens of the caller's prediction that were judged and not written."""
        return self.predicted - self.predicted_accepted

    @property
    def mean_accepted_length(self) -> float:
        """Emitted tokens a target pass (tau), the target's own token included."""
        return self.emitted / self.passes if self.passes else 0.0

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """That the i-th token of a branch is accepted, once all before it were."""
        return rates(self.positions)

    @property
    def draft_acceptance(self) -> float | None:
        """Accepted over drafted; None where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def hit_rate(self) -> float | None:
        """CARD: how often the next committed token stood in the cache; None where no cache was asked."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else None


def summarize(steps: Iterable[RoundStats]) -> RunStats:
    """All figures of a sequence of rounds."""
    rounds = list(steps)
    kinds = Counter(step.hit for step in rounds if step.hit)
    return RunStats(
        passes=len(rounds),
        emitted=sum(step.emitted for step in rounds),
        drafted=sum(step.drafted for step in rounds),
        accepted=sum(step.accepted for step in rounds),
        hits=sum(kinds[kind] for kind in HITS),
        misses=kinds["miss"],
        by_kind=dict(kinds),
        positions=positions((step.depth_offered, step.accepted) for step in rounds),
        draft_seconds=sum(step.draft_seconds for step in rounds),
        target_seconds=sum(step.target_seconds for step in rounds),
        predicted=sum(step.predicted for step in rounds),
        predicted_accepted=sum(step.predicted_accepted for step in rounds),
        relaxed=sum(step.relaxed for step in rounds),
    )


def merge_stats(parts: Sequence[RunStats]) -> RunStats:
    """The figures of several runs as if they were one."""
    names = ["passes", "emitted", "drafted", "accepted", "hits", "misses", "draft_seconds", "target_seconds"]
    names += ["predicted", "predicted_accepted", "relaxed"]
    sums: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in names}
    kinds = Counter(kind for part in parts for kind in Counter(part.by_kind).elements())
    return RunStats(**sums, by_kind=dict(kinds), positions=merge_positions(part.positions for part in parts))


def positions(rounds: Iterable[tuple[int, int]]) -> Positions:
    """From the tokens that the longest branch of each round offered, and those accepted; as far as any round came."""
    known = list(rounds)
    found: list[tuple[int, int]] = []
    while reached := [accepted for offered, accepted in known if min(offered - 1, accepted) >= len(found)]:
        found.append((len(reached), sum(accepted > len(found) for accepted in reached)))
    return tuple(found)


def merge_positions(parts: Iterable[Positions]) -> Positions:
    """The positions of several runs' rounds as if they were one's."""
    columns = zip_longest(*parts, fillvalue=(0, 0))
    return tuple((sum(reached for reached, _ in column), sum(kept for _, kept in column)) for column in columns)


def rates(positions: Iterable[tuple[int, int]]) -> tuple[float, ...]:
    """The share of the rounds reaching a position that accepted it."""
    return tuple(kept / reached for reached, kept in positions)


T = TypeVar("T")


class BatchedUpdates(Generic[T]):
    """Facts that wait for each other until they are learnt, as many as `most` at last, the first ones at once: behind a
    pass the code that learns is cold."""

    def __init__(self, learn: Callable[[T], None], most: int) -> None:
        self._learn, self._most = learn, most
        self._waiting: list[T] = []
        self._learnt = 0

    def add(self, facts: Iterable[T]) -> None:
        """They happened, in this order."""
        self._waiting += facts
        if len(self._waiting) > min(self._most, self._learnt // self._most):
            self.work_in()

    def work_in(self) -> None:
        """What waits counts from now on."""
        for fact in self._waiting:
            self._learn(fact)
        self._learnt += len(self._waiting)
        self._waiting.clear()
