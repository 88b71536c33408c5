"""Tests of scripts in bench/: options that leave nothing to measure are refused; the installed package is measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from files import write_gguf

from outpace.bench.store import ANSWERS, Record, Store
from outpace.core.errors import UserError
from outpace.simulate.models import index_trace
from outpace.simulate.setups import measured as costs_by_rows
from outpace.simulate.trace import synthetic_trace

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import head_steps
import judge_table
import planner_cases
import random_gguf
import ready
import stated_batches

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--answers", "0"], "--answers is 0, it must be at least 1"),
        (["--requests", "8,0"], "--requests is '8,0', its numbers must be at least 1"),
        (["--targets", "9B"], "--targets is '9B', it must name some of 8B, 32B"),
    ],
)
def test_options_that_leave_nothing_to_measure_are_refused(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["stated_batches.py", "--trace", "no.trace", *arguments])
    with pytest.raises(SystemExit) as left:
        stated_batches.main()
    assert left.value.code == 2
    assert says in capsys.readouterr().err


def test_auto_is_compared_with_the_best_fixed_setting() -> None:
    """A draft that is always right gains, one that is never right costs next to nothing."""
    trace = synthetic_trace(1.0, 2, 60)
    costs = costs_by_rows("1:6,64:7", "1:0.5")
    row = stated_batches.compare(index_trace(trace), costs, 2, 2)
    assert row["best"] != "plain"
    assert row["fixed"] > 2.0
    assert row["auto"] > 1.5
    assert stated_batches.compare(index_trace(stated_batches.useless(trace)), costs, 2, 2)["best"] == "plain"


def test_cases_of_the_planner_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """They use internals of the package; their figures are read by people."""
    given = ["--only", "gap per draft step", "--requests", "1", "--tokens", "64"]
    monkeypatch.setattr(sys, "argv", ["planner_cases.py", *given])
    planner_cases.main()
    assert "| good |" in capsys.readouterr().out


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
    times = ["--draft-times", "dear=1:1,16:30", "free=1:1", "--widths", "2,16", "--methods", "card"]
    monkeypatch.setattr(sys, "argv", ["card_widths.py", *words, *times])
    card_widths.main()
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    speeds = {(row["draft"], row["width"]): row["speedup"] for row in rows}
    assert speeds["dear", 2] > speeds["dear", 16]
    assert speeds["free", 16] >= speeds["free", 2]
    assert (tmp_path / "widths.png").stat().st_size > 10000
    monkeypatch.setattr(card_widths, "simulate", lambda *_: pytest.fail("the point is known"))
    card_widths.main()


def test_heads_of_every_kind_are_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(head_steps, "SHAPES", {"small": head_steps.Shape(256, 512, 4096)})
    monkeypatch.setattr(head_steps, "ROWS", 2048)
    monkeypatch.setattr(head_steps, "STEPS", 1)
    monkeypatch.setattr(sys, "argv", ["head_steps.py", "--nodes", "1", "3", "--shapes", "small"])
    head_steps.main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    drafted = {"eagle": ["1", "3"], "peagle": ["8"], "dflash": ["15"], "dspark": ["7"]}
    assert {row["kind"]: [*row["milliseconds"]] for row in rows} == drafted


def test_a_random_file_of_qwen_with_its_layer_for_more_tokens_is_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = replace(random_gguf.SHAPES["qwen3.5-0.8b"], vocab=4096, hidden=256, middle=256, merges=400, layers=4)
    monkeypatch.setitem(random_gguf.SHAPES, "small", small)
    file = tmp_path / "small.gguf"
    monkeypatch.setattr(sys, "argv", ["random_gguf.py", "small", "Q4_K", str(file), "--mtp"])
    random_gguf.main()
    monkeypatch.setattr(head_steps, "ROWS", 2048)
    monkeypatch.setattr(sys, "argv", ["head_steps.py", "--mtp", str(file), "--nodes", "2"])
    head_steps.main()
    row = json.loads(capsys.readouterr().out)
    assert (row["kind"], row["dtype"], [*row["milliseconds"]]) == ("mtp", "file", ["2"])


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="a wire needs Linux")
def test_drafting_on_a_wire_between_two_namespaces_changes_no_text() -> None:
    """Real TCP with a delay, in both layouts; the script compares all texts with plain decoding's."""
    from wire import why_not

    if reason := why_not():
        pytest.skip(reason)
    words = ["--delays", "5", "--rate", "0", "--answers", "1", "--tokens", "16", "--runs", "1", "--pass-ms", "40"]
    command = [sys.executable, str(ROOT / "bench" / "across_machines.py"), *words]
    found = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert found.returncode == 0, found.stderr
    last = json.loads(found.stdout.splitlines()[-1])
    assert last["equal"]
    assert [row["layout"] for row in last["rows"]] == ["worker", "client"]
    assert all(row["up"] > row["down"] > 0 for row in last["rows"])


def test_rules_are_compared_on_the_questions_that_all_answered(tmp_path: Path) -> None:
    store, method = Store(tmp_path, {}), "speculative:width=1,rule="
    seconds = {"greedy": 2.0, "judge,judge=a,recall=0.8": 1.0, "judge,judge=b,recall=0.8": 4.0}
    seconds["top_beta,beta=256,tau=0.693"] = 2.0
    for rule, time in seconds.items():
        for number in range(9 if rule == "greedy" else 8):
            counts = (1, 3) if rule == "greedy" or number % 2 else (1, 3, 3)
            record = Record(
                label=method + rule,
                task="t",
                prompt=str(number),
                round=0,
                tokens=(0,) * sum(counts),
                seconds=time,
                first_token=0.0,
                arrivals=tuple(time * place for place in range(len(counts))),
                counts=counts,
                correct=number > 1,
            )
            store.add(record)
    name, measured = judge_table.read(tmp_path)
    greedy, judge, other, lenience = judge_table.table_rows(measured)
    assert name == "t, 8 questions"
    assert [row["rule"] for row in (greedy, judge, other, lenience)] == [
        "greedy",
        "judge",
        "other task's judge",
        "lenience",
    ]
    assert (judge["setting"], lenience["setting"]) == ("recall 0.8", "lenience 0.5")
    assert greedy["tokens_per_pass"] == (2.0, 2.0, 2.0)
    assert greedy["speed"] == (1.0, 1.0, 1.0)
    assert judge["tokens_per_pass"][0] == pytest.approx((4 * 7 + 4 * 4) / (4 * 3 + 4 * 2))
    assert judge["speed"] == pytest.approx((2.0, 2.0, 2.0))
    assert other["speed"][0] == pytest.approx(0.5)
    value, low, high = judge["right"]
    assert low < value == 0.75 < high
    judge_table.plot({name: judge_table.table_rows(measured)}, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000
    empty = tmp_path / "none"
    Store(empty, {})
    (empty / ANSWERS).touch()
    with pytest.raises(UserError, match="has no question that all methods answered, or no rule greedy"):
        judge_table.read(empty)


def test_neurons_that_fire_together_become_one_expert() -> None:
    import cut_into_experts
    import torch

    generator = torch.Generator().manual_seed(3)
    kinds, shuffled = torch.rand(4, 50, generator=generator), torch.randperm(24, generator=generator)
    fired = kinds.repeat_interleave(6, 0)[shuffled] + 0.01 * torch.rand(24, 50, generator=generator)
    found = cut_into_experts.cluster(fired, 4)
    assert sorted(found.flatten().tolist()) == list(range(24))
    assert all(len({int(shuffled[neuron]) // 6 for neuron in one}) == 1 for one in found.tolist())
