"""What `outpace distill` trains: the kind, the layers or the draft to start from, and which draft is the fastest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from distill_files import pack, prompts_file, run_command, target_folder
from distill_files import target as target
from turns import one_of

from outpace.core.errors import UserError
from outpace.distill import run
from outpace.distill.batches import read_samples
from outpace.distill.draft_shape import (
    DraftShape,
    draft_config,
    pick_layers,
    save_vocab_ids,
)
from outpace.distill.evaluate import PLAIN, STEERED_DRAFT, TRAINED, tokens_per_second, verdict
from outpace.distill.run import choose_kind
from outpace.distill.student import EMBEDDING, Student
from outpace.models.files.checkpoint import read_json
from outpace.models.files.pairs import SHIPPED_FOLDER
from outpace.models.heads.config import STEERING
from outpace.models.load import load_draft, load_model

SHIPPED = "SmolLM2-135M-Instruct"


@pytest.mark.parametrize(
    ("known", "device", "name", "kind"),
    [
        (None, "cpu", "another", "standalone"),
        (None, "cpu", SHIPPED, "steered"),
        (None, "cuda:1", SHIPPED, "eagle3"),
        ("dspark", "cpu", SHIPPED, "dspark"),
        (3, "cpu", SHIPPED, "3"),  # refused by name later
    ],
)
def test_the_kind_depends_on_the_run_the_device_and_the_target(
    tmp_path: Path, known: Any, device: str, name: str, kind: str
) -> None:
    if known:
        (tmp_path / "run.json").write_text(json.dumps({"kind": known}))
    chosen = choose_kind(tmp_path, device, name)
    assert chosen.kind == kind
    assert chosen.steers == (kind == "standalone")
    assert chosen.why
    assert choose_kind(tmp_path, device, name, is_open=False)[:2] == (kind if known else "standalone", False)


@pytest.mark.parametrize("steered", one_of(2, [2.0, 0.5]))
def test_a_draft_is_steered_if_that_is_faster(
    steered: float, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One command trains a draft and its steering, and ends with advice; the same command again changes nothing."""
    measured = list[list[str]]()

    def stated(target: object, drafts: dict[str, Any], *_: object) -> dict[str, float]:
        measured.append([one.drafter for one in drafts.values()])
        return {PLAIN: 0.1, **dict.fromkeys(drafts, 1.0), STEERED_DRAFT: steered}

    monkeypatch.setattr(run, "tokens_per_second", stated)
    target = target_folder(tmp_path / "target", {"num_hidden_layers": 3})
    out, asked = tmp_path / "out", prompts_file(tmp_path / "asked.jsonl", 300)
    given = ["--target", target, "--prompts", asked, "--answer-tokens", 8, "--rows", 32, "--judged", 2]
    given += ["--length", 64, "--epochs", 1, "--tokens", 200, "--out", out]
    for _ in range(2):
        assert run_command(*given) == 0
        said = capsys.readouterr().err
        assert "kind: standalone and a steering of it, because " in said
        assert f"on held-out prompts: {PLAIN} 0.1" in said
        assert f"; use --draft {out / 'draft'}" in said.replace("\n", "")
        assert (out / "draft" / STEERING).is_file() == (steered > 1.0)
    assert run_command(*given, "--stage", "train") == 0
    assert json.loads((out / "run.json").read_text())["steers"] is True, "a stage alone keeps what was chosen"
    assert measured == [["model", "steered"]] * 2
    saved = json.loads((out / run.EVALUATION).read_text())
    assert list(saved["tokens_per_second"]) == [PLAIN, TRAINED, STEERED_DRAFT]
    assert all(sample.taps is not None for sample in read_samples(out / "text", 64, (0, 1, 2))[0])
    assert run_command(*given, "--stage", "judge") == 0
    assert "tokens/s by" not in capsys.readouterr().err, "another command compares nothing"
    (out / "run.json").write_text(json.dumps({"kind": "specformer"}))
    assert run_command(*given, "--stage", "train") == 2
    said = capsys.readouterr().err
    assert "kind: specformer, because" in said
    assert "is a checkpoint of another shape" in said


