"""The peak memory of benches, of one model and of two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import last_line, run_command
from files import model_folder


def test_a_bench_reports_peak_memory(tmp_path: Path) -> None:
    target = model_folder(tmp_path, "target")
    draft = model_folder(tmp_path, "draft", intermediate_size=131072)  # 50 MB in int8
    asked = [*("--target", str(target), "--draft", str(draft), "--tasks", task(tmp_path)), *("--max-tokens", "8")]
    method = "speculative:drafter=model"
    code, out, err = run_command(
        "bench", *asked, "--methods", f"{method},card:drafter=model,worker=process", "--memory", "--json"
    )
    assert code == 0, err
    rows = {row["method"]: row for row in last_line(out)["rows"]}
    plain, *others = (row["peak_memory"][0] for row in rows.values())
    assert all(other > plain + 25e6 for other in others)


def task(folder: Path) -> str:
    """Write a file of two prompts; return its name."""
    (folder / "asked.jsonl").write_text("".join(json.dumps({"turns": [f"hello {n}"]}) + "\n" for n in range(2)))
    return str(folder / "asked.jsonl")


def test_a_process_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.bench.peer._CODE", "raise SystemExit(3)")
    target = model_folder(tmp_path, "target")
    asked = ["--target", str(target), "--tasks", task(tmp_path), "--max-tokens", "4", "--memory"]
    code, out, err = run_command("bench", *asked, "--methods", "autoregressive", "--json")
    assert code == 0, "the speeds are kept"
    assert "the memory of autoregressive was not measured (PeerProcessError: its process ended with status 3)" in err
    assert last_line(out)["rows"][0]["peak_memory"] is None
