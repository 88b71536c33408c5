"""Statistical tests of forecasts: a toy model of patches, Kolmogorov-Smirnov, energy distance, and what must pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal, StudentT

from outpace.studies.timeseries.patch_models import PatchModel
from outpace.studies.timeseries.rules import ExactRule, PatchRule
from outpace.studies.timeseries.sampling import DraftLength, Paths, PathStats, draw_paths

LEVEL = 1e-3
_NEAR = 800  # draws whose distances are all computed
_SHUFFLES = 1999


def ks_probability(one: Tensor, other: Tensor) -> float:
    """The two-sample Kolmogorov-Smirnov test: the chance of so large a distance between samples of one distribution."""
    both = torch.cat([one, other]).sort().values
    shares = [torch.searchsorted(part.sort().values, both, right=True).double() / len(part) for part in (one, other)]
    distance = (shares[0] - shares[1]).abs().max().item()
    root = math.sqrt(len(one) * len(other) / (len(one) + len(other)))
    scaled = (root + 0.12 + 0.11 / root) * distance
    terms = (2.0 * (-1) ** (k - 1) * math.exp(-2.0 * (k * scaled) ** 2) for k in range(1, 101))
    return 1.0 if scaled < 0.2 else min(1.0, max(0.0, math.fsum(terms)))


def energy_probability(one: Tensor, other: Tensor) -> float:
    """The permutation test of the energy distance between two samples [draws, dimensions]."""
    both = torch.cat([one[:_NEAR], other[:_NEAR]]).double()
    distances = torch.cdist(both, both)
    signs = torch.ones(_SHUFFLES + 1, len(both), dtype=torch.float64)
    signs[0, len(one[:_NEAR]) :] = -1
    for row in range(1, _SHUFFLES + 1):
        signs[row] = signs[0][torch.randperm(len(both))]
    energies = -((signs @ distances) * signs).sum(1)
    return (energies[1:] >= energies[0]).double().mean().item() + 1.0 / (_SHUFFLES + 1)


def differences(one: Tensor, other: Tensor, level: float = LEVEL) -> Iterator[str]:
    """Yield the tests that tell samples [draws, dimensions] of two distributions from each other."""
    tests = {"the first value": (one[:, 0], other[:, 0])}
    if one.shape[1] > 1:
        tests |= {"the last value": (one[:, -1], other[:, -1]), "the sum": (one.sum(1), other.sum(1))}
        direction = torch.randn(one.shape[1])
        tests |= {"a projection": (one @ direction, other @ direction)}
    for name, pair in tests.items():
        if (chance := ks_probability(*pair)) < level / len(tests):
            yield f"Kolmogorov-Smirnov of {name}: {chance:.1e}"
    if (chance := energy_probability(one, other)) < level:
        yield f"energy distance: {chance:.1e}"


def gaussian(mean: Tensor, scale: float) -> Distribution:
    return Independent(Normal(mean, torch.full_like(mean, scale)), 1)


def student(mean: Tensor, scale: float) -> Distribution:
    return Independent(StudentT(torch.tensor(4.0), mean, torch.full_like(mean, scale)), 1)


@dataclass
class ToyState:
    values: Tensor  # [rows, slots, points]
    lengths: Tensor


@dataclass
class ToyForecaster(PatchModel):
    """A patch's mean depends on the two patches before it, and on the regime: the sign of the first value of all.

    In the second regime `offset` is added to each mean.
    """

    patch_length: int = 2
    scale: float = 1.0
    offset: tuple[float, float] = (0.0, 0.0)
    make: object = gaussian
    max_rows: list[int] = field(default_factory=list)

    def open(self, history: Tensor) -> ToyState:
        return ToyState(history.clone(), torch.full((len(history),), history.shape[1]))

    def propose(self, state: ToyState, patches: Tensor) -> Distribution:
        rows, count = torch.arange(len(patches))[:, None], patches.shape[1]
        room = int(state.lengths.max()) + count - state.values.shape[1]
        if room > 0:
            more = torch.zeros(len(patches), room, self.patch_length)
            state.values = torch.cat([state.values, more], 1)
        at = state.lengths[:, None] + torch.arange(count)
        state.values[rows, at] = patches
        state.lengths = state.lengths + count
        last, before = state.values[rows, at], state.values[rows, (at - 1).clamp(min=0)]
        offsets = torch.tensor(self.offset)[(state.values[:, 0, 0] < 0).long()]
        mean = 0.6 * last - 0.4 * before.flip(-1) + offsets[:, None, None]
        self.max_rows.append(len(patches))
        return self.make(mean, self.scale)

    def drop(self, state: ToyState, counts: Tensor) -> None:
        state.lengths = state.lengths - counts

    def select(self, state: ToyState, rows: Tensor) -> None:
        state.values, state.lengths = state.values[rows].clone(), state.lengths[rows]


def emit(rule: PatchRule, p: Distribution, q: Distribution, draws: int, chunk: int = 20_000) -> tuple[Tensor, float]:
    """The first patch that rounds with one draft emit [draws, points], and the share of accepted drafts.

    p and q have no batch shape.
    """
    emitted, accepted = [], 0
    for start in range(0, draws, chunk):
        count = min(chunk, draws - start)
        wide_p, wide_q = p.expand(torch.Size([count, 2])), q.expand(torch.Size([count, 1]))
        drafts = wide_q.sample()
        verdict = rule.verify(drafts, [wide_q], wide_p)
        emitted.append(torch.where(verdict.accepted[:, None] == 1, drafts[:, 0], verdict.patch))
        accepted += int(verdict.accepted.sum())
    return torch.cat(emitted), accepted / draws


def pair(family: str, distance: float, dimensions: int, ratio: float) -> tuple[Distribution, Distribution]:
    """p and q whose means are `distance` deviations of q away from each other; `ratio`: p's scale over q's."""
    make = {"gaussian": gaussian, "student": student}[family]
    shift = torch.full((dimensions,), distance / math.sqrt(dimensions))
    return make(torch.zeros(dimensions), ratio), make(shift, 1.0)


def faults_of_rule(
    rule: PatchRule, family: str, distance: float, dimensions: int, ratio: float, draws: int
) -> list[str]:
    """The tests by which what the rule emits differs from p."""
    p, q = pair(family, distance, dimensions, ratio)
    emitted, acceptance = emit(rule, p, q, draws)
    found = list(differences(emitted, p.sample(torch.Size([draws]))))
    expected = math.erfc(distance / 2 / math.sqrt(2))  # 2 Phi(-D/2)
    tolerance = max(0.01 * expected, 4.5 * math.sqrt(expected * (1 - expected) / draws))
    if family == "gaussian" and ratio == 1.0 and abs(acceptance - expected) > tolerance:
        found.append(f"acceptance {acceptance:.4f}, expected {expected:.4f}")
    return found


HISTORY = torch.tensor([[[1.0, 0.5], [0.2, -0.3], [0.4, 0.1]], [[-1.0, 0.5], [0.2, -0.3], [0.4, 0.1]]])


def paths_of(
    rule: PatchRule, length: int, draws: int, make: object = gaussian, scale: float = 1.2
) -> tuple[Paths, PathStats]:
    """Four patches for two series in one batch; the draft fits the first and is poor for the second."""
    target, draft = ToyForecaster(make=make), ToyForecaster(make=make, scale=scale, offset=(0.1, 1.2))
    stats = PathStats()
    return draw_paths(target, draft, HISTORY, draws, 4, rule, DraftLength(length), stats), stats


def faults_of_paths(rule: PatchRule, draws: int, make: object = gaussian, scale: float = 1.2) -> list[str]:
    """The tests by which paths of four patches differ from those of the target alone."""
    drafted, stats = paths_of(rule, 3, draws, make, scale)
    plain, _ = paths_of(rule, 0, draws, make, scale)
    found = []
    for series in range(2):
        rows = slice(series * draws, (series + 1) * draws)
        for first, last in ((0, 1), (1, 3), (0, 4)):
            one, other = (paths.patches[rows, first:last].flatten(1) for paths in (drafted, plain))
            found += [
                f"series {series}, patches {first} to {last}: {fault}" for fault in differences(one, other, LEVEL / 6)
            ]
    if not 0 < stats.accepted[0] < stats.drafted[0]:
        found.append("all drafts are judged alike")
    return found


def find_in_forecasts() -> str | None:
    """The first difference that short tests of the exact rule show, or None."""
    torch.manual_seed(5)
    for case in (("gaussian", 1.0, 2, 1.0), ("gaussian", 0.7, 2, 1.4), ("student", 1.0, 1, 1.0)):
        if found := faults_of_rule(ExactRule(), *case, draws=20_000):
            return f"{case}: {found[0]}"
    return next(iter(faults_of_paths(ExactRule(), 8_000)), None)
