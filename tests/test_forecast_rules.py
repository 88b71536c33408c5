"""The rules of forecasting: what a round emits has the target's distribution, and the lossy rule's has not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import forecast_checks as checks
import pytest
import torch
from forecast_checks import faults_of_paths, faults_of_rule, gaussian, paths_of, student
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent, MixtureSameFamily, Normal, Uniform
from turns import one_of

from outpace.core.errors import UserError
from outpace.studies.timeseries import rules
from outpace.studies.timeseries.rules import ExactRule, StrideRule

CASES = list(itertools.product(("gaussian", "student"), (0.25, 0.5, 1.0, 2.0), (1, 16), (1.0, 1.3)))
SHORT = [("gaussian", 1.0, 1, 1.0), ("gaussian", 0.5, 16, 1.3), ("student", 2.0, 16, 1.0)]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)


@pytest.mark.parametrize("case", SHORT)
def test_exact_emits_the_target(case: tuple) -> None:
    assert faults_of_rule(ExactRule(), *case, draws=20_000) == []


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_exact_emits_the_target_in_many_draws(case: tuple) -> None:
    assert faults_of_rule(ExactRule(), *case, draws=200_000) == []


@pytest.mark.parametrize(
    "distance", [0.5, pytest.param(0.25, marks=pytest.mark.long), pytest.param(2.0, marks=pytest.mark.long)]
)
def test_thinning_is_exact_where_reflection_would_do(distance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_reflect", lambda *given: None)
    assert faults_of_rule(ExactRule(), "gaussian", distance, 2, 1.0, draws=20_000) == []


def test_reflection_needs_no_further_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_MAX_DRAWS", 0)  # thinning would end with a biased draw
    assert faults_of_rule(ExactRule(), "gaussian", 1.0, 16, 1.0, draws=20_000) == []


@pytest.mark.parametrize("case", SHORT)
def test_stride_does_not_emit_the_target(case: tuple) -> None:
    assert faults_of_rule(StrideRule(), *case, draws=20_000) != []


def test_the_shift_of_stride_is_the_published_one() -> None:
    """0.31 deviations where the means differ by one: it draws from p after a rejection."""
    p, q = checks.pair("gaussian", 1.0, 1, 1.0)
    emitted, _ = checks.emit(StrideRule(), p, q, 50_000)
    normal = Normal(0.0, 1.0)
    accepted_mean = math.erf(1 / math.sqrt(8))  # of min(p, q)'s complement: E[x (p - q)+] by symmetry
    kept = 2 * float(normal.cdf(torch.tensor(-0.5)))
    expected = 0.5 * kept  # the overlap is symmetric about the middle of the means; the rest has mean 0
    assert emitted.mean().item() == pytest.approx(expected, abs=0.02)
    assert expected == pytest.approx(0.31, abs=0.01)
    assert accepted_mean == pytest.approx(1 - kept)


@pytest.mark.parametrize("dials", [{"bias": 3.0}, {"tolerance": 2.0}])
def test_the_dials_of_stride_accept_more(dials: dict) -> None:
    p, q = checks.pair("gaussian", 2.0, 2, 1.0)
    assert checks.emit(StrideRule(**dials), p, q, 10_000)[1] > checks.emit(StrideRule(), p, q, 10_000)[1] + 0.05


def mixture(mean: Tensor, scale: float) -> Distribution:
    parts = Independent(Normal(torch.stack([mean - 1.5, mean + 1.5], -2), scale), 1)
    return MixtureSameFamily(Categorical(torch.ones(*mean.shape[:-1], 2)), parts)


def box(mean: Tensor, scale: float) -> Distribution:
    return Independent(Uniform(mean - scale, mean + scale, validate_args=False), 1, validate_args=False)


@pytest.mark.parametrize("make", one_of(2, [box, gaussian, mixture, student]))
def test_paths_have_the_targets_distribution(make: Callable) -> None:
    """Two series in one batch: the draft fits the first and is poor for the second. A box has densities of 0."""
    assert faults_of_paths(ExactRule(), 6_000, make) == []


@pytest.mark.long
@pytest.mark.parametrize(("make", "scale"), [(gaussian, 1.2), (gaussian, 1.0), (student, 1.2)])
def test_many_paths_have_the_targets_distribution(make: Callable, scale: float) -> None:
    assert faults_of_paths(ExactRule(), 200_000, make, scale) == []


def test_paths_of_stride_do_not() -> None:
    assert faults_of_paths(StrideRule(), 6_000) != []


def test_rows_accept_differently() -> None:
    paths, stats = paths_of(ExactRule(), 3, 2_000)
    first, second = paths.is_drafted[:2_000].float().mean().item(), paths.is_drafted[2_000:].float().mean().item()
    assert first > second + 0.2
    assert stats.patches_per_forward > 1.5
    assert stats.emitted >= 4 * 4_000


def test_a_draft_equal_to_the_target_is_always_accepted() -> None:
    paths, stats = paths_of(ExactRule(), 3, 500, scale=1.0)
    target = checks.ToyForecaster()
    alike = checks.PathStats()
    checks.draw_paths(target, checks.ToyForecaster(), checks.HISTORY, 500, 4, ExactRule(), checks.DraftLength(3), alike)
    assert alike.drafted == alike.accepted
    assert stats.drafted != stats.accepted
    assert not paths.is_drafted.all()


class Broken(checks.ToyForecaster):
    """Gives a bad density or a bad draw at the second patch of a round."""

    def propose(self, state: checks.ToyState, patches: Tensor) -> Distribution:
        found = super().propose(state, patches)
        value = {"density": math.inf, "nan": math.nan}[self.fault]
        if found.batch_shape[1] > 1:
            scores = found.log_prob

            def log_prob(values: Tensor) -> Tensor:
                log_p = scores(values).clone()
                log_p[..., 1] = value
                return log_p

            found.log_prob = log_prob
        return found


@pytest.mark.parametrize(("fault", "shown"), [("density", "inf"), ("nan", "nan")])
def test_a_bad_density_names_the_patch(fault: str, shown: str) -> None:
    broken = Broken()
    broken.fault = fault
    with pytest.raises(UserError, match=f"density of the target is {shown} at patch 2 of a round, in row 0"):
        checks.draw_paths(
            broken, checks.ToyForecaster(), checks.HISTORY, 1, 4, ExactRule(), checks.DraftLength(3), checks.PathStats()
        )


def test_a_draw_that_is_not_finite_is_refused() -> None:
    with pytest.raises(UserError, match="the target draws a value that is not finite"):
        checks.draw_paths(
            checks.ToyForecaster(offset=(math.inf, 0.0)),
            None,
            checks.HISTORY,
            1,
            4,
            ExactRule(),
            checks.DraftLength(0),
            checks.PathStats(),
        )


@pytest.mark.parametrize(("dials", "says"), [({"bias": 0.5}, "bias is 0.5"), ({"tolerance": -1.0}, "tolerance is -1")])
def test_a_dial_out_of_bounds_is_refused(dials: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        StrideRule(**dials)
