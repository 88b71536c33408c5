"""Draws sample paths in rounds: the draft proposes patches, the target checks them in one forward, a rule decides.

Rows (paths) accept different numbers of patches. Before a round the target's state lacks the last committed patch of
each row, and the draft's state the last two; so after a round both drop K - accepted patches, K being the draft length.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from outpace.studies.timeseries.patch_models import PatchModel
from outpace.studies.timeseries.rules import PatchRule, check_finite

MAX_LENGTH = 8


@dataclass
class DraftLength:
    """K, the number of patches to draft in a round.

    With `adapts` it is STRIDE's, from 1 to 8: one more after a round if over 70 % of the drafts so far were accepted,
    one less if below 30 %.
    """

    length: int
    adapts: bool = False
    tried: int = 0
    accepted: int = 0

    def learn(self, length: int, accepted: Tensor) -> None:
        """Record a round that drafted `length` patches in each row and accepted `accepted` [rows]."""
        if self.adapts:
            self.tried += int((accepted + 1).clamp(max=length).sum())
            self.accepted += int(accepted.sum())
            rate = self.accepted / max(1, self.tried)
            self.length = min(MAX_LENGTH, max(1, self.length + (rate > 0.7) - (rate < 0.3)))


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
        length = 0 if draft is None else min(missing - 1, lengths.length)
        if draft is not None and length and draft_state is None:
            draft_state = _open(draft, history[:, :-2], num_paths)
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
        lengths.learn(length, accepted)
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
