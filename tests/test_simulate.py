"""The simulator: every method writes the recorded text, and its time follows known formulas; and the command."""

from __future__ import annotations

import errno
import itertools
import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import turns
from commands import last_line, run_command
from doubles import collect_warnings, decode, make_drafter, write
from test_card_fuzz import TARGETS, random_clock, random_requests

from outpace.card.inline import InlineWorker
from outpace.core import registry
from outpace.core.errors import UserError
from outpace.engine.engine import EngineOptions
from outpace.simulate import report
from outpace.simulate.models import index_trace
from outpace.simulate.run import Outcome, run_setup, simulate
from outpace.simulate.setups import PLAIN, Setup, SetupSizes, by_ratio, measured, parse_curve, select_setups, setups
from outpace.simulate.trace import Trace, limit_trace, synthetic_trace

SIZES = SetupSizes(nodes=8, width=3, tree_nodes=64)
SETUPS = {setup.name: setup for setup in setups(SIZES)}
del SETUPS["card-published"]  # a width of 100 is slow
CHAIN = {"width": 1, "tree_nodes": 64, "floor": 0.0}
PERFECT, GARBAGE = synthetic_trace(1.0, 1, 240), synthetic_trace(0.0, 1, 60)
MIXED = synthetic_trace(0.6, 3, 40)


def run(trace: Trace, setup: Setup, ratio: float, devices: int = 2, length: int | None = None) -> Outcome:
    return run_setup(index_trace(trace, setup.ranks), setup, by_ratio(ratio), devices, length)


def card(nodes: int = 64, **options: Any) -> Setup:
    return Setup("card", "card", "card", nodes, CHAIN | options)


def sequential(length: int) -> Setup:
    return Setup("chain", "chain", "speculative", length + 1, CHAIN)


@pytest.mark.parametrize(("name", "devices"), turns.in_turn(SETUPS, [1, 2]))
def test_every_method_writes_the_recorded_text(name: str, devices: int) -> None:
    setup = replace(SETUPS[name], lengths=SETUPS[name].lengths[:2])
    plain = SETUPS[PLAIN]
    *_, outcome = simulate(MIXED, [plain, setup], [by_ratio(5)], devices)  # raises if the text differs
    assert outcome.figures.emitted == outcome.tokens == 120
    assert 0 <= outcome.target_idle < 1
    assert 0 <= outcome.draft_idle <= 1
    assert (outcome.figures.accepted > 0) == (name != PLAIN)


@pytest.mark.parametrize("ratio", [pytest.param(3.5, marks=pytest.mark.long), 15.0])
def test_the_planner_is_nearly_as_good_as_the_best_fixed_tree(ratio: float) -> None:
    """Further rows cost nothing, which the planner must find out; the tree has its best length."""
    trace, sizes = synthetic_trace(0.6, 4, 150), SetupSizes(nodes=16, width=4, tree_nodes=64)
    setups = select_setups(sizes, ["speculative-tree", "auto"])
    fixed, planned = list(simulate(trace, setups, [by_ratio(ratio)]))[1:]
    assert (fixed.setup.method, planned.setup.method) == ("speculative", "auto")
    assert planned.speedup > 0.93 * fixed.speedup > 1.5


@pytest.mark.parametrize("ratio", [0.5, 3.5, 7.0])
def test_plain_decoding_takes_a_pass_per_token(ratio: float) -> None:
    outcome = run(MIXED, SETUPS[PLAIN], ratio)
    assert outcome.seconds == 120 * ratio
    assert (outcome.target_idle, outcome.draft_idle) == (0.0, 1.0)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_sequential_chain_against_counting(length: int) -> None:
    """Each pass accepts the leading tokens that the draft has first; counted from the trace alone."""
    rounds = steps = 0
    for answer in MIXED.answers:
        hits = (answer.draft_tokens[:, 0] == np.array(answer.tokens)).tolist()
        place = 0
        while place < len(hits):
            rounds += 1
            steps += min(length, len(hits) - place - 1)  # the target writes the last token itself
            place += 1 + len(list(itertools.takewhile(bool, hits[place : place + length])))
    outcome = run(MIXED, sequential(length), 4.0, length=length)
    assert outcome.figures.passes == rounds
    assert outcome.seconds == steps + rounds * 4.0


