"""Models that forecast: states with rows of different lengths give the densities of the whole history."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forecast_checks import differences
from torch import Tensor
from transformers import LlamaConfig, TimesFm2_5Config, TimesFm2_5ModelForPrediction

from outpace.core.errors import UserError
from outpace.studies.timeseries.patch_models import PatchModel
from outpace.studies.timeseries.rules import ExactRule
from outpace.studies.timeseries.sampling import DraftLength, PathStats, draw_paths
from outpace.studies.timeseries.transformer import PatchTransformer, TransformerForecaster

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from forecast_point import PointForecaster, timesfm

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
