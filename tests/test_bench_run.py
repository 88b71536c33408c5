"""`outpace bench` on a tiny random model with stand-in peers: what it measures, keeps, shows; no time is asserted."""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import stand_ins
import torch
from files import weights, write_gguf

from outpace.api.llm import load
from outpace.bench import run as bench_run
from outpace.bench.contenders import Contender
from outpace.bench.judging import score_gap
from outpace.bench.method_runner import MethodRunner
from outpace.bench.run import Bench, BenchOptions, rotated
from outpace.bench.store import ANSWERS, Store
from outpace.cli.main import main
from outpace.core.errors import UserError
from outpace.models.toy import Toy

Run = Callable[..., tuple[int, str, str]]
COLUMNS = {"task", "method", "peer", "tokens_per_second", "speedup", "mean_accepted_length", "hit_rate", "equal_text"}
MAX_TOKENS = 8
PROMPTS = (("a", "one", "hello world 12 hello"), ("b", "two", "12 12 12"), ("c", "two", "world or world"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tasks") / "prompts.jsonl"
    lines = [json.dumps({"id": name, "task": task, "turns": [text]}) + "\n" for name, task, text in PROMPTS]
    file.write_text("".join(lines))
    return file


@pytest.fixture(scope="module")
def answers(tiny: Path) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The prompts and what the tiny model answers, as the stand-ins know it."""
    with load(tiny, runtime="llama", dtype="float32", method="autoregressive") as llm:
        prompts = [tuple(llm.target.tokenizer.encode_prompt(text)) for _, _, text in PROMPTS]
        results = llm.generate([list(prompt) for prompt in prompts], max_tokens=MAX_TOKENS)
    return [(prompt, result.tokens) for prompt, result in zip(prompts, results, strict=True)]


@contextmanager
def benching(tiny: Path, asked: Path, folder: Path, answers: stand_ins.Answers = ()) -> Iterator[Run]:
    """What runs a bench on the tiny model, with the stand-in peers: exit code, stdout, stderr."""
    (folder / "peers").mkdir()
    threads = torch.get_num_threads()
    common = (
        "--target",
        tiny,
        "--runtime",
        "llama",
        "--dtype",
        "float32",
        "--tasks",
        asked,
        "--max-tokens",
        MAX_TOKENS,
    )

    def call(*arguments: object) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
            main(["bench", *map(str, common), *map(str, arguments)])
        assert "Traceback" not in err.getvalue(), err.getvalue()
        return int(end.value.code or 0), out.getvalue(), err.getvalue()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTPACE_CACHE", str(folder / "cache"))
        stand_ins.install(folder / "peers", answers, patch)
        patch.setattr(bench_run, "REST", 0.0)
        patch.setattr("outpace.core.machine.BUFFER", 8192)
        yield call
    torch.set_num_threads(threads)


@pytest.fixture
def run(tiny: Path, asked: Path, answers: stand_ins.Answers, tmp_path: Path) -> Iterator[Run]:
    """Runs a bench: exit code, stdout, stderr."""
    with benching(tiny, asked, tmp_path, answers) as call:
        yield call


@pytest.fixture(scope="module")
def troubled(
    tiny: Path, asked: Path, answers: stand_ins.Answers, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, str, str]:
    """A bench of peers with all kinds of troubles, and of one that is right: exit code, stdout, stderr."""
    with benching(tiny, asked, tmp_path_factory.mktemp("troubled"), answers) as call:
        return call("--methods", "speculative", "--peers", "wrong,failing,silent,dying,absent,crashing,right")


def last(out: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def by_label(out: str, task: str = "all", batch: int = 1) -> dict[str, dict[str, Any]]:
    rows = [row for row in last(out)["rows"] if row["task"] == task and row["batch"] == batch]
    return {row["method"] or row["peer"]: row for row in rows}


def test_methods_and_peers_side_by_side(run: Run, tiny: Path, tmp_path: Path) -> None:
    methods = "card:worker=inline,speculative:drafter=ngram,draft_length=2"
    kept = ("--json", tmp_path / "rows.json", "--plot", tmp_path / "bench.png")
    code, out, _ = run("--draft", tiny, "--methods", methods, "--peers", "right,coarse", "--batch", "1,2", *kept)
    assert code == 0
    found = by_label(out)
    assert list(found) == ["autoregressive", *methods.split(",s")[:1], "s" + methods.split(",s")[1], "right", "coarse"]
    for label, row in found.items():
        assert row.keys() >= COLUMNS
        assert (row["prompts"], row["failed"]) == (3, 0)
        assert row["equal_text"] is (None if label == "coarse" else True), label
        assert row["tokens"] == found["autoregressive"]["tokens"]
    assert found["card:worker=inline"]["mean_accepted_length"] > 2, "the draft is the target"
    assert found["card:worker=inline"]["hit_rate"] > 0
    assert found["card:worker=inline"]["acceptance_by_position"][0] == 1.0
    assert found["right"]["tokens_per_second"] == pytest.approx(4.0), "as the stand-in says"
    assert (found["right"]["method"], found["right"]["peer"]) == (None, "right")
    together = by_label(out, batch=2)
    assert [row["equal_text"] for row in together.values()] == [True] * 3, "own methods only"
    assert json.loads((tmp_path / "rows.json").read_text()) == last(out)["rows"]
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert {"processor", "versions", "commit", "command", "floor_seconds", "weight_bytes"} <= last(out).keys()
    assert "tokens/s by plain decoding, if memory is the limit" in " ".join(out.split()), "the floor is an estimate"


def test_a_peer_that_writes_something_else_is_told_where(troubled: tuple[int, str, str]) -> None:
    _, out, _ = troubled
    row = by_label(out)["wrong"]
    assert (row["equal_text"], row["different"], row["compared"]) == (False, 3, 3)
    assert row["divergence"]["position"] == 3
    assert row["divergence"]["score_gap"] > 0, "greedy decoding took the token that the target scores highest"
    assert "wrote token" in out


def test_a_peer_that_fails_is_a_row_and_the_others_go_on(troubled: tuple[int, str, str]) -> None:
    code, out, _ = troubled
    assert code == 0
    found = by_label(out)
    assert (found["failing"]["failed"], found["failing"]["reason"]) == (3, "RuntimeError: out of paper")
    assert (found["silent"]["failed"], found["silent"]["tokens_per_second"]) == (3, None)
    assert found["right"]["failed"] == 0
    assert "failing failed on 2 answers of two: RuntimeError: out of paper" in out


def test_a_peer_whose_process_ends_is_a_row_and_the_others_go_on(troubled: tuple[int, str, str]) -> None:
    code, out, _ = troubled
    assert code == 0
    assert last(out), "what a peer prints does not reach the last line"
    found = by_label(out)
    assert (found["dying"]["failed"], found["dying"]["reason"]) == (
        3,
        "PeerProcessError: its process ended with status 3",
    )
    assert found["right"]["failed"] == 0


def test_peers_that_are_not_to_be_had_are_named(troubled: tuple[int, str, str]) -> None:
    code, out, err = troubled
    assert code == 0
    assert "absent is left out: peer absent is not installed: run `pip install absent`" in err
    assert "crashing is left out, it failed to start (OSError: no such library)" in err
    assert set(by_label(out)) == {"autoregressive", "speculative", "wrong", "failing", "silent", "dying", "right"}


def test_a_bench_goes_on_with_what_is_there(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--methods", "speculative", "--out", tmp_path / "out")
    wrote = MethodRunner.answer
    left = [8]

    def answer(self: MethodRunner, prompt: Any, max_tokens: int) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return wrote(self, prompt, max_tokens)

    monkeypatch.setattr(MethodRunner, "answer", answer)
    code, out, _ = run(*arguments)
    assert code == 130
    assert sum(row["prompts"] for row in by_label(out).values()) == 4, "two warm-ups each, then what was finished"
    monkeypatch.setattr(MethodRunner, "answer", wrote)
    before = (tmp_path / "out" / ANSWERS).read_text()
    code, out, _ = run(*arguments)
    assert code == 0
    assert (tmp_path / "out" / ANSWERS).read_text().startswith(before), "nothing is measured twice"
    assert [row["prompts"] for row in by_label(out).values()] == [3, 3]
    monkeypatch.setattr(MethodRunner, "answer", answer)
    assert run(*arguments)[0] == 0, "all is there: no answer is asked for"
    assert (tmp_path / "out" / "rows.json").exists()
    code, out, _ = run("--compare", tmp_path / "out", tmp_path / "out")
    assert code == 0
    assert {row["ratio"] for row in last(out)["rows"]} == {1.0}


def test_another_bench_in_the_same_folder_is_refused(run: Run, tmp_path: Path) -> None:
    assert run("--methods", "speculative", "--out", tmp_path / "out")[0] == 0
    code, _, err = run("--methods", "speculative", "--out", tmp_path / "out", "--seed", 5)
    assert code == 2
    assert "was made with seed 0, now it is 5" in err


def test_sampled_texts_are_equal_too_and_nothing_is_learnt(run: Run, tmp_path: Path) -> None:
    methods = ("auto", "speculative:drafter=ngram")
    _, out, _ = run("--methods", ",".join(methods), "--temperature", 0.9, "--seed", 3, "--rounds", 2)
    for row in (by_label(out)[name] for name in methods):
        assert (row["equal_text"], row["compared"], row["prompts"]) == (True, 6, 3)
    assert not list(tmp_path.glob("cache/profiles/*")), "a bench starts cold and leaves no profile"


def test_a_trace_is_recorded(run: Run, tiny: Path, tmp_path: Path) -> None:
    from outpace.simulate import trace

    code, out, _ = run("--draft", tiny, "--trace", tmp_path / "t.trace")
    assert code == 0
    found = trace.load(tmp_path / "t.trace")
    assert [answer.task for answer in found.answers] == ["one", "two", "two"]
    assert last(out)["acceptance"] == 1.0, "the draft is the target"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--methods", "crad"), "did you mean 'card'"),
        (("--methods", "speculative:breadth=2"), "unknown option 'breadth' of method speculative"),
        (("--method", "card"), "write --methods card"),
        (("--peers", "vllm"), "unknown peer 'vllm'"),
        (("--peers", "right", "--temperature", "1"), "peers are measured greedily only"),
        (("--peers", "right", "--inflate", "2"), "peers cannot run an inflated target"),
        (("--inflate", "0"), "inflate is 0"),
        (("--inflate", "2", "--draft", "layers:0"), "--inflate does not go with layers:0"),
        (("--batch", "1,x"), "--batch is '1,x'"),
        (("--batch", "0"), "batch is 0"),
        (("--batch", "4"), "batch is 4, there are 3 prompts in all"),
        (("--prompts", "0"), "prompts is 0"),
        (("--rounds", "0"), "rounds is 0"),
        (("--max-tokens", "0"), "max_tokens is 0"),
        (("--tasks", "/nowhere/p.jsonl"), "/nowhere/p.jsonl cannot be read"),
        (("--trace", "t.trace", "--draft", "none"), "--trace records a pair"),
        (("--compare", "/nowhere/a", "/nowhere/b"), "/nowhere/a cannot be read"),
    ],
)
def test_bad_input_is_said(run: Run, arguments: tuple[str, ...], message: str) -> None:
    code, _, err = run(*arguments)
    assert code == 2
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--json", "/nowhere/rows.json"), "--json is /nowhere/rows.json, but there is no folder /nowhere"),
        (("--json", "{here}"), "which is a folder; name a file"),
        (("--trace", "/nowhere/t.trace"), "--trace is /nowhere/t.trace, but there is no folder /nowhere"),
        (("--out", "{here}/file/below"), "--out is {here}/file/below, but {here}/file is a file"),
        (("--plot", "/nowhere/b.png"), "--plot is /nowhere/b.png, but there is no folder /nowhere"),
        (("--plot", "b.zzz"), "--plot is b.zzz, its name must end with one of"),
        (("--plot", "b"), "--plot is b, its name must end with one of"),
        (("--batch", "4"), "batch is 4, there are 3 prompts in all"),
    ],
)
def test_bad_input_is_said_before_a_model_is_loaded(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr("outpace.api.llm.load", None)
    (tmp_path / "file").touch()
    code, _, err = run(*(word.format(here=tmp_path) for word in arguments))
    assert code == 2
    assert message.format(here=tmp_path) in err
    assert len(err.splitlines()) == 1


def test_a_plot_without_matplotlib_is_refused_before_a_model_is_loaded(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outpace.api.llm.load", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    code, _, err = run("--plot", tmp_path / "b.png")
    assert (code, err) == (2, "error: --plot needs `pip install matplotlib`; leave it out for the table alone\n")


def test_what_cannot_be_written_is_said_after_the_line_of_json(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: Path, *rest: object) -> None:
        raise UserError(f"{file.name} cannot be written (No space left on device)")

    monkeypatch.setattr("outpace.bench.report.write_json", full)
    monkeypatch.setattr("outpace.bench.plot.plot", lambda found, facts, file: full(file))
    kept = ("--json", tmp_path / "rows.json", "--plot", tmp_path / "b.png", "--out", tmp_path / "out")
    code, out, err = run("--methods", "speculative", *kept)
    assert code == 2
    assert by_label(out)["speculative"]["prompts"] == 3
    for said in ("error: rows.json cannot", "error: b.png cannot", "warning: bench.png cannot"):
        assert said in err


def test_sigterm_shows_what_is_finished_and_ends_as_it_does(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    wrote, left = MethodRunner.answer, [8]

    def answer(self: MethodRunner, prompt: Any, max_tokens: int) -> Any:
        left[0] -= 1
        if left[0] < 0:
            signal.raise_signal(signal.SIGTERM)
        return wrote(self, prompt, max_tokens)

    monkeypatch.setattr(MethodRunner, "answer", answer)
    before = signal.getsignal(signal.SIGTERM)
    code, out, _ = run("--methods", "speculative")
    assert code == 143
    assert sum(row["prompts"] for row in by_label(out).values()) == 4
    assert signal.getsignal(signal.SIGTERM) is before
    left[0] = 0  # while the methods are warmed up: nothing is finished
    assert run("--methods", "speculative")[0] == 143


def test_prompts_that_are_all_too_long_are_refused(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "long.jsonl"
    file.write_text("".join(json.dumps({"turns": ["x" * size]}) + "\n" for size in (500, 300)))
    code, out, err = run("--tasks", file, "--methods", "speculative")
    assert (code, out) == (2, "")
    assert "every prompt is too long: the shortest has 30" in err
    assert "the target's context holds 128" in err


def test_a_bench_without_one_finished_answer_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: MethodRunner, prompt: Any, max_tokens: int) -> Any:
        raise RuntimeError("out of paper")

    monkeypatch.setattr(MethodRunner, "answer", fail)
    code, out, err = run("--methods", "speculative")
    assert code == 2
    assert by_label(out)["speculative"]["failed"] == 3, "the line of JSON is there all the same"
    assert "error: no answer was finished, the first one failed with RuntimeError: out of paper" in err


def test_an_inflated_target_is_labelled_everywhere(run: Run, tmp_path: Path) -> None:
    _, plain, _ = run("--methods", "speculative")
    code, out, _ = run("--methods", "speculative", "--inflate", 3, "--plot", tmp_path / "p.svg")
    assert code == 0
    assert "INFLATED 3 times" in out
    assert {row["inflate"] for row in last(out)["rows"]} == {3}
    assert "INFLATED" in (tmp_path / "p.svg").read_text()
    assert last(out)["weight_bytes"] > last(plain)["weight_bytes"]
    assert by_label(out)["speculative"]["tokens"] == by_label(plain)["speculative"]["tokens"]


def test_a_guess_of_the_answer_is_told_beforehand(run: Run, tmp_path: Path) -> None:
    """All but every fourth token of what plain decoding answers is as predicted: three of four in each pass."""
    methods = "speculative:drafter=prediction,nodes=8,guess=4,speculative:drafter=ngram"
    code, out, _ = run("--methods", methods, "--out", tmp_path / "out")
    rows = {row["method"]: row for row in json.loads(out.splitlines()[-1])["rows"] if row["task"] == "all"}
    told = rows["speculative:drafter=prediction,nodes=8,guess=4"]
    assert (code, told["equal_text"], told["failed"]) == (0, True, 0)
    assert told["mean_accepted_length"] > 2 > 1
    [(name, judged, written)] = told["sources"]
    assert (name, judged, written) == ("prediction", told["drafted"], told["accepted"])
    assert 0 < written < judged
    assert rows["autoregressive"]["sources"] == []
    lines = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]
    places = {(line["task"], line["prompt"], line["label"]): number for number, line in enumerate(lines)}
    for task, prompt, label in places:
        assert places[task, prompt, "autoregressive"] <= places[task, prompt, label] or "guess" not in label


def test_who_comes_first_moves_on() -> None:
    three = [Contender(name, name) for name in "abc"]
    assert [[one.label for one in rotated(three, by)] for by in (0, 1, 5)] == [list("abc"), list("bca"), list("cab")]


def test_a_prompt_that_does_not_fit_is_a_failed_answer(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"turns": ["x" * 500]}) + "\n" + json.dumps({"turns": ["hello"]}) + "\n")
    with load(tiny, runtime="llama", dtype="float32", method="autoregressive") as llm:
        options = BenchOptions((str(file),), (Contender("autoregressive", "autoregressive"),))
        with Bench(llm, options, Store(None, {}), lambda text: None) as bench:
            bench.measure(lambda what, done, total: None)
            (row,) = bench.rows()
    assert (row.prompts, row.failed) == (1, 1)
    assert "the target's context holds 128" in str(row.reason)


def test_the_gap_of_two_tokens_is_the_targets(tiny: Path) -> None:
    with load(tiny, runtime="llama", dtype="float32", method="autoregressive") as llm:
        text = [5, 6, 7, 8]
        result = llm.generate([text], max_tokens=1, logprobs=300)[0]
        best, second = (token for token, _ in result.logprobs[0].top[:2])
        expected = result.logprobs[0].top[0][1] - result.logprobs[0].top[1][1]
        assert score_gap(llm.target.model, text, (best, second)) == pytest.approx(expected, abs=1e-4)


def test_a_pass_reads_the_weights_once(tiny: Path) -> None:
    with load(tiny, runtime="llama", dtype="float32", method="autoregressive") as llm:
        assert llm.target.model.weight_bytes == sum(values.nbytes for values in weights().values())
    assert Toy().weight_bytes is None, "a model that does not tell"