@pytest.mark.parametrize("ratio", [2.0, 7.0, 15.0])
def test_card_with_a_perfect_chain_is_as_fast_as_its_drafter(ratio: float) -> None:
    outcome = run(PERFECT, card(), ratio)
    assert 240 <= outcome.seconds <= 240 + 2 * ratio + 2  # a draft step per token, and a pass at both ends
    assert outcome.figures.misses <= 1  # after the end
    assert outcome.draft_idle < 0.1


@pytest.mark.parametrize("options", [CHAIN, {"width": 4, "tree_nodes": 128, "floor": 0.0}])
@pytest.mark.parametrize("ratio", [0.5, 3.5, 15.0])
def test_a_parallel_garbage_draft_costs_nothing(options: dict[str, Any], ratio: float) -> None:
    outcome = run(GARBAGE, Setup("card", "", "card", 16, options | {"just_in_time": 0}), ratio)
    assert outcome.seconds == 60 * ratio
    assert outcome.figures.accepted == 0


def test_one_device_is_shared() -> None:
    """A garbage draft that pauses only at the end halves the device; a perfect one costs as much as sequential
    drafting."""
    assert run(GARBAGE, card(just_in_time=0), 4.0, devices=1).seconds == pytest.approx(60 * 8.0, rel=0.02)
    outcome = run(PERFECT, card(), 4.0, devices=1)
    assert outcome.seconds == pytest.approx(240 / 4 * 8.0, rel=0.05)


def test_the_best_draft_length_is_found() -> None:
    rows = [SETUPS[PLAIN], SETUPS["speculative-chain"]]
    cheap, expensive = (list(simulate(MIXED, rows, [by_ratio(ratio)]))[-1] for ratio in (20.0, 1.0))
    assert (cheap.draft_length or 0) > (expensive.draft_length or 0) == 1
    for length in (2, 8):
        other = run(MIXED, SETUPS["speculative-chain"], 20.0, length=length)
        assert cheap.seconds <= other.seconds


def test_without_correction_the_drafter_soon_drafts_another_text() -> None:
    trace = synthetic_trace(0.7, 1, 61)
    told, untold = (run(trace, SETUPS[name], 7.0) for name in ("card", "card-no-correction"))
    assert told.seconds < 0.7 * untold.seconds
    assert untold.figures.hits < 0.3 * told.figures.hits


def test_each_part_of_card_has_an_effect() -> None:
    """On a trace with much to gain each switch changes the outcome."""
    trace = synthetic_trace(0.7, 1, 61)
    found = {name: run(trace, SETUPS[name], 7.0) for name in SETUPS if name.startswith("card") and name != "card-ngram"}
    assert len({outcome.seconds for outcome in found.values()}) == len(found)
    assert found["card-chain"].seconds > found["card"].seconds
    assert found["card-no-late"].seconds > found["card"].seconds
    assert found["card-no-late"].figures.hits < found["card"].figures.hits / 2  # after a pass only what is sent again
    assert found["card-no-wait"].target_idle == 0.0 < found["card"].target_idle


@pytest.mark.parametrize("method", ["auto", "card", "planned"])
def test_n_grams_copy_what_the_draft_does_not_know(method: str) -> None:
    (answer,) = GARBAGE.answers
    again = replace(GARBAGE, answers=(replace(answer, tokens=(*answer.tokens[:6],) * 10),))
    alone, both = (run(again, SETUPS[name], 4.0) for name in (method, f"{method}-ngram"))
    assert both.seconds < 0.5 * alone.seconds


