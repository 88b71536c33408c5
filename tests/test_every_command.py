"""Each command prints its plain output, and each example runs, with the real shipped pair, as users run them."""

from __future__ import annotations

import io
import json
import re
import runpy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from commands import run_command
from files import model_folder, smollm2_file

from outpace.cli.main import COMMANDS

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
# By command: its words, and what its output says. {here} is an empty folder with questions.jsonl and sales.csv.
PLAIN = {
    "generate": ('"Say hi." --max-tokens 24', r"tokens/s, first token"),
    "chat": ("--max-tokens 16", r"auto: \d+\.\d tokens/s"),
    "demo": ("--max-tokens 24 --rounds 1", r"same text|equal"),
    "bench": ("--prompts 1 --max-tokens 16 --methods auto", r"fastest.*texts equal"),
    "tune": ("--max-tokens 16 --rounds 1", r"round of 1 row +\d+\.\d\d ms"),
    "simulate": ("--acceptance 0.7 --answers 1 --ratio 7 --methods card", r"fastest: CARD at 7"),
    "edge": ("--worlds 1 --slots 2", r"time|device"),
    "forecast": ("{here}/sales.csv --horizon 8 --samples 4", r"patches a target pass"),
    "methods": ("card", r"CARD"),
    "theory": ("", r"draft"),
    "doctor": ("", r"^ready"),
    "judge": ("--tasks {here}/questions.jsonl --out {here}/judge --max-tokens 24", r"mismatches were mined"),
    "distill": ("--write-prompts 2 --out {here}/prompts", r"written: .*prompts"),
}
SERVERS = {"serve", "draft-worker"}  # they run until a signal; tests/test_start.py and test_server_life.py start them


def test_no_command_is_missing() -> None:
    assert {*PLAIN, *SERVERS} == {*COMMANDS}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder with files to read; what is converted meanwhile, half a gigabyte, is removed."""
    smollm2_file()
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    lines = ({"turns": [f"What is {number} + 4?"], "reference": number + 4} for number in range(2))
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    times = pd.date_range("2026-01-01", periods=120, freq="h")
    values = 10 + np.sin(np.arange(120) * 2 * np.pi / 24)
    pd.DataFrame({"time": times, "value": values}).to_csv(tmp_path / "sales.csv", index=False)
    yield tmp_path
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)


@pytest.mark.smollm2
@pytest.mark.parametrize("command", PLAIN)
def test_the_plain_output_of_a_command(here: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words, said = PLAIN[command]
    given = re.findall(r'"[^"]*"|\S+', words.format(here=here))
    monkeypatch.setattr("sys.stdin", io.StringIO("Say hi.\n"))
    code, out, err = run_command(command, *(word.strip('"') for word in given))
    expected = 2 if command == "judge" else 0  # two questions are too few, which is said in a sentence
    assert code == expected, err
    assert re.search(said, out + err, re.MULTILINE | re.DOTALL), out + err
    rows = [line for line in out.splitlines() if "  " in line]  # of tables
    assert max(map(len, rows), default=0) <= 80, out


@pytest.mark.smollm2
@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_with_the_shipped_pair(
    script: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(script)])
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    assert capsys.readouterr().out.strip()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"), max_position_embeddings=512)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 7


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(
    script: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run in this process, because starting another takes longer than the example."""
    monkeypatch.setattr(sys, "argv", [str(script), str(model)])
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    assert capsys.readouterr().out.strip()


@pytest.mark.skipif(sys.platform == "win32", reason="the program is a shell script")
def test_a_draft_worker_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'error: a draft worker needs the extra remote' >&2\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(SystemExit, match="needs the extra remote"):
        runpy.run_path(str(EXAMPLES[0].with_name("two_machines.py")), run_name="__main__")
