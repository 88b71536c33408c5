"""Rules of drafted patches by the distributions they keep, and the states and models that they run on."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forecast_checks as checks
import pytest
import torch
from forecast_checks import differences, faults_of_paths, faults_of_rule, gaussian, paths_of, student
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent, MixtureSameFamily, Normal, Uniform
from transformers import LlamaConfig, TimesFm2_5Config, TimesFm2_5ModelForPrediction
from turns import one_of

from outpace.core.errors import UserError
from outpace.studies.timeseries import rules
from outpace.studies.timeseries.patch_models import PatchModel
from outpace.studies.timeseries.rules import ExactRule, StrideRule
from outpace.studies.timeseries.sampling import DraftLength, PathStats, draw_paths
from outpace.studies.timeseries.transformer import PatchTransformer, TransformerForecaster

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from forecast_point import PointForecaster, timesfm

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


POINTS = 4


def config(points: int = POINTS, **more: Any) -> LlamaConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    found = LlamaConfig(**sizes, vocab_size=1, max_position_embeddings=64, bos_token_id=None, eos_token_id=None)
    found.patch_length, found.frequencies, found.draft_length = points, ["15min"], None
    for name, value in more.items():
        setattr(found, name, value)
    return found


def network(seed: int = 0) -> PatchTransformer:
    torch.manual_seed(seed)
    found = PatchTransformer(config()).eval()
    for weight in found.parameters():  # as a trained model: what a patch says must matter
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.2)
    return found


def tiny_timesfm() -> TimesFm2_5ModelForPrediction:
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 16, "num_attention_heads": 2}
    return TimesFm2_5ModelForPrediction(
        TimesFm2_5Config(
            **sizes,
            num_key_value_heads=2,
            num_hidden_layers=2,
            patch_length=4,
            context_length=64,
            horizon_length=8,
            output_quantile_len=8,
            max_position_embeddings=64,
        )
    ).eval()


def drift(histories: list[Tensor]) -> Tensor:
    """A point forecast from the whole history."""
    return torch.stack([one[-POINTS:].flip(0) * 0.5 + one.mean() for one in histories])


MODELS = {
    "transformer": lambda: TransformerForecaster(network()),
    "point": lambda: PointForecaster(drift, POINTS, 0.5),
    "timesfm": lambda: timesfm(tiny_timesfm(), 0.5),
}


def fault_of_state(model: PatchModel) -> str | None:
    """Move a state as rounds do, and compare its densities with those of the whole histories, read afresh."""
    torch.manual_seed(2)
    with torch.inference_mode():
        history = torch.randn(2, 3, POINTS)
        state = model.open(history)
        order = torch.tensor([0, 0, 1, 1, 1])
        model.select(state, order)
        known = [history[row] for row in order]
        for step in range(12):
            patches = torch.randn(len(known), 1 + step % 4, POINTS)
            found = model.propose(state, patches)
            for row, own in enumerate(patches):
                whole = torch.cat([known[row], own])[None]
                fresh = model.propose(model.open(whole[:, :0]), whole)
                gap = (found.mean[row] - fresh.mean[0, -len(own) :]).abs().max().item()
                if gap > 1e-4:
                    return f"step {step}, row {row}: means differ by {gap}"
                known[row] = whole[0]
            counts = torch.randint(0, patches.shape[1] + 1, (len(known),))
            model.drop(state, counts)
            known = [own[: len(own) - count] for own, count in zip(known, counts.tolist(), strict=True)]
            if step == 6:
                rows = torch.tensor([4, 0, 2])
                model.select(state, rows)
                known = [known[row] for row in rows]
    return None


@pytest.mark.parametrize("name", MODELS)
def test_a_state_of_unequal_rows_gives_the_densities_of_the_whole_history(name: str) -> None:
    assert fault_of_state(MODELS[name]()) is None


def test_dropped_slots_are_used_again() -> None:
    model = TransformerForecaster(network())
    with torch.inference_mode():
        state = model.open(torch.randn(2, 3, POINTS))
        for _ in range(5):
            model.propose(state, torch.randn(2, 4, POINTS))
            model.drop(state, torch.tensor([1, 4]))
        assert state.lengths.tolist() == [18, 3]
        _, mask = state.append(1)
    assert mask.shape == (2, 1, 1, 19)
    assert mask.sum(-1).flatten().tolist() == [19, 4]


@pytest.mark.parametrize("patches", [2, 3])
def test_a_history_of_two_patches_is_enough(patches: int) -> None:
    """The draft's state is then empty at first."""
    stats = PathStats()
    pair = TransformerForecaster(network()), TransformerForecaster(network(1))
    paths = draw_paths(*pair, torch.randn(1, patches, POINTS), 3, 5, ExactRule(), DraftLength(2), stats)
    assert paths.patches.isfinite().all()
    assert stats.draft_lengths


def test_timesfm_as_target_and_as_draft() -> None:
    """It has no cache, so a pass over n patches costs n forecasts; the paths are the target's all the same."""
    passes: list[int] = []
    target, draft = timesfm(tiny_timesfm(), 1.0), PointForecaster(drift, POINTS, 1.0)
    inner = target._forecast
    target._forecast = lambda histories: passes.append(len(histories)) or inner(histories)
    stats = PathStats()
    draw_paths(target, draft, torch.randn(1, 6, POINTS), 4, 4, ExactRule(), DraftLength(3), stats)
    assert passes[0] == 4 * 4  # rows times patches
    assert sum(stats.drafted) > 0
    history = torch.randn(2, 3, POINTS)
    drawn = [
        draw_paths(target, draft, history, 400, 2, ExactRule(), DraftLength(length), PathStats()).patches
        for length in (1, 0)
    ]
    assert not list(differences(drawn[0][:400].flatten(1), drawn[1][:400].flatten(1)))


def test_a_point_forecast_of_a_wrong_shape_is_refused() -> None:
    model = PointForecaster(lambda histories: torch.zeros(len(histories), 2), POINTS, 1.0)
    with pytest.raises(UserError, match=r"returned shape \[1, 2\], it must be \[1, 4 or more\]"):
        model.propose(model.open(torch.randn(1, 2, POINTS)), torch.randn(1, 1, POINTS))


def test_a_saved_model_is_loaded_with_the_same_densities(tmp_path: Path) -> None:
    net = network()
    net.save_pretrained(tmp_path)
    loaded = TransformerForecaster.load(tmp_path)
    patches = torch.randn(1, 5, POINTS)
    with torch.inference_mode():
        assert torch.equal(loaded.model(patches).mean, net(patches).mean)
    assert (loaded.patch_length, loaded.max_patches, loaded.frequencies) == (POINTS, 64, ("15min",))
    assert loaded.draft_length == PatchModel.draft_length


def test_a_folder_without_a_forecaster_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config\.json"):
        TransformerForecaster.load(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(UserError, match="it must be of PatchTransformer"):
        TransformerForecaster.load(tmp_path)