def test_a_synthetic_trace_has_the_acceptance_rate() -> None:
    trace = synthetic_trace(0.7, 4, 2000)
    for rank in (1, 2, 3):
        assert trace.acceptance(rank) == pytest.approx(1 - 0.3**rank, abs=0.02)
    first, again = (synthetic_trace(0.7, 1, 20, seed=3).answers[0].tokens for _ in range(2))
    assert first == again
    for acceptance in (-0.1, 1.1, float("nan")):
        with pytest.raises(UserError, match="acceptance"):
            synthetic_trace(acceptance)


def test_a_part_of_the_answers() -> None:
    assert limit_trace(MIXED, 2).answers == (MIXED.answers[0], MIXED.answers[1])
    assert len(limit_trace(MIXED, 9).answers) == 3
    tasks = ["gsm8k", "humaneval", "mt_bench"] * 12  # alternating, as a pair is recorded
    many = replace(MIXED, answers=tuple(replace(MIXED.answers[0], task=task) for task in tasks))
    assert [answer.task for answer in limit_trace(many, 6).answers].count("gsm8k") == 2
    assert {answer.task for answer in limit_trace(many, 12).answers} == set(tasks)
    with pytest.raises(UserError, match="it has stated"):
        limit_trace(MIXED, None, ["gsm8k"])


def test_measured_times_lie_on_lines() -> None:
    cost = parse_curve("target-times", "1:6.0,4:6.3,8:7.1")
    found = [cost(rows) for rows in (1, 2, 4, 6, 8, 16)]
    assert found == pytest.approx([6.0, 6.1, 6.3, 6.7, 7.1, 8.7])
    assert parse_curve("x", "4:5,8:4")(16) == 4.0  # more rows are never the cheaper ones
    assert measured("1:6", "1:1.5").ratio == 4.0


@pytest.mark.parametrize("text", ["", "1", "1:x", "0:3", "1:0", "1:nan", "1:-2", "1:2,,"])
def test_invalid_times_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="target-times"):
        parse_curve("target-times", text)


def test_names_of_methods() -> None:
    assert [setup.name for setup in select_setups(SIZES, ["card"])] == [PLAIN, "card"]
    names = [setup.name for setup in select_setups(SIZES, ["speculative", "card-chain"])]
    assert names == [PLAIN, "speculative-chain", "speculative-tree", "card-chain"]
    everything = [setup.name for setup in select_setups(SIZES, ["all"])]
    assert [name for name in everything if name != "card-published"] == [*SETUPS]
    usual = [setup.name for setup in select_setups(SIZES, ["every"])]
    assert {*registry.names("decoders"), "speculative-chain", "speculative-tree"} == {*usual, "speculative"}
    wider = {setup.name for setup in select_setups(replace(SIZES, others=(7,)), ["every"])}
    assert wider - {*usual} == {"card-k7", "planned-k7"}
    with pytest.raises(UserError, match="did you mean 'card'"):
        select_setups(SIZES, ["cart"])


@pytest.mark.parametrize("seeds", [10, pytest.param(40, marks=pytest.mark.long)])
def test_switches_never_change_the_text(seeds: int) -> None:
    """Try random switches under random interleavings, on toy targets that have rows off the path too."""
    for seed in range(seeds):
        chance = random.Random(seed)
        target = chance.choice(TARGETS)
        requests = random_requests(chance, target)
        switches = {name: chance.random() < 0.5 for name in ("chain", "secondary", "late")}
        drafter = make_drafter(chance.choice(("model", "both", "perfect")), target, width=chance.randint(1, 5))
        worker = InlineWorker(drafter, random_clock(chance))
        worker.clock.shared = chance.random() < 0.5
        engine = EngineOptions(nodes=chance.randint(1, 10), rows=24, chunk=chance.randint(1, 6), batch=3)
        options = switches | {"just_in_time": chance.randrange(3)}
        found, messages = collect_warnings(
            lambda requests=requests, worker=worker, target=target, engine=engine, options=options: decode(
                requests, "card", worker=worker, target=target, engine=engine, **options
            )
        )
        assert found.texts == [write(target, request) for request in requests], f"interleaving {seed}"
        assert not messages


