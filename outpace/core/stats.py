"""Statistics of rounds, and how drafters and the planner keep what they learn.

Every figure is computed from a list of `RoundStats`; there are no other counters.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import Any, Generic, NamedTuple, TypeVar

MAX_SALTS = 8  # cache salts with a table; each table may be as large as the shared one
HITS = ("primary", "secondary", "late")
Positions = tuple[tuple[int, int], ...]
"""For each position of a branch: how many rounds offered a token there after accepting all before it, and how many
accepted it."""


class PlanEstimates(NamedTuple):
    """What the plan of a round was computed from, for the levels that it chose or for one. Times in seconds."""

    requests: int
    levels: int  # chosen for all requests together
    acceptance: tuple[float, ...]  # by level: chance that a token is accepted after one of the level above
    plain_seconds: float  # a round of plain decoding
    pass_seconds: float  # the pass with these levels
    step_seconds: float  # a draft step of all requests
    excess_seconds: float  # of the round, beyond its pass and its steps
    reading_seconds: float  # the texts that the draft model has not read


class RoundPlan(NamedTuple):
    """Records what a planner expected of one request's round, and why it stopped drafting."""

    widths: tuple[int, ...]  # by draft level: the most nodes that the draft model was allowed to expand
    tokens: float  # expected tokens, including the target's own
    seconds: float  # expected duration of the round, for all requests; 0: unknown
    price: float  # tokens that each second of drafting and verifying had to bring
    why: str
    estimates: PlanEstimates | None = None  # None: no draft model was considered

    def to_dict(self) -> dict[str, Any]:
        return self._asdict() | {"estimates": self.estimates and self.estimates._asdict()}


class RoundStats(NamedTuple):
    """The record of one round of one request."""

    drafted: int  # candidates that the target verified
    accepted: int  # candidates on the accepted path
    emitted: int  # tokens written: accepted ones and the target's own
    depth_offered: int = 0  # length of the longest verified branch
    hit: str | None = None
    verified_rows: int = 1  # rows of the target's pass, including the root
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    seconds: float = 0.0
    predicted: int = 0  # verified tokens that the caller predicted
    predicted_accepted: int = 0  # predicted tokens that were written
    relaxed: int = 0  # accepted tokens that the exact rule would have rejected
    plan: RoundPlan | None = None  # None: the round was not planned
    experts: float = 0.0  # that the pass applied in a layer: the mean over the layers with experts, 0 without any


@dataclass(frozen=True)
class RunStats:
    """The statistics of a run. Times in seconds, lengths in tokens."""

    passes: int
    emitted: int
    drafted: int
    accepted: int
    hits: int
    misses: int
    by_kind: dict[str, int]  # hits by where the token was found, and misses
    positions: Positions
    draft_seconds: float
    target_seconds: float
    predicted: int = 0
    predicted_accepted: int = 0
    relaxed: int = 0
    experts: float = 0.0

    @property
    def experts_per_pass(self) -> float | None:
        """Return the mean number of experts that a pass applied in a layer; None without mixtures of experts."""
        return self.experts / self.passes if self.experts else None

    @property
    def predicted_rejected(self) -> int:
        """Return the verified tokens of the caller's prediction that were not written."""
        return self.predicted - self.predicted_accepted

    @property
    def mean_accepted_length(self) -> float:
        """Return the emitted tokens per target pass (tau), the target's own token included."""
        return self.emitted / self.passes if self.passes else 0.0

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Return the rate at which the i-th token of a branch is accepted, given that all before it were."""
        return rates(self.positions)

    @property
    def draft_acceptance(self) -> float | None:
        """Return accepted over drafted tokens; None if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def hit_rate(self) -> float | None:
        """Return how often the next committed token was in CARD's cache; None without a cache."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else None


def summarize(steps: Iterable[RoundStats]) -> RunStats:
    """Return the statistics of a sequence of rounds."""
    rounds = list(steps)
    kinds = Counter(step.hit for step in rounds if step.hit)
    shared = {field.name for field in fields(RunStats)} & {*RoundStats._fields}
    sums: dict[str, Any] = {name: sum([getattr(step, name) for step in rounds]) for name in shared}
    return RunStats(
        **sums,
        passes=len(rounds),
        hits=sum(kinds[kind] for kind in HITS),
        misses=kinds["miss"],
        by_kind=dict(kinds),
        positions=positions((step.depth_offered, step.accepted) for step in rounds),
    )


def merge_stats(parts: Sequence[RunStats]) -> RunStats:
    """Return the statistics of several runs as if they were one."""
    names = [field.name for field in fields(RunStats) if field.name not in ("by_kind", "positions")]
    sums: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in names}
    kinds = Counter(kind for part in parts for kind in Counter(part.by_kind).elements())
    return RunStats(**sums, by_kind=dict(kinds), positions=merge_positions(part.positions for part in parts))


def positions(rounds: Iterable[tuple[int, int]]) -> Positions:
    """Count by position, from each round's longest offered branch and accepted tokens."""
    known = list(rounds)
    found: list[tuple[int, int]] = []
    while reached := [accepted for offered, accepted in known if min(offered - 1, accepted) >= len(found)]:
        found.append((len(reached), sum(accepted > len(found) for accepted in reached)))
    return tuple(found)


