"""`outpace distill --kind dspark`: block heads whose training and serving compute the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import block_heads
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from distill_files import check_estimate, head_settings, head_targets, make_draft, silent
from heads import silent_target
from safetensors.numpy import save_file
from safetensors.torch import load_file
from test_distill_heads import TAPS, sample_of

from outpace.core.errors import UserError
from outpace.distill.batches import PackedRows, Packer, TrainingBatch, read_samples
from outpace.distill.draft_shape import DraftShape
from outpace.distill.evaluate import EvaluationOptions
from outpace.distill.kinds import dspark
from outpace.distill.kinds.dspark import BLOCK, DSparkStudent
from outpace.distill.losses import LossOptions
from outpace.distill.options import DistillOptions
from outpace.distill.run import distill, save_evaluation
from outpace.models.load import load_draft, load_model
from outpace.models.runtimes import Loaded


@pytest.fixture(scope="module", params=head_targets("qwen3"))
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DistillOptions:
    """A run after text and training."""
    options = head_settings(
        request.param, tmp_path_factory.mktemp(request.param), kind="dspark", taps=TAPS, shape=DraftShape("2", 120)
    )
    make_draft(options)
    return options


@pytest.fixture(scope="module")
def target(run: DistillOptions) -> Loaded:
    return load_model(run.target, dtype="float32", runtime="llama")


def student_of(run: DistillOptions) -> DSparkStudent:
    """Return the trained head, read from its folder."""
    draft = run.out / "draft"
    return DSparkStudent.new(
        Path(str(run.target)), DraftShape(vocab=120, draft=draft), DSparkStudent.vocab_ids(draft), taps=TAPS
    )


def paths_from(tokens: Sequence[int], anchor: int) -> list[list[int]]:
    """Return the answer's tokens up to each slot of a block, and other paths from the same anchor."""
    true = [[*tokens[anchor : anchor + length]] for length in range(1, BLOCK + 1) if anchor + length <= len(tokens)]
    others = np.random.default_rng(anchor).integers(0, 100, (BLOCK - 1, BLOCK)).tolist()
    return [*true, *([tokens[anchor], *row[:length]] for length, row in enumerate(others, 1))]


@torch.no_grad()
def largest_difference(run: DistillOptions, target: Loaded, student: DSparkStudent) -> float:
    """Return the largest difference between trainer and runtime in the scores and confidence of any slot, for blocks at
    several places of an answer, after its own tokens and after others."""
    model: Any = load_draft(run.out / "draft", target, dtype="float32").model
    tokens, hidden, prompt = sample_of(run)
    count, worst = len(tokens), 0.0
    for anchor in range(prompt, count - 2, 2):
        taps = np.where(np.arange(count)[None, :, None] < anchor, hidden, 0.0).swapaxes(0, 1).reshape(1, count, -1)
        places, zeros = torch.arange(count)[None], torch.zeros(1, count, dtype=torch.long)
        packed = PackedRows(torch.tensor([tokens]), places, zeros, places[0], torch.from_numpy(taps).float())
        outputs = student.blocks(packed, torch.tensor([anchor]))[0, 0]
        session = model.open(count + BLOCK, count + BLOCK)
        session.add_features(model.fuse(torch.from_numpy(hidden[:, :anchor])))
        draft = model.draft([session], [tokens[anchor]])
        for path in paths_from(tokens, anchor):
            slot, before = len(path) - 1, torch.tensor(path[-1:])
            served = draft.layer(0, slot, [path])
            ids = np.arange(student.config.vocab_size) if student.ids is None else student.ids.numpy()
            scores = student.scores(outputs[slot : slot + 1], before)[0].numpy()
            found = np.asarray(served.values)[0] - scores[np.searchsorted(ids, np.asarray(served.ids))]
            confidence = student.confidence(outputs[slot : slot + 1], before)
            assert confidence is not None
            log_odds = float(F.logsigmoid(confidence)) - draft.log_confidence(0, path)
            worst = max(worst, float(np.abs(found).max()), abs(log_odds))
    return worst


def test_training_and_serving_compute_the_same_scores(run: DistillOptions, target: Loaded) -> None:
    assert largest_difference(run, target, student_of(run)) < 1e-4


def slots_reversed(student: Any) -> None:
    blocks = student.blocks
    student.blocks = lambda batch, columns: blocks(batch, columns).flip(2)


def shifted(student: Any) -> None:
    features = student.features
    student.features = lambda batch: features(batch).roll(1, 1)


def without_norm(student: Any) -> None:
    normed = student._normed
    student._normed = lambda x, name: x if name == dspark.FEATURE_NORM else normed(x, name)