def test_speeds_are_those_of_whole_answers(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that each answer moves by a second per token and draft; the first answers are not counted."""
    now = [0.0]
    loaded = load_model(str(target))
    draft = load_draft("layers:0", loaded)

    class Stated:
        def __init__(self, target: object, draft: object, **_: object) -> None:
            self.seconds = 1.0 if draft is None else 0.5

        def __enter__(self) -> Stated:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def generate(self, prompts: list[object], **_: object) -> list[object]:
            now[0] += 4 * self.seconds
            return [type("Result", (), {"tokens": [1, 2, 3, 4]})]

    monkeypatch.setattr("outpace.distill.evaluate.LLM", Stated)
    monkeypatch.setattr("outpace.distill.evaluate.time.perf_counter", lambda: now[0])
    assert tokens_per_second(loaded, {TRAINED: draft}, ["a", "b"]) == {PLAIN: 1.0, TRAINED: 2.0}


@pytest.mark.parametrize(
    ("speeds", "advice"),
    [
        ({PLAIN: 9.0, TRAINED: 8.0}, "use no draft"),
        ({PLAIN: 9.0, TRAINED: 12.0, "the draft old": 11.0}, "use --draft out/draft"),
        ({PLAIN: 9.0, TRAINED: 10.0, "the draft old": 11.0}, "keep the draft old"),
    ],
)
def test_the_fastest_is_advised(speeds: dict[str, float], advice: str) -> None:
    assert verdict(speeds, "out/draft").endswith(f"; {advice}")


def test_a_budget_too_short_for_the_warm_up_is_refused_before_text_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "operations_per_second", lambda device: 1e6)
    out = tmp_path / "out"
    given = [
        "--target",
        target_folder(tmp_path / "target", {"num_hidden_layers": 3}),
        "--out",
        out,
        "--answer-tokens",
        8,
    ]
    assert run_command(*given, "--budget", "2s") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "the budget is 2 s, it must be at least about" in said
    assert not (out / "text").exists()


def test_a_large_vocabulary_is_reduced_unless_a_flag_shapes_the_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "LARGE_VOCAB", 64)
    monkeypatch.setattr(run, "REDUCED_VOCAB", 48)
    asked = prompts_file(tmp_path / "asked.jsonl", 100)
    given = ["--target", target_folder(tmp_path / "target", {"num_hidden_layers": 3}), "--prompts", asked]
    given += ["--answer-tokens", 8, "--rows", 32, "--judged", 2, "--length", 64, "--epochs", 1, "--tokens", 200]
    for name, more, size in (("default", [], 48), ("own", ["--layers", "2"], None)):
        assert run_command(*given, "--out", tmp_path / name, *more) == 0
        config = json.loads((tmp_path / name / "draft" / "config.json").read_text())
        assert config["outpace"].get("draft_vocab_size") == size
    assert run_command(*given, "--out", tmp_path / "default", "--stage", "train", "--epochs", 2) == 0


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        *(("1", [0]), ("2", [0, 29]), ("3", [0, 14, 29]), ("0,1,28", [0, 1, 28])),
        *((wrong, None) for wrong in ("7,", "0", "31", "5,4", "0,30", "two", "-1")),
    ],
)
def test_layers_are_a_count_or_a_list(layers: str, expected: list[int] | None) -> None:
    if expected is None:
        with pytest.raises(UserError, match="layers is"):
            pick_layers(DraftShape(layers), 30)
    else:
        assert pick_layers(DraftShape(layers), 30) == expected


def test_training_continues_from_a_draft_whole_or_packed(target: Path, tmp_path: Path) -> None:
    """The student has the draft's weights as they were stored, and the target's embeddings."""
    shape, ids = DraftShape("0,1", vocab=40), torch.arange(3, 43)
    student = Student.new(target, shape, ids)
    assert EMBEDDING not in student.trained
    for value in student.trained.values():
        value.data.add_(torch.randn_like(value), alpha=0.1)
    config = draft_config(read_json(target / "config.json"), shape)
    student.save(tmp_path / "draft", config, target)
    pack(tmp_path / "draft", tmp_path / "packed")
    for name in ("draft", "packed"):
        continued = Student.shape_from_options("3", str(tmp_path / name), 0, str(target))
        assert continued == DraftShape("0,1", 40, tmp_path / name)
        found = Student.new(target, continued, ids)
        assert found.trained.keys() == student.trained.keys()
        for weight, value in found.trained.items():
            assert torch.equal(value, student.tensors[weight].bfloat16().float())
        assert torch.equal(found.tensors[EMBEDDING], student.tensors[EMBEDDING])
        assert draft_config(read_json(target / "config.json"), continued) == config
    save_vocab_ids(tmp_path / "draft" / "draft_vocab.safetensors", torch.tensor([4, 300]))
    with pytest.raises(UserError, match="300"):
        DraftShape.of_draft(tmp_path / "draft")


def test_the_shipped_draft_can_be_trained_further() -> None:
    shape = Student.shape_from_options("3", "shipped", 0, "SmolLM2-135M-Instruct")
    assert shape == DraftShape("0,14,29", 10240, SHIPPED_FOLDER / "smollm2-135m-instruct")
