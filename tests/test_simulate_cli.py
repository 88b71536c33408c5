"""`outpace simulate`: what it prints and writes, and how it refuses."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import last_line, run_command

from outpace.simulate import report
from outpace.simulate.run import simulate
from outpace.simulate.setups import SetupSizes, by_ratio, select_setups
from outpace.simulate.trace import synthetic_trace

SMALL = ("--answers", "2", "--nodes", "8", "--width", "3", "--ratio", "4")


def run(*arguments: object) -> tuple[int, str, str]:
    return run_command("simulate", *arguments)


def test_an_assumed_acceptance() -> None:
    words = ("--acceptance", "0.7", "--methods", "card,speculative-chain", *SMALL)
    code, out, err = run(*words)
    assert code == 0, err
    assert "sequential, chain" in out
    assert re.search(r"^fastest: CARD at .* all texts equal$", out.splitlines()[-1])
    code, out, err = run(*words, "--json")
    assert len(out.splitlines()) == 1
    found = last_line(out)
    assert [row["method"] for row in found["rows"]] == ["autoregressive", "speculative-chain", "card"]
    assert (found["nodes"], found["width"], found["devices"]) == (8, 3, 2)
    assert found["rows"][0]["speedup"] == 1.0
    assert found["rows"][2]["speedup"] > 1.0
    assert found["rows"][2]["hits"]["miss"] > 0


def test_a_trace_with_measured_times_to_files(tmp_path: Path) -> None:
    synthetic_trace(0.5, 2, 40).save(tmp_path / "a.trace")
    times = ("--target-times", "1:6,8:7", "--draft-times", "1:1,4:1.2", "--devices", "1")
    files = ("--out", tmp_path / "rows.json")
    code, out, err = run("--trace", tmp_path / "a.trace", "--methods", "card", *SMALL, *times, *files)
    assert code == 0, err
    assert "6 measured" in out
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert rows[-1]["ratio"] == 6.0


def test_a_pipeline_multiplies_what_drafting_gains() -> None:
    given = ("--acceptance", "0.7", "--methods", "speculative-chain", *SMALL)
    near, far = (last_line(run(*given, *more, "--json")[1])["rows"] for more in ((), ("--stages", "4", "--hop", "5")))
    assert far[1]["speedup"] > near[1]["speedup"]
    assert far[1]["ratio"] == 4.0 * 21
    assert "which needs a pipeline" in run(*given, "--hop", "1")[2]


def test_delays_have_a_column_and_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    given = ("--acceptance", "0.7", "--methods", "card,planned,speculative-chain", *SMALL, "--delay", "0,1,4")
    code, out, err = run(*given, "--plot", tmp_path / "a.svg")
    assert code == 0, err
    assert re.search(r"^ *method +delay +4 *$", out, re.MULTILINE)
    assert f"plot: {tmp_path / 'a.svg'}" in err
    out = run(*given, "--json")[1]
    rows = last_line(out)["rows"]
    assert [row["delay"] for row in rows] == [None, None, *2 * [0.0, 1.0, 4.0]]
    for method in ("card", "planned"):
        near, far, farther = (row for row in rows if row["method"] == method)
        assert near["speedup"] > far["speedup"] > farther["speedup"] >= 1.0
        assert far["target_idle"] == farther["target_idle"] == 0.0, "the target must not wait for a far drafter"
    assert "<svg" in (tmp_path / "a.svg").read_text()


def test_a_plot_shows_all_points_of_all_panels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    tops: list[float] = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *_, **__: tops.append(self.axes[-1].get_ylim()[1]))
    trace = synthetic_trace(0.8, 1, 60)
    chosen = select_setups(SetupSizes(8, 4), ["card"])
    found = [*simulate(trace, chosen, [by_ratio(2), by_ratio(20)], delays=[0.0, 1.0])]
    report.plot(found, "a title", tmp_path / "a.svg")
    assert tops[0] > max(outcome.speedup for outcome in found)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--trace FILE"),
        (("--acceptance", "0.5", "--trace", "x"), "not both"),
        (("--acceptance", "1.5"), "acceptance is 1.5"),
        (("--trace", "nowhere"), "there is no file nowhere"),
        (("--acceptance", "0.5", "--ratio", "3,x"), "ratio is '3,x'"),
        (("--acceptance", "0.5", "--ratio", "0"), "ratio is 0"),
        (("--acceptance", "0.5", "--target-times", "1:3"), "go together"),
        (("--acceptance", "0.5", "--methods", "cart"), "did you mean 'card'"),
        (("--acceptance", "0.5", "--devices", "3"), "devices is 3"),
        (("--acceptance", "0.5", "--nodes", "0"), "nodes is 0"),
        (("--acceptance", "0.5", "--delay", "0;1"), "delay is '0;1', it must be numbers such as 0,0.5,1,2"),
        (("--acceptance", "0.5", "--delay", "-1"), "delay is -1"),
        (("--acceptance", "0.5", "--delay", "nan"), "delay is nan"),
        (("--acceptance", "0.5", "--delay", "1", "--devices", "1"), "a delay needs two devices"),
        (("--acceptance", "0.5", "--width", "0"), "width is 0"),
        (("--acceptance", "0.5", "--answers", "0"), "answers is 0"),
        (("--acceptance", "0.5", "--tasks", "gsm8k"), "--tasks selects answers of a trace"),
        (("--acceptance", "0.5", "--out", "/nowhere/r.json"), "--out is /nowhere/r.json, but there is no folder"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr("outpace.simulate.run.run_setup", None)  # nothing is simulated before
    code, _, err = run(*words)
    assert code == 2
    assert said in err
    assert len(err.strip().splitlines()) == 1


def test_files_that_cannot_be_written_are_reported_after_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    code, out, err = run("--acceptance", "0.7", "--methods", "card", *SMALL, "--out", tmp_path / "rows.json")
    assert code == 2
    assert "CARD" in out
    assert "rows.json cannot be written" in err


def test_ctrl_c_shows_the_finished_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: Any) -> Iterator[Any]:
        yield next(iter(simulate(*given)))
        raise KeyboardInterrupt

    monkeypatch.setattr("outpace.simulate.run.simulate", interrupted)
    file = tmp_path / "rows.json"
    code, out, err = run("--acceptance", "0.7", "--methods", "card,speculative-chain", *SMALL, "--out", file)
    assert code == 130
    assert re.search(r"plain +1\.00", out)
    assert err.endswith(f"stopped after 1 simulations; they are in {file}\n")
    assert len(json.loads(file.read_text())) == 1