def stale(student: Any) -> None:
    """A block does not see the position before its anchor."""
    student.features = lambda batch: DSparkStudent.features(student, cut(batch))


def cut(batch: PackedRows) -> PackedRows:
    assert batch.taps is not None
    known = (batch.taps != 0).any(-1)[0].nonzero().max()
    taps = batch.taps.clone()
    taps[:, known] = taps[:, known - 1]
    return replace(batch, taps=taps)


def taps_reversed(student: Any) -> None:
    features = student.features
    student.features = lambda batch: features(replace(batch, taps=torch.cat(batch.taps.chunk(len(TAPS), -1)[::-1], -1)))


def bias_of_the_token_before(student: Any) -> None:
    scores = student.scores
    student.scores = lambda hidden, before: scores(hidden, (before - 1).clamp_min(0))


MISTAKES = [slots_reversed, shifted, without_norm, stale, taps_reversed, bias_of_the_token_before]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_training_is_far_away(mistake: Callable[[Any], None], run: DistillOptions, target: Loaded) -> None:
    student = student_of(run)
    mistake(student)
    assert largest_difference(run, target, student) > 3e-3


def batch_of(run: DistillOptions, student: DSparkStudent) -> TrainingBatch:
    samples, _ = read_samples(run.out / "text", 64, TAPS)
    packer = Packer(3, 64, student.config.vocab_size, student.ids, student.device)
    return packer.batch(samples, packer.epoch(samples, 0, 0)[0])


def test_a_slots_label_is_the_token_that_it_predicts(run: DistillOptions) -> None:
    """Slot k of a block predicts the token k + 1 places after its anchor, if it is of the same answer."""
    batch, columns = batch_of(run, student_of(run)), torch.arange(1, 64, 4)
    columns = columns[columns < batch.packed.tokens.shape[1]]
    found = dspark._labels_of(batch, columns, BLOCK).view(len(batch.packed.tokens), len(columns), BLOCK)
    scored, length = batch.packed.scored.tolist(), batch.packed.tokens.shape[1]
    answers, kept = batch.labels.answers.tolist(), 0
    for row in range(len(found)):
        for place, column in enumerate(columns.tolist()):
            anchor = row * length + column
            for slot in range(BLOCK):
                number = scored.index(anchor + slot) if anchor + slot in scored and anchor in scored else -1
                if number >= 0 and answers[number] != answers[scored.index(anchor)]:
                    number = -1
                assert found[row, place, slot] == number
                kept += number >= 0
    assert kept > 50


def test_what_is_after_the_anchor_does_not_matter(run: DistillOptions) -> None:
    """Neither do other sequences of the row."""
    student, batch = student_of(run), batch_of(run, student_of(run)).packed
    assert batch.taps is not None
    column = torch.tensor([20])
    is_seen = (torch.arange(batch.tokens.shape[1]) < 20) & (batch.sequences == batch.sequences[:, column])
    changed = replace(batch, taps=torch.where(is_seen[..., None], batch.taps, torch.randn_like(batch.taps)))
    with torch.no_grad():
        before, after = student.blocks(batch, column), student.blocks(changed, column)
        other = student.blocks(replace(batch, taps=torch.randn_like(batch.taps)), column)
    assert torch.allclose(before, after, atol=1e-5)
    assert (before - other).abs().max() > 0.1


def test_the_confidence_learns_the_chance_of_acceptance(run: DistillOptions) -> None:
    """After some steps it is nearer than one half."""
    student, batch = student_of(run), batch_of(run, student_of(run))
    optimizer = torch.optim.Adam([student.tensors[name] for name in (dspark.WEIGHT, dspark.BIAS)], 0.05)
    for _ in range(30):
        optimizer.zero_grad()
        loss = student.loss(batch, LossOptions(1.0, 1.0))
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        columns = torch.arange(batch.num_tokens % dspark.STRIDE, batch.packed.tokens.shape[1], dspark.STRIDE)
        found = dspark._labels_of(batch, columns, BLOCK)
        kept = (found >= 0).nonzero().squeeze(1)
        hidden, before = (
            student.blocks(batch.packed, columns).flatten(0, 2)[kept],
            dspark._tokens_before(batch, found[kept]),
        )
        log_q = student.scores(hidden, before).log_softmax(-1)
        chance = 1 - dspark.total_variation(log_q, batch.labels[found[kept]])
        score = student.confidence(hidden, before)
    assert score is not None
    assert float((score.sigmoid() - chance).abs().mean()) < 0.7 * float((chance - 0.5).abs().mean())


def test_the_text_stays_the_same_and_the_estimate_is_right(run: DistillOptions) -> None:
    check_estimate(run, student_of(run), "block")


