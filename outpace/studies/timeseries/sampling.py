"""Draws sample paths in rounds: the draft proposes patches, the target checks them in one forward, a rule decides.

Rows (paths) accept different numbers of patches. Before a round the target's state lacks the last committed patch of
each row, and the draft's state the last two; so after a round both drop K - accepted patches, K being the draft length.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution

from outpace.planning.estimators import RollingMedian
from outpace.studies.timeseries.patch_models import PatchModel
from outpace.studies.timeseries.rules import PatchRule, check_finite

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


_LEAVE = 0.25  # fraction of rows that must be finished before they are removed from the batch


@dataclass
class PathStats:
    """Counts of the rounds; `drafted` and `accepted` count by position in the draft."""

    draft_lengths: list[int] = field(default_factory=list)  # of each round
    row_rounds: int = 0  # target passes, counted once for each row
    emitted: int = 0  # patches that these passes gave, accepted drafts included
    drafted: list[int] = field(default_factory=lambda: [0] * MAX_LENGTH)  # drafts that were judged
    accepted: list[int] = field(default_factory=lambda: [0] * MAX_LENGTH)
    seconds: float = 0.0

    @property
    def patches_per_forward(self) -> float:
        """Mean number of patches that a row gets from a target pass."""
        return self.emitted / max(1, self.row_rounds)

    @property
    def acceptance(self) -> list[float]:
        """The acceptance rate at each drafted position, given that all drafts before it were accepted."""
        return [a / d for a, d in zip(self.accepted, self.drafted, strict=True) if d]

    def count(self, length: int, accepted: Tensor) -> None:
        """Record a round; `accepted` are the accepted drafts of the rows that were not finished before it."""
        self.draft_lengths.append(length)
        self.row_rounds += len(accepted)
        self.emitted += int((accepted + 1).sum())
        for position in range(length):
            self.drafted[position] += int((accepted >= position).sum())
            self.accepted[position] += int((accepted > position).sum())


@dataclass(frozen=True)
class Paths:
    """Sampled patches [rows, patches, points], and which of them are accepted drafts [rows, patches]."""

    patches: Tensor
    is_drafted: Tensor


@torch.inference_mode()
def draw_paths(
    target: PatchModel,
    draft: PatchModel | None,
    history: Tensor,
    num_paths: int,
    num_patches: int,
    rule: PatchRule,
    lengths: DraftLength,
    stats: PathStats,
) -> Paths:
    """Draw `num_paths` continuations of `num_patches` patches for each history [series, patches, points].

    Rows of the result are grouped by series. There must be two patches of history or more.
    """
    start = time.perf_counter()
    num_rows, points = len(history) * num_paths, history.shape[-1]
    paths = Paths(torch.empty(num_rows, num_patches, points), torch.zeros(num_rows, num_patches, dtype=torch.bool))
    done = torch.zeros(num_rows, dtype=torch.long)
    active = torch.arange(num_rows)  # the rows that the states hold
    tail = history[:, -2:].repeat_interleave(num_paths, 0)  # what the draft's state lacks
    target_state, draft_state = _open(target, history[:, :-1], num_paths), None
    while True:
        missing = num_patches - int(done.min())  # of the slowest row; one of them comes from the target
        length = 0 if draft is None else min(missing - 1, lengths.choose(len(active), missing))
        if draft is not None and length and draft_state is None:
            draft_state = _open(draft, history[:, :-2], num_paths)
        begin = time.perf_counter()
        drafts: Tensor = torch.empty(len(active), 0, points)
        q: list[Distribution] = []
        if draft is not None and length:
            drafts, q = _propose(draft, draft_state, tail, length)
        known = torch.cat([tail[:, -1:], drafts], 1)
        p = target.propose(target_state, known)
        if length:
            accepted, patch = rule.verify(drafts, q, p)
        else:
            accepted, patch = torch.zeros(len(active), dtype=torch.long), p.sample()[:, 0]
        check_finite(patch, "target")
        lengths.learn(length, accepted, time.perf_counter() - begin)
        stats.count(length, accepted[done[active] < num_patches])
        _write(paths, done, active, drafts, accepted, patch)
        unfinished = done[active] < num_patches
        if not unfinished.any():
            stats.seconds += time.perf_counter() - start
            return paths
        rows = torch.arange(len(active))
        if length:
            target.drop(target_state, length - accepted)
            draft.drop(draft_state, length - accepted)  # type: ignore[union-attr]
            tail = known[rows, accepted][:, None]
        tail = torch.cat([tail, patch[:, None]], 1)
        if unfinished.float().mean() <= 1.0 - _LEAVE:
            rows = rows[unfinished]
            active, tail = active[rows], tail[rows]
            target.select(target_state, rows)
            if draft is not None and draft_state is not None:
                draft.select(draft_state, rows)


def _open(model: PatchModel, history: Tensor, num_paths: int) -> Any:
    """Return the state of `num_paths` rows for each history."""
    state = model.open(history)
    if num_paths > 1:
        model.select(state, torch.arange(len(history)).repeat_interleave(num_paths))
    return state


def _propose(draft: PatchModel, state: Any, tail: Tensor, length: int) -> tuple[Tensor, list[Distribution]]:
    """Return drafts [rows, length, points] and the distributions whose last positions they were drawn from."""
    drafts, distributions = [], []
    for _ in range(length):
        distributions.append(draft.propose(state, tail))
        tail = distributions[-1].sample()[:, -1:]
        check_finite(tail, "draft")
        drafts.append(tail)
    return torch.cat(drafts, 1), distributions


def _write(paths: Paths, done: Tensor, active: Tensor, drafts: Tensor, accepted: Tensor, patch: Tensor) -> None:
    """Write the patches of a round, without those beyond the end of the forecast, and count them in `done`."""
    num_patches, length = paths.patches.shape[1], drafts.shape[1]
    given = torch.cat([drafts, patch[:, None]], 1)
    given[torch.arange(len(given)), accepted] = patch
    places = done[active][:, None] + torch.arange(length + 1)
    fits = (torch.arange(length + 1) <= accepted[:, None]) & (places < num_patches)
    rows = active[:, None].expand_as(places)
    paths.patches[rows[fits], places[fits]] = given[fits]
    paths.is_drafted[rows[fits], places[fits]] = (torch.arange(length + 1) < accepted[:, None])[fits]
    done[active] = (done[active] + accepted + 1).clamp(max=num_patches)
