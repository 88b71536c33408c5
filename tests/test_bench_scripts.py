"""Tests of scripts in bench/: options that leave nothing to measure are refused; the installed package is measured."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from files import write_gguf

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import never_a_loss
import ready

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tokens", "256"], "--turn is 256, it must be between 1 and 255"),
        (["--tokens", "8", "--turn", "9"], "--turn is 9, it must be between 1 and 7"),
        (["--turn", "0"], "--turn is 0, it must be between 1 and 511"),
        (["--count", "0"], "--count is 0, it must be at least 1"),
    ],
)
def test_options_that_leave_nothing_to_measure_are_refused(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["never_a_loss.py", *arguments])
    monkeypatch.delattr(never_a_loss, "load")
    with pytest.raises(SystemExit) as left:
        never_a_loss.main()
    assert left.value.code == 2
    assert says in capsys.readouterr().err


def test_the_installed_package_is_started_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "outpace.py").write_text("raise SystemExit('of the current folder')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    assert ready.started(Path("tiny.gguf"), "int8")["ready"] > 0
