"""Tests of scripts in bench/: options that leave nothing to measure are refused; the installed package is measured."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from files import write_gguf

from outpace.simulate.trace import synthetic_trace

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


def test_the_best_width_is_plotted_and_points_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft steps that cost much more with width make the narrow one the best, free ones do not."""
    pytest.importorskip("matplotlib")
    import card_widths

    synthetic_trace(0.7, answers=1, tokens=40).save(tmp_path / "pair.trace")
    files = {"--trace": "pair.trace", "--out": "widths.png", "--rows": "rows.jsonl"}
    words = [word for name, file in files.items() for word in (name, str(tmp_path / file))]
    times = ["--draft-times", "dear=1:1,16:30", "--draft-times", "free=1:1", "--widths", "2,16", "--methods", "card"]
    monkeypatch.setattr(sys, "argv", ["card_widths.py", *words, *times])
    card_widths.main()
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    speeds = {(row["draft"], row["width"]): row["speedup"] for row in rows}
    assert speeds["dear", 2] > speeds["dear", 16]
    assert speeds["free", 16] >= speeds["free", 2]
    assert (tmp_path / "widths.png").stat().st_size > 10000
    monkeypatch.setattr(card_widths, "simulate", lambda *_: pytest.fail("the point is known"))
    card_widths.main()
