"""Hidden states that a training computes by packed forwards of the target, for text that holds none."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from distill_files import HEAD_TARGETS, head_targets, settings, silent, target_folder

from outpace.core.errors import UserError
from outpace.distill import train
from outpace.distill.batches import Packer, Sample, TrainingBatch, read_samples
from outpace.distill.draft_shape import DraftShape
from outpace.distill.kinds import KINDS
from outpace.distill.options import DistillOptions
from outpace.distill.run import check, distill
from outpace.distill.shards import TextFolder
from outpace.distill.student import PackedTarget
from outpace.distill.train import Trainer, TrainOptions, agreement, read_curve
from outpace.distill.writer import LEVELS, AnswerJob, WriterOptions, engine_answers, tap_list
from outpace.models.load import load_model

TAPS, LENGTH = (1, 3, 4), 96
JOBS = [AnswerJob(n, tuple(range(3 + n, 5 + 4 * n)), (0.0, 1.0)[n % 2], n > 9) for n in range(12)]


@pytest.fixture(scope="module", params=head_targets("llama"))
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose text, with hidden states of float32 passes and without, is in folders of their own."""
    folder = tmp_path_factory.mktemp(request.param)
    made = target_folder(folder / "target", HEAD_TARGETS[request.param] | {"num_hidden_layers": 4})
    model = load_model(made, dtype="float32", runtime="llama").model
    options = WriterOptions(rows=4, max_tokens=30, top=4, taps=TAPS)
    answers = [*engine_answers(model, frozenset({2}), options, iter(JOBS))]
    TextFolder(folder / "stored", {}, {"taps": tap_list(TAPS)}).add(answers)
    TextFolder(folder / "without", {}).add([replace(answer, taps=None) for answer in answers])
    return made


def samples_of(target: Path, text: str) -> list[Sample]:
    return read_samples(target.parents[1] / text, LENGTH, TAPS)[0]


def batch(target: Path, text: str, layers: tuple[int, ...] = TAPS) -> TrainingBatch:
    samples = samples_of(target, text)
    packer = Packer(3, LENGTH, 272, None, torch.device("cpu"), PackedTarget(target, layers, "cpu").taps)
    return packer.batch(samples, packer.epoch(samples, 0, 0)[0])


def largest_error(target: Path, layers: tuple[int, ...]) -> float:
    """Return the largest difference of computed and stored hidden states, in levels of their int8 rows; the target
    has not read the last token of an answer."""
    stored, found = batch(target, "stored").packed, batch(target, "without", layers).packed
    assert stored.taps is not None
    assert found.taps is not None
    assert torch.equal(stored.tokens, found.tokens)
    rows, wanted = (taps.unflatten(2, (len(TAPS), -1)) for taps in (found.taps, stored.taps))
    is_read = wanted.abs().amax((2, 3)) > 0
    assert is_read.sum() > 0.9 * (stored.sequences >= 0).sum() - len(JOBS)
    assert (stored.positions[is_read] > 24).any(), "further than a window"
    levels = wanted[is_read].abs().amax(-1, keepdim=True) / LEVELS
    return float(((rows - wanted)[is_read] / levels).abs().max())


def test_computed_states_are_the_recorded_ones_but_for_rounding(target: Path) -> None:
    assert largest_error(target, TAPS) < 0.51
    assert largest_error(target, (0, 2, 3)) > 5


def test_half_precision_is_near(target: Path) -> None:
    """As on a GPU: matrices are bfloat16, norms and residuals are not."""
    packed, half = batch(target, "without").packed, PackedTarget(target, TAPS, "cpu")
    half._is_half = True
    found, wanted = half.taps(packed), packed.taps
    assert wanted is not None
    assert found.dtype == torch.float32
    is_matrix = {value.dim() > 1: value.dtype for value in half._layers.tensors.values()}
    assert is_matrix == {True: torch.bfloat16, False: torch.float32}
    assert 1e-4 < (found - wanted).norm() / wanted.norm() < 0.05


def first_losses(kind: str, target: Path, text: str, folder: Path, device: str = "cpu") -> tuple[list[float], float]:
    """Return the losses of the first steps, and the agreement after them."""
    student = KINDS[kind].new(target, DraftShape(), None, device, TAPS)
    options = TrainOptions(rows=2, length=LENGTH, tokens=1000, warmup=2)
    trainer = Trainer(student, target.parents[1] / text, folder, options, PackedTarget(target, TAPS, device).taps)
    batches = trainer._batches()
    losses = [trainer._step(next(batches)) for _ in range(6)]
    return losses, agreement(student, trainer._packer, samples_of(target, text)).top1


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_training_by_computed_states_is_that_by_stored_ones(kind: str, target: Path, tmp_path: Path) -> None:
    (stored, top1), (computed, same) = (
        first_losses(kind, target, text, tmp_path / text) for text in ("stored", "without")
    )
    assert np.std(stored) > 0.01
    assert computed == pytest.approx(stored, rel=0.01)  # stored states are rounded to 16 bits
    assert same == pytest.approx(top1, abs=0.02)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU of CUDA is here")
@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_training_on_a_gpu_is_that_on_a_cpu(kind: str, target: Path, tmp_path: Path) -> None:
    (here, _), (there, _) = (
        first_losses(kind, target, "without", tmp_path / device, device) for device in ("cpu", "cuda")
    )
    assert there[0] == pytest.approx(here[0], rel=0.03)  # products are bfloat16
    assert there == pytest.approx(here, rel=0.15)


@pytest.fixture
def run(tmp_path: Path) -> DistillOptions:
    target = target_folder(tmp_path / "target", {"num_hidden_layers": 4})
    train = TrainOptions(rows=2, length=64, warmup=2, save_every=1e9)
    options = settings(target, tmp_path / "out", tokens=400, shape=DraftShape(), train=train, stage="text")
    distill(replace(options, shape=DraftShape("1")), silent)
    return replace(options, kind="eagle3", stage="train")


def test_a_head_is_trained_on_any_text_within_a_time(run: DistillOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the budget is for training. A step takes 20 ms by this clock, whatever else the machine does."""
    clock = SimpleNamespace(monotonic=count(0.0, 0.02).__next__, perf_counter=time.perf_counter)
    monkeypatch.setattr(train, "time", clock)
    distill(replace(run, tokens=None, budget=4.0), silent)
    *_, last = read_curve(run.out / "training" / "curve.jsonl")
    assert last["seconds"] == pytest.approx(2.0, rel=0.2)
    assert last["loss"] < 5.0, "less than the log of 272 tokens"
    assert (run.out / "draft" / "model.safetensors").exists()


def test_a_gpus_text_holds_no_states(run: DistillOptions) -> None:
    target = Path(str(run.target))
    for device, stored in (("cpu", (1, 2)), ("cuda:0", ())):
        options = check(replace(run, stage="text", taps=(1, 2), device=device), target)
        assert options.taps == (1, 2)
        assert options.writer.taps == stored
    with pytest.raises(UserError, match="taps is 1,2, and on cuda the text holds none"):
        replace(run, kind="standalone", stage="text", taps=(1, 2), device="cuda")
