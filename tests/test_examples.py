"""Every script in examples/ runs, on a tiny random model."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch
from files import model_folder

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


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
