"""`outpace distill --kind specformer`: training and serving compute the same scores, and training goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distill_files import check_estimate, head_settings, head_targets, make_draft, silent
from safetensors.torch import load_file

from outpace.core.errors import UserError
from outpace.distill import evaluate
from outpace.distill.batches import PackedRows, Packer, read_samples
from outpace.distill.draft_shape import DraftShape
from outpace.distill.kinds.specformer import (
    SLOTS,
    SpecFormerStudent,
)
from outpace.distill.losses import LossOptions, loss
from outpace.distill.options import DistillOptions
from outpace.distill.run import distill
from outpace.models.base import chain
from outpace.models.load import load_draft, load_model
from outpace.models.runtimes import Loaded

TAPS = SpecFormerStudent.default_taps(4)


@pytest.fixture(scope="module", params=head_targets("gemma3"))
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DistillOptions:
    """A run after text and training."""
    options = head_settings(request.param, tmp_path_factory.mktemp(request.param), kind="specformer")
    make_draft(options)
    return options


@pytest.fixture(scope="module")
def target(run: DistillOptions) -> Loaded:
    return load_model(run.target, dtype="float32", runtime="llama")


def student_of(run: DistillOptions) -> SpecFormerStudent:
    """Return the trained head, read from its folder."""
    draft = run.out / "draft"
    return SpecFormerStudent.new(
        Path(str(run.target)), DraftShape(vocab=120, draft=draft), SpecFormerStudent.vocab_ids(draft), taps=TAPS
    )


def largest_difference(run: DistillOptions, target: Loaded, student: SpecFormerStudent) -> float:
    """Return the largest difference between the scores of trainer and runtime: of every slot, at each position of an
    answer, which the trainer computes in one batch."""
    model: Any = load_draft(run.out / "draft", target, dtype="float32").model
    samples, _ = read_samples(run.out / "text", 64, TAPS)
    sample = max(samples, key=lambda one: len(one.tokens))
    assert sample.taps is not None
    assert student.ids is not None
    tokens, taps = sample.tokens.tolist(), torch.from_numpy(sample.taps.read())
    hidden, worst = taps.unflatten(1, (len(TAPS), -1)).transpose(0, 1), 0.0
    places = torch.arange(sample.prompt - 1, len(tokens) - 2)
    order, zeros = torch.arange(len(tokens))[None], torch.zeros(1, len(tokens), dtype=torch.long)
    with torch.no_grad():
        wanted = student._scores(
            student.slots(PackedRows(torch.tensor([tokens]), order, zeros, places, taps[None]), places)
        )
    for number, place in enumerate(places.tolist()):
        session = model.open(len(tokens) + 8, 8 + len(tokens))
        session.add_features(model.fuse(hidden[:, : place + 1]))
        found = model.score_sparse([chain(session, tokens[1 : place + 2], [place])]).to_dense()[:, student.ids]
        worst = max(worst, float((found - wanted[number]).abs().max()))
    assert wanted.std(-1).min() > 0.01
    return worst


def test_training_and_serving_compute_the_same_scores(run: DistillOptions, target: Loaded) -> None:
    assert largest_difference(run, target, student_of(run)) < 1e-4


def change_taps(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    """Return a mistake in the hidden states [rows, length, taps, width] that the trainer reads."""

    def mistake(student: Any) -> None:
        normed = student.normed_taps

        def changed(taps: torch.Tensor) -> torch.Tensor:
            return normed(change(taps.unflatten(2, (len(TAPS), -1))).flatten(2))  # type: ignore[no-any-return]

        student.normed_taps = changed

    return mistake


def without_norm(name: str) -> Callable[[Any], None]:
    def mistake(student: Any) -> None:
        normed = student._normed
        student._normed = lambda x, weight: x if weight == f"{name}.weight" else normed(x, weight)

    return mistake


def shift_tokens(student: Any) -> None:
    embedded = student.embedded
    student.embedded = lambda batch: embedded(replace(batch, tokens=batch.tokens.roll(1, 1)))


def forget_tokens(student: Any) -> None:
    embedded = student.embedded
    student.embedded = lambda batch: 0.0 * embedded(batch)


def reverse_slots(student: Any) -> None:
    slots = student.slots
    student.slots = lambda batch, places: slots(batch, places).flip(1)


MISTAKES = {
    "tap off by one": change_taps(lambda taps: taps.roll(1, 2)),
    "stale features": change_taps(lambda taps: taps.roll(1, 1)),
    "tokens shifted by one": shift_tokens,
    "no embedding": forget_tokens,
    "slots in another order": reverse_slots,
    **{
        f"no {name}": without_norm(name)
        for name in ("fc_norm.2", "embed_norm", "hidden_norm", "layers.0.input_layernorm")
    },
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_training_is_far_away(mistake: str, run: DistillOptions, target: Loaded) -> None:
    student = student_of(run)
    MISTAKES[mistake](student)
    assert largest_difference(run, target, student) > 3e-3


def test_the_loss_is_the_weighted_mean_over_the_slots(run: DistillOptions) -> None:
    """The same by a loop over positions: slot i is compared with the label i positions later, in the same answer."""
    student, options = student_of(run), LossOptions()
    samples, _ = read_samples(run.out / "text", 64, TAPS)
    samples = sorted(samples, key=lambda one: -len(one.top_ids))[:3]
    batch = Packer(2, 64, student.config.vocab_size, student.ids, student.device).batch(samples, [[0], [1, 2]])
    total = weights = 0.0
    with torch.no_grad():
        for slot in range(SLOTS):
            rows = []
            for row, answer in enumerate(batch.labels.answers.tolist()):
                last = row + slot
                is_root = row > 0 and batch.labels.answers[row - 1] == answer
                if is_root and last < len(batch.labels.answers) and batch.labels.answers[last] == answer:
                    rows.append(row)
            if rows:
                outputs = student.slots(batch.packed, batch.packed.scored[rows] - 1)[:, slot]
                total += 0.8**slot * float(
                    loss(student._scores(outputs), batch.labels[torch.tensor(rows) + slot], options)
                )
                weights += 0.8**slot
        assert float(student.loss(batch, options)) == pytest.approx(total / weights, rel=1e-5)


def test_the_text_stays_the_same_and_the_estimate_is_right(run: DistillOptions) -> None:
    check_estimate(run, student_of(run), "specformer")


def test_a_head_is_evaluated_by_the_time_of_all_slots(run: DistillOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "CONTEXT", 16)  # as for a target of short texts
    evaluation = evaluate.EvaluationOptions(prompts=3, max_tokens=8)
    found = distill(replace(run, stage="judge", tasks=run.prompts, evaluation=evaluation), silent)
    assert found is not None
    assert found.speed.drafts_blocks
    assert all(row.chain >= 1.0 for row in found.rows)


def test_training_goes_on_from_a_head(run: DistillOptions, tmp_path: Path) -> None:
    """It keeps the head's taps and vocabulary. What does not fit is refused by name."""
    shape = SpecFormerStudent.shape_from_options("3", str(run.out / "draft"), 0, None)
    assert shape.vocab == 120
    shutil.copytree(run.out / "text", tmp_path / "out" / "text")
    again = replace(run, out=tmp_path / "out", shape=shape, stage="train", train=replace(run.train, tokens=300))
    distill(again, silent)
    before, after = (load_file(folder / "draft" / "model.safetensors") for folder in (run.out, again.out))
    assert before.keys() == after.keys()
    assert torch.equal(before["d2t"], after["d2t"])
    assert 0 < (before["fc.weight"] - after["fc.weight"]).abs().max() < 0.1
    with pytest.raises(UserError, match="reads the layers 0,2,3,4, not 0,2,4: name --taps 0,2,3,4"):
        distill(replace(again, taps=(0, 2, 4)), silent)
    for options, says in (
        (("2", "layers", 0), "--layers is 2, and a head of the kind specformer has two layers"),
        (("3", str(run.target), 0), "the kind specformer it must be layers or the folder of a SpecFormer head"),
        (("3", str(run.out / "draft"), 50), "leave out --vocab"),
    ):
        with pytest.raises(UserError, match=says):
            SpecFormerStudent.shape_from_options(*options, None)


def test_a_head_of_another_target_is_refused(run: DistillOptions, tmp_path: Path) -> None:
    head = tmp_path / "head"
    shutil.copytree(run.out / "draft", head)
    config = json.loads((head / "config.json").read_text())
    assert config["outpace"].keys() == {"weights", "tokenizer", "template", "runtime"}
    target = load_model(run.target)
    own = str(load_draft(head, target).notice)
    assert "hidden states" not in own
    assert "ignored" not in own  # all of its fields are known
    (head / "config.json").write_text(json.dumps(config | {"outpace": config["outpace"] | {"weights": "others"}}))
    assert "hidden states of other weights" in str(load_draft(head, target).notice)
    (head / "config.json").write_text(json.dumps(config | {"outpace": config["outpace"] | {"tokenizer": "another"}}))
    with pytest.raises(UserError, match="another tokenizer"):
        load_draft(head, target)
    assert np.isfinite(load_file(head / "model.safetensors")["slots.weight"].float().numpy()).all()
