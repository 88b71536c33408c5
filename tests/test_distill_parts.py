"""Checkpoints and drafts that are written in parts of a bounded size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from distill_files import settings, silent, target_folder

from outpace.core.errors import UserError
from outpace.distill.run import distill
from outpace.distill.start import DraftShape, new_student
from outpace.distill.train import Trainer, TrainOptions
from outpace.models.files.checkpoint import Checkpoint
from outpace.models.files.packed import pack, unpack
from outpace.models.load import load_draft, load_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target_folder(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def text(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "out"
    distill(settings(target, out, stage="text", tokens=1500), silent)
    return out / "text"


def test_a_checkpoint_in_parts_is_gone_on_with(target: Path, text: Path, tmp_path: Path) -> None:
    """Parts of a bounded size hold what one file holds; the parts of the checkpoint before them go."""
    most = 60_000

    def trainer(folder: Path, part_bytes: int | None, tokens: int) -> Trainer:
        student = new_student(target, DraftShape(layers="0,1"), None, 0)
        options = TrainOptions(rows=2, length=64, warmup=3, tokens=tokens, save_every=1e9, part_bytes=part_bytes)
        return Trainer(student, text, folder, options)

    whole = trainer(tmp_path / "whole", None, 1500)
    whole.run(lambda figures: None)
    folder = tmp_path / "parts"
    for tokens in (500, 1000):  # two checkpoints
        part = trainer(folder, most, tokens)
        part.resume()
        part.state.total = 1500  # as the learning rate has it
        part.options = replace(part.options, tokens=None, seconds=None)
        with pytest.raises(KeyboardInterrupt):
            part.run(_until(part, tokens))
        part.checkpoint(1.0, lambda figures: None, lambda student: None)
    weights = sorted(folder.glob("training*.safetensors"))
    assert len(weights) > 2
    assert all(file.name.startswith(f"training-{part.state.step}-0") for file in weights)
    assert all(file.stat().st_size <= most for file in weights)
    last = trainer(folder, None, 1500)
    assert last.resume()
    last.run(lambda figures: None)
    assert [file.name for file in folder.glob("training*")] == ["training.safetensors"]
    for name, value in whole.student.tensors.items():
        assert torch.equal(value, last.student.tensors[name]), name
    part.checkpoint(1.0, lambda figures: None, lambda student: None)
    next(folder.glob("training-*-00002-*")).unlink()
    with pytest.raises(UserError, match=r"training-\d+-00002-of-.* is not a whole checkpoint"):
        trainer(folder, most, 1500).resume()


def _until(trainer: Trainer, tokens: int) -> Callable[[dict[str, float]], None]:
    def report(figures: dict[str, float]) -> None:
        if trainer.state.seen >= tokens:
            raise KeyboardInterrupt

    return report


def test_a_draft_in_parts_loads_and_packs(target: Path, tmp_path: Path) -> None:
    options = settings(target, tmp_path / "out", tokens=300)
    options = replace(options, train=replace(options.train, tokens=200, part_bytes=40_000))
    distill(replace(options, stage="text"), silent)
    distill(replace(options, stage="train"), silent)
    draft = options.out / "draft"
    assert len(list(draft.glob("model-0*.safetensors"))) > 1
    assert not (draft / "model.safetensors").exists()
    assert load_draft(str(draft), load_model(str(target))).model.vocab_size
    pack(draft, target, tmp_path / "packed")
    assert not list((tmp_path / "packed").glob("model-0*"))
    unpack(tmp_path / "packed", target, tmp_path / "whole")
    with Checkpoint.open(draft) as ours, Checkpoint.open(tmp_path / "whole") as again:
        assert ours.names() == again.names()
        assert all(torch.equal(ours.tensor(name), again.tensor(name)) for name in ours.names())


def test_parts_too_small_for_a_tensor_are_refused_before_text_is_written(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outpace.distill.text.load_model", None)
    options = settings(target, tmp_path / "out", tokens=300)
    with pytest.raises(UserError, match=r"part_size is 0\.009 MB, weight model\.\S+ alone needs 0\.01\d* MB in a file"):
        distill(replace(options, train=replace(options.train, part_bytes=9_000)), silent)