def test_each_tasks_speed() -> None:
    """All tokens over all seconds, of a task's answers and of all."""
    trace = replace(MIXED, answers=tuple(replace(one, task="abb"[at]) for at, one in enumerate(MIXED.answers)))
    _, outcome = simulate(trace, [SETUPS[PLAIN], SETUPS["card"]], [by_ratio(5.0)])
    counts = {task: sum(len(a.tokens) for a in trace.answers if a.task == task) for task in ("a", "b")}
    assert sum(counts[task] * outcome.by_task[task] for task in counts) == pytest.approx(outcome.seconds)
    assert outcome.speedups == {task: pytest.approx(5.0 / outcome.by_task[task]) for task in counts}


SMALL = ("--answers", "2", "--nodes", "8", "--width", "3", "--ratio", "4")


def run_simulate(*arguments: object) -> tuple[int, str, str]:
    return run_command("simulate", *arguments)


def test_an_assumed_acceptance() -> None:
    words = ("--acceptance", "0.7", "--methods", "card,speculative-chain", *SMALL)
    code, out, err = run_simulate(*words)
    assert code == 0, err
    assert "sequential, chain" in out
    assert re.search(r"^fastest: CARD at .* all texts equal$", out.splitlines()[-1])
    code, out, err = run_simulate(*words, "--json")
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
    code, out, err = run_simulate("--trace", tmp_path / "a.trace", "--methods", "card", *SMALL, *times, *files)
    assert code == 0, err
    assert "6 measured" in out
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert rows[-1]["ratio"] == 6.0


def test_a_pipeline_multiplies_what_drafting_gains() -> None:
    given = ("--acceptance", "0.7", "--methods", "speculative-chain", *SMALL)
    near, far = (
        last_line(run_simulate(*given, *more, "--json")[1])["rows"] for more in ((), ("--stages", "4", "--hop", "5"))
    )
    assert far[1]["speedup"] > near[1]["speedup"]
    assert far[1]["ratio"] == 4.0 * 21
    assert "which needs a pipeline" in run_simulate(*given, "--hop", "1")[2]


def test_delays_have_a_column_and_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    given = ("--acceptance", "0.7", "--methods", "card,planned,speculative-chain", *SMALL, "--delay", "0,1,4")
    code, out, err = run_simulate(*given, "--plot", tmp_path / "a.svg")
    assert code == 0, err
    assert re.search(r"^ *method +delay +4 *$", out, re.MULTILINE)
    assert f"plot: {tmp_path / 'a.svg'}" in err
    out = run_simulate(*given, "--json")[1]
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
    code, _, err = run_simulate(*words)
    assert code == 2
    assert said in err
    assert len(err.strip().splitlines()) == 1


def test_files_that_cannot_be_written_are_reported_after_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    code, out, err = run_simulate("--acceptance", "0.7", "--methods", "card", *SMALL, "--out", tmp_path / "rows.json")
    assert code == 2
    assert "CARD" in out
    assert "rows.json cannot be written" in err


def test_ctrl_c_shows_the_finished_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: Any) -> Iterator[Any]:
        yield next(iter(simulate(*given)))
        raise KeyboardInterrupt

    monkeypatch.setattr("outpace.simulate.run.simulate", interrupted)
    file = tmp_path / "rows.json"
    code, out, err = run_simulate("--acceptance", "0.7", "--methods", "card,speculative-chain", *SMALL, "--out", file)
    assert code == 130
    assert re.search(r"plain +1\.00", out)
    assert err.endswith(f"stopped after 1 simulations; they are in {file}\n")
    assert len(json.loads(file.read_text())) == 1
