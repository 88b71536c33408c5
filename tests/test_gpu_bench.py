"""bench/gpu.py on a CPU, in eager mode, and the checks of captured passes, which must notice named mistakes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from files import model_folder

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import gpu
import gpu_checks
from turns import one_of

from outpace.models.llama.cuda import runtime
from outpace.models.llama.torch.attention import attend_batch


@pytest.mark.long
def test_all_parts_run_and_their_rows_are_written_one_by_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = str(model_folder(tmp_path)), tmp_path / "gpu.jsonl"
    given = ["--device", "cpu", "--quick", "--model", folder, "--drafts", folder, "--out", str(out)]
    status = gpu.main([*given, "--tokens", "6", "--rounds", "1", "--repeats", "1", "--minutes", "5"])
    written = [json.loads(line) for line in out.read_text().splitlines()]
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    wrong = [row for row in written if "error" in row and "check" not in row]
    assert (status, last["failed"], wrong) == (0, 0, [])
    parts = [*dict.fromkeys(row["part"] for row in written)]
    assert parts == ["machine", *(part for part in gpu.PARTS if part not in gpu.WIDE)]
    assert written == [{"part": part} | row for part in parts for row in last[part]]
    assert {row["method"] for row in last["answers"] if "times_plain" in row} == set(gpu.METHODS)


def test_texts_alone_measure_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = ("plain", "sequential, 4 steps", "auto")
    monkeypatch.setattr(gpu, "METHODS", {name: gpu.METHODS[name] for name in chosen})
    folder, data, out = str(model_folder(tmp_path)), tmp_path / "data.jsonl", tmp_path / "gpu.jsonl"
    data.write_text(json.dumps({"turns": ["the cat sat"]}) + "\n")
    given = [
        "--device",
        "cpu",
        "--quick",
        "--parts",
        "texts",
        "--model",
        folder,
        "--drafts",
        folder,
        "--out",
        str(out),
    ]
    assert gpu.main([*given, "--tokens", "4", "--data", str(data), str(data)]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert sorted(last) == ["failed", "machine", "texts"]
    assert len(last["texts"]) == 10
    assert all("error" not in row and row["passed"] for row in last["texts"])


def test_a_device_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--device", "cuda:99"]) == 1
    assert "device 'cuda:99' is not available here" in capsys.readouterr().err


@pytest.mark.parametrize("mistake", one_of(3, ["sees siblings", "forgets moves", "writes elsewhere"]))
def test_the_checks_notice_a_mistake(monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    if mistake == "forgets moves":
        monkeypatch.setattr(runtime.Pool, "move", lambda *_: None)
    elif mistake == "sees siblings":
        monkeypatch.setattr(runtime, "visible_bits", lambda visible: runtime.np.full((len(visible), 4), -1))
    else:
        monkeypatch.setattr(runtime.Pool, "padding", property(lambda pool: 3))
    rows = gpu_checks.of_forwards("cpu", torch.float32, is_eager=True)
    assert not all(row["passed"] for row in rows)


def in_float32(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, -1e30)
    return attend_batch(query.float(), keys.float(), values.float(), mask)


@pytest.mark.parametrize("mistake", [None, "attends by buckets"])
def test_exact_mode_must_be_bitwise_equal(monkeypatch: pytest.MonkeyPatch, mistake: str | None) -> None:
    if mistake:
        monkeypatch.setattr(runtime, "attend_batch_exactly", in_float32)
    rows = gpu_checks.of_exact("cpu", torch.float32, is_eager=True)
    assert len(rows) == 6
    assert all(row["passed"] for row in rows) is (mistake is None)


@pytest.mark.parametrize("size", ["8B", pytest.param("32B", marks=pytest.mark.long)])
def test_the_answers_of_a_widened_target_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    monkeypatch.setattr(gpu, "QUICK_SHAPE", (4, 256, 256, 16, 8, 16))
    chosen = ("plain", "sequential, 4 steps")
    monkeypatch.setattr(gpu, "METHODS", {name: gpu.METHODS[name] for name in chosen})
    folder, out = str(model_folder(tmp_path)), tmp_path / "gpu.jsonl"
    given = ["--device", "cpu", "--quick", "--parts", f"answers, {size}", "--model", folder, "--out", str(out)]
    assert gpu.main([*given, "--tokens", "6", "--rounds", "1", "--repeats", "1", "--batches", "1"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])[f"answers, {size}"]
    assert not [row for row in rows if "error" in row]
    assert {row["inflate"] for row in rows} == {size}
    assert {row["method"]: row["differing"] for row in rows if "times_plain" in row} == dict.fromkeys(chosen, 0)