def merge_positions(parts: Iterable[Positions]) -> Positions:
    """Add up the positions of several runs."""
    columns = zip_longest(*parts, fillvalue=(0, 0))
    return tuple((sum(reached for reached, _ in column), sum(kept for _, kept in column)) for column in columns)


def rates(positions: Iterable[tuple[int, int]]) -> tuple[float, ...]:
    """Return the share of the rounds that reached a position and accepted it."""
    return tuple(kept / reached for reached, kept in positions)


def percent(share: float | None, suffix: str = "") -> str:
    """Format a share as whole percents, followed by `suffix`; "-" for None."""
    return "-" if share is None else f"{share:.0%}{suffix}"


T = TypeVar("T")


class DecayedMean:
    """A ratio of two exponentially decayed sums that starts from a prior of the given weight.

    `fade`: weight of the past, for each new sample.
    """

    def __init__(self, prior: float, weight: float, fade: float = 0.95) -> None:
        self._numerator, self._denominator, self._fade = prior * weight, weight, fade
        self.value = prior if weight else 0.0

    def learn(self, numerator: float, denominator: float = 1.0) -> None:
        self._numerator = self._numerator * self._fade + numerator
        self._denominator = self._denominator * self._fade + denominator
        self.value = self._numerator / self._denominator if self._denominator else 0.0

    def given(self, prior: float, weight: float) -> float:
        """Return the value with a further prior of this weight, which may change from call to call."""
        return (self._numerator + prior * weight) / (self._denominator + weight)


_MEMORY = 0.995  # decay of acceptance rates per observation, so about 200 observations count
RESTORED_WEIGHT = 20.0  # of a restored rate, in trials
MIN_RATE = 0.01  # smallest restored rate; its logarithm is needed


def acceptance_rate(prior: float, weight: float = 4.0) -> DecayedMean:
    """Return a running success rate that starts from a prior worth `weight` trials."""
    return DecayedMean(prior, weight, _MEMORY)


def restored_rate(kept: float) -> DecayedMean:
    """Return a profile's rate, with the confidence of a few trials."""
    return acceptance_rate(min(max(kept, MIN_RATE), 1.0), RESTORED_WEIGHT)


class BatchedUpdates(Generic[T]):
    """Delays updates of a statistic and applies them in batches of at most `batch_size`.

    Right after a pass the code that learns is not in the processor's caches. The first updates are applied at once.
    """

    def __init__(self, learn: Callable[[T], None], batch_size: int) -> None:
        self._learn, self._batch_size = learn, batch_size
        self._waiting: list[T] = []
        self._learnt = 0

    def add(self, facts: Iterable[T]) -> None:
        """Add updates, in this order."""
        self._waiting += facts
        if len(self._waiting) > min(self._batch_size, self._learnt // self._batch_size):
            self.flush()

    def flush(self) -> None:
        """Apply the delayed updates."""
        for fact in self._waiting:
            self._learn(fact)
        self._learnt += len(self._waiting)
        self._waiting.clear()


class PerSalt(Generic[T]):
    """A table learnt from answers, separately for each cache salt: no request finds what another salt's texts taught.

    `shared` is that of requests without a cache salt; each recently used salt has its own, created by `make`.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self.shared = make()
        self.make = make
        self._own: OrderedDict[str, T] = OrderedDict()

    def for_salt(self, key: str | None) -> T:
        """Return the table of requests with this salt; beyond `MAX_SALTS` salts, the least recently used is dropped."""
        if key is None:
            return self.shared
        if key not in self._own:
            self._own[key] = self.make()
        self._own.move_to_end(key)
        if len(self._own) > MAX_SALTS:
            self._own.popitem(last=False)
        return self._own[key]
