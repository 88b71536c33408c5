"""`outpace distill`, the later stages: the draft that is trained, how it is resumed, written, loaded and judged."""

from __future__ import annotations

import json
import math
import shutil
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import reference
import torch
from distill_files import make_draft, settings, silent
from distill_files import target as target
from doubles import QuickToy
from test_work import Waits

from outpace.core.errors import UserError
from outpace.distill.batches import Labels, Packer, read_samples
from outpace.distill.draft_shape import VOCAB_FILE, DraftShape, read_vocab_ids
from outpace.distill.evaluate import (
    MIN_ROUNDS,
    POSITIONS,
    Acceptance,
    Evaluation,
    EvaluationOptions,
    ModelTimes,
    _timed_pass,
    predicted_speedups,
    reliable_rates,
)
from outpace.distill.losses import LossOptions, loss
from outpace.distill.run import distill, save_evaluation, write_plot
from outpace.distill.student import Student
from outpace.distill.train import MOMENTS, Trainer, TrainOptions, load_state, read_curve, save_state
from outpace.models.files.checkpoint import Checkpoint
from outpace.models.llama.config.llama_config import from_dict
from outpace.models.load import load_draft, load_model


@pytest.fixture(scope="module")
def made(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder after text and training."""
    return make_draft(settings(target, tmp_path_factory.mktemp("run") / "out")).parent


def test_a_run_from_zero_learns(made: Path) -> None:
    (point,) = read_curve(made / "training" / "curve.jsonl")
    assert point["tokens"] >= 3000
    untrained = 1 / 120
    assert point["top1"] > 5 * untrained
    assert point["chain"] > 1.0


def test_interrupted_and_resumed_equals_uninterrupted(target: Path, made: Path, tmp_path: Path) -> None:
    """Bit by bit, on one thread: weights, moments and the learning curve's last point."""

    def trainer(folder: Path) -> Trainer:
        student = Student.new(target, DraftShape(layers="0,1"), None)
        options = TrainOptions(rows=2, length=64, warmup=3, tokens=2500, save_every=1e9)
        return Trainer(student, made / "text", folder, options)

    whole = trainer(tmp_path / "whole")
    whole.run(lambda figures: None)

    def interrupt_at(step: int) -> Callable[[dict[str, float]], None]:
        def report(figures: dict[str, float]) -> None:
            if figures["step"] == step:
                raise KeyboardInterrupt

        return report

    for stop in (7, 21):
        part = trainer(tmp_path / "parts")
        assert part.resume() == (stop > 7)
        saving = replace(part.options, save_every=0.0) if stop == 7 else part.options
        part.options = saving
        with pytest.raises(KeyboardInterrupt):
            part.run(interrupt_at(stop))
    last = trainer(tmp_path / "parts")
    assert last.resume()
    assert 0 < last.state.step < 21
    last.run(lambda figures: None)
    assert last.state.step == whole.state.step
    for name, value in whole.student.tensors.items():
        assert torch.equal(value, last.student.tensors[name]), name
    ends = [read_curve(tmp_path / name / "curve.jsonl")[-1] for name in ("whole", "parts")]
    assert ends[0]["top1"] == ends[1]["top1"]


def test_a_finished_run_that_is_started_again_changes_nothing(target: Path, tmp_path: Path) -> None:
    """No loss that was never measured, no second point of one step, and no batch that is passed over later."""
    options = settings(target, tmp_path / "out", tokens=300, train=TrainOptions(rows=2, length=64, tokens=200))
    distill(replace(options, stage="text"), silent)
    told: list[dict[str, float]] = []
    for _ in range(3):
        told.clear()
        distill(replace(options, stage="train"), lambda stage, figures: told.append(figures))
        shutil.rmtree(options.out / "draft")
        (point,) = read_curve(options.out / "training" / "curve.jsonl")
    assert told, "the progress is reported nevertheless"
    assert not any("loss" in figures for figures in told)
    assert point["loss"] > 0

    def on(folder: Path, tokens: int) -> Trainer:
        student = Student.new(target, options.shape, read_vocab_ids(options.out / "training" / VOCAB_FILE))
        trainer = Trainer(student, options.out / "text", folder, replace(options.train, tokens=tokens))
        trainer.resume()
        trainer.run(lambda figures: None)
        return trainer

    whole = on(tmp_path / "whole", 400)
    for tokens in (200, 200, 400):
        parts = on(tmp_path / "parts", tokens)
    assert parts.state.seen == whole.state.seen


def test_another_draft_in_the_folder_is_refused_before_text_is_written(
    target: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outpace.distill.text.load_model", None)
    with pytest.raises(UserError, match=r"another shape: model\.layers\.1\.\S+ is \[\d+.*\] in it and missing in this"):
        distill(settings(target, made, shape=DraftShape("1", vocab=120), tokens=10**9), silent)
    with pytest.raises(UserError, match="holds a draft of 120 tokens, not 90"):
        distill(settings(target, made, shape=DraftShape("0,1", vocab=90), tokens=10**9), silent)


def test_an_evaluation_that_cannot_be_saved_is_an_error(target: Path, made: Path, tmp_path: Path) -> None:
    found = Evaluation("t", "d", (), ModelTimes(0.1, {1: 1.0}))
    with pytest.raises(UserError, match="the judgement cannot be written to"):
        save_evaluation(settings(target, tmp_path / "gone"), found)


def test_a_torn_checkpoint_and_too_short_a_time_are_errors(target: Path, made: Path, tmp_path: Path) -> None:
    student = Student.new(target, DraftShape("2"), None)
    trainer = Trainer(student, made / "text", tmp_path, TrainOptions(seconds=1e-6, length=64))
    with pytest.raises(UserError, match="is too short: 1 steps took"):
        trainer.run(lambda figures: None)
    (tmp_path / "training.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match="is not a whole checkpoint"):
        trainer.resume()


def test_a_curve_that_was_cut_off_or_cannot_be_written(target: Path, made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "training", tmp_path / "out")
    curve = tmp_path / "out" / "curve.jsonl"
    points = read_curve(curve)
    curve.write_text(curve.read_text() + '{"step": 90, "los')
    student = Student.new(target, DraftShape("0,1", vocab=120), read_vocab_ids(tmp_path / "out" / VOCAB_FILE))
    trainer = Trainer(student, made / "text", tmp_path / "out", TrainOptions(tokens=3000, length=64))
    assert trainer.resume()
    assert read_curve(curve) == points
    curve.unlink()
    curve.mkdir()
    with pytest.raises(UserError, match=r"curve.jsonl cannot be written \(Is a directory\); the draft is saved"):
        trainer.checkpoint(1.0, lambda figures: None, lambda student: None)


def test_the_written_draft_equals_the_student(target: Path, made: Path) -> None:
    """The folder holds a plain Llama: its scores, by the reference, are those that were trained."""
    ids = read_vocab_ids(made / "draft" / VOCAB_FILE)
    with Checkpoint.open(made / "draft") as draft:
        config = from_dict(draft.config)
        assert draft.config["outpace"] == {"target_layers": [0, 1], "draft_window": 128, "draft_vocab_size": 120}
        tokens = [5, 80, 9, 200, 33]
        expected = reference.logits(config, draft.tensor, tokens)[:, ids]
        student = Student(config, {name: draft.tensor(name).float() for name in draft.names()}, ids)
    packer = Packer(1, 16, 272, ids, torch.device("cpu"))
    samples, _ = read_samples(made / "text", 64)
    batch = packer.batch([replace(samples[0], tokens=torch.tensor(tokens).int().numpy(), prompt=1)], [[0]])
    found = student.logits(batch.packed)
    assert torch.allclose(found.double(), expected[: len(tokens) - 1], atol=2e-4)


def test_packed_samples_do_not_see_one_another(target: Path, made: Path) -> None:
    samples, _ = read_samples(made / "text", 64)
    student = Student.new(target, DraftShape("2"), None)
    packer = Packer(2, 128, 272, None, torch.device("cpu"))
    (rows, *_) = packer.epoch(samples, 0, 0)
    assert len(rows[0]) > 1
    together = student.logits(packer.batch(samples, rows).packed)
    alone = [student.logits(packer.batch(samples, [[number]]).packed) for row in rows for number in row]
    assert torch.allclose(together, torch.cat(alone), atol=1e-4)


class Elsewhere(torch.Tensor):
    """A tensor as one on a GPU is: numpy cannot have its memory."""

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def cpu(self, *given: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def test_a_drafts_own_tokens_may_lie_on_a_gpu(made: Path) -> None:
    samples, _ = read_samples(made / "text", 64)
    ids = torch.arange(0, 272, 2)
    here, there = (Packer(2, 64, 272, one, torch.device("cpu")) for one in (ids, ids.as_subclass(Elsewhere)))
    assert torch.equal(here.batch(samples, [[0]]).labels.top, there.batch(samples, [[0]]).labels.top)


def test_a_loaded_state_is_on_the_device_of_its_weights(tmp_path: Path) -> None:
    """The steps too, which the optimizer's fused kernel reads on the device; the meta device plays its part."""
    saved: Any = SimpleNamespace(state=defaultdict(dict))
    save_state(tmp_path, {"w": torch.ones(3, 2)}, saved, {"step": 5})
    weight, loaded = torch.ones(3, 2, device="meta"), SimpleNamespace(state=defaultdict(dict))
    assert load_state(tmp_path, {"w": weight}, loaded) == {"step": 5}  # type: ignore[arg-type]
    assert {name: value.device.type for name, value in loaded.state[weight].items()} == dict.fromkeys(
        ("step", *MOMENTS), "meta"
    )


def test_an_epoch_holds_every_sample_once(made: Path) -> None:
    samples, _ = read_samples(made / "text", 64)
    packer = Packer(3, 64, 272, None, torch.device("cpu"))
    first, again, other = (packer.epoch(samples, seed, epoch) for seed, epoch in ((0, 1), (0, 1), (0, 2)))
    assert sorted(n for batch in first for row in batch for n in row) == list(range(len(samples)))
    assert first == again != other
    assert all(sum(len(samples[n].tokens) for n in row) <= 64 for batch in first for row in batch)


def test_the_loss_by_hand() -> None:
    """One position, four tokens, two stored ones; one of them is not in the draft's vocabulary; in plain Python."""
    logits = [0.3, -1.2, 0.8, 0.1]
    z = sum(math.exp(value) for value in logits)
    q = [math.exp(value) / z for value in logits]
    p_known, p_unknown = 0.5, 0.3
    rest = 1 - p_known - p_unknown
    p = [p_known / (p_known + rest), rest / (p_known + rest)]
    expected = 2.0 * sum(a * math.log(a / b) for a, b in zip(p, [q[2], 1 - q[2]], strict=True))
    for token, cross_entropy in ((1, -math.log(q[1])), (-1, 0.0)):
        labels = Labels(*map(torch.tensor, ([token], [[2, -1]], [[p_known, p_unknown]], [0])))
        found = loss(torch.tensor([logits]), labels, LossOptions(0.25, 2.0))
        assert float(found) == pytest.approx(0.25 * cross_entropy + expected, abs=1e-5)


def test_predicted_speedups_by_hand() -> None:
    speed = ModelTimes(0.1, {1: 1.0, **{rows: 1.0 + 0.1 * rows for rows in range(2, 10)}})
    rows = [Acceptance("t", 0.0, 2.0, 2.5, (0.8, 0.5), 100), Acceptance("t", 0.8, 1.0, 1.0, (0.1,), 100)]
    found = predicted_speedups(rows, speed)
    assert found[1] == pytest.approx(1.8 / (0.1 + 1.2))
    assert found[2] == pytest.approx((1.8 + 0.4) / (0.2 + 1.3))
    assert found[3] == pytest.approx(2.2 / (0.3 + 1.4))


def test_a_timed_pass_is_one_that_the_device_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock counts how often the host has waited for scores."""
    with Waits() as waits:
        timed = _timed_pass(QuickToy(16, 3, 0), 4)
        monkeypatch.setattr("outpace.distill.evaluate.time.perf_counter", lambda: waits.count)
        assert [timed() for _ in range(3)] == [1, 1, 1]


def test_acceptance_is_reported_for_positions_that_enough_rounds_reached() -> None:
    assert reliable_rates(((100, 50), (50, 20), (20, 20), (20, 10))) == pytest.approx([0.5, 0.4, 1.0, 0.5])
    assert reliable_rates(((20, 5), (MIN_ROUNDS, 5), (MIN_ROUNDS - 1, 1))) == (0.25, 0.5)
    assert reliable_rates(((100, 0),)) == (0.0,)


def test_transformers_loads_the_draft(made: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(made / "draft", dtype=torch.float32).eval()
    with Checkpoint.open(made / "draft") as draft:
        expected = reference.logits(from_dict(draft.config), draft.tensor, [5, 80, 9, 200])
    with torch.no_grad():
        found = model(torch.tensor([[5, 80, 9, 200]])).logits[0]
    assert torch.allclose(found.double(), expected, atol=2e-4)


def test_judgement_and_its_files(target: Path, made: Path) -> None:
    tasks, evaluation = [str(made.parent / "asked.jsonl")], EvaluationOptions(prompts=24, max_tokens=64)
    options = settings(target, made, stage="judge", tasks=tasks, evaluation=evaluation)
    found = distill(options, silent)
    assert found is not None
    save_evaluation(options, found)
    assert {row.temperature for row in found.rows} == {0.0, 0.8}
    assert all(1.0 <= row.chain <= 5.0 and row.chain <= row.tree + 0.3 for row in found.rows)
    assert all(4 <= len(row.by_position) <= POSITIONS and row.prompts == 24 for row in found.rows)
    own = load_model(str(target))
    drafts = load_draft(str(made / "draft"), own).precision
    assert f", target: weights in {own.precision}, draft: weights in {drafts}, threads" in found.where
    assert set(found.predicted) == set(range(1, POSITIONS + 1))
    assert json.loads((made / "judgement.json").read_text())["cost"] > 0
    assert "chain 4" in (made / "draft" / "README.md").read_text()
    assert write_plot(settings(target, made), found).stat().st_size > 10_000


def test_a_time_budget_becomes_tokens_after_the_first_steps(target: Path, made: Path, tmp_path: Path) -> None:
    """The first steps, which compile and warm up, say nothing of the others."""
    student = Student.new(target, DraftShape("2"), None)
    trainer = Trainer(student, made / "text", tmp_path, TrainOptions(seconds=100.0, length=64))
    seconds = 0.0
    for step in range(1, 40):
        seconds += 5.0 if step <= 3 else 0.5
        trainer.state.seen += 1000
        trainer._plan(seconds, step)
        if trainer.state.total:
            break
    assert seconds == 15.0 + 0.5 * 6
    assert trainer.state.total == 9000 + 2000 * (100 - 18)