def test_a_head_is_evaluated_by_the_time_of_a_block(run: DistillOptions) -> None:
    evaluation = EvaluationOptions(prompts=3, max_tokens=8)
    found = distill(replace(run, stage="judge", tasks=run.prompts, evaluation=evaluation), silent)
    assert found is not None
    assert found.speed.drafts_blocks
    assert all(row.chain >= 1.0 for row in found.rows)
    save_evaluation(run, found)
    card = (run.out / "draft" / "README.md").read_text()
    assert "layers: [1, 3, 4]" in card
    assert "draft block" in card


def test_training_goes_on_from_a_head(run: DistillOptions, tmp_path: Path) -> None:
    """It keeps the head's taps, block, mask token and vocabulary; text without hidden states will do."""
    shape = DSparkStudent.shape_from_options("3", str(run.out / "draft"), 0, None)
    text = replace(run, kind="standalone", shape=DraftShape("1"), taps=None, out=tmp_path / "out", stage="text")
    distill(text, silent)
    train = replace(run.train, tokens=300)
    distill(replace(run, out=text.out, shape=shape, stage="train", train=train, taps=None), silent)
    before, after = (load_file(folder / "draft" / "model.safetensors") for folder in (run.out, text.out))
    assert before.keys() == after.keys()
    assert torch.equal(before["d2t"], after["d2t"])
    assert 0 < (before["fc.weight"] - after["fc.weight"]).abs().max() < 0.1
    configs = [(folder / "draft" / "config.json").read_text() for folder in (run.out, text.out)]
    for name in ("block_size", "mask_token_id", "aux_hidden_state_layer_ids", "markov_rank"):
        assert configs[0].split(f'"{name}"')[1].split('"')[0] == configs[1].split(f'"{name}"')[1].split('"')[0]
    with pytest.raises(UserError, match="leave out --layers"):
        DSparkStudent.shape_from_options("2", str(run.out / "draft"), 0, None)
    with pytest.raises(UserError, match="folder of a DSpark head"):
        DSparkStudent.shape_from_options("3", str(run.target), 0, None)


@pytest.mark.parametrize("layout", ["speculators", "z-lab"])
def test_a_public_head_goes_on_by_the_formulas(layout: str, tmp_path: Path) -> None:
    """It keeps its own embedding and output layer, which differ from the target's; other variants are refused."""
    target, weights = silent_target(tmp_path, "target")
    save_file(weights, target / "model.safetensors")
    config = block_heads.block_config(**block_heads.DSPARK)
    head = block_heads.write_block(tmp_path / "head", layout, **block_heads.DSPARK)
    shape = DSparkStudent.shape_from_options("3", str(head), 0, None)
    student = DSparkStudent.new(target, shape, DSparkStudent.vocab_ids(head), taps=block_heads.TAPS)
    student.write(tmp_path / "again", target, shape, {})
    hidden = np.random.default_rng(0).standard_normal((3, 9, block_heads.WIDTH)).astype(np.float32)
    known = torch.from_numpy(np.pad(hidden, ((0, 0), (0, 1), (0, 0))).swapaxes(0, 1).reshape(1, 10, -1))
    text = torch.arange(40, 50)[None]
    packed = PackedRows(text, torch.arange(10)[None], torch.zeros_like(text), torch.arange(10), known)
    reference = block_heads.BlockReference(config, block_heads.block_tensors(config))
    again = DSparkStudent.new(target, replace(shape, draft=tmp_path / "again"), student.ids, taps=block_heads.TAPS)
    for found, bound in ((student, 1e-4), (again, 0.3)):  # the second was rounded to bfloat16
        with torch.no_grad():
            outputs = found.blocks(packed, torch.tensor([9]))[0, 0]
            for path in ([49], [49, 7, 200]):
                slot, before = len(path) - 1, torch.tensor(path[-1:])
                wanted, confidence = reference.below(hidden, path)
                scores, odds = found.scores(outputs[slot][None], before), found.confidence(outputs[slot][None], before)
                assert np.abs(scores[0].numpy() - wanted).max() < bound
                assert odds is not None
                assert float(odds.sigmoid()) == pytest.approx(confidence, abs=bound / 10)
    for changes in ({"markov_head_type": "gated"}, {"sample_from_anchor": False}, {"is_causal": True}):
        other = block_heads.write_block(tmp_path / str(changes), "z-lab", **block_heads.DSPARK | changes)
        with pytest.raises(UserError, match="such heads are not trained"):
            DSparkStudent.new(target, replace(shape, draft=other), student.ids, taps=block_heads.TAPS)
