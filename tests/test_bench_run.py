"""`outpace bench` on a tiny model with stand-in peers: what it measures, keeps and shows; no time is asserted."""

from __future__ import annotations

import json
import re
import signal
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import stand_ins
import torch
from commands import last_line, run_command
from files import model_folder, write_gguf

from outpace.api.llm import load
from outpace.api.params import SamplingParams
from outpace.bench import run as bench_run
from outpace.bench import tasks
from outpace.bench.contenders import PLAIN, parse_methods
from outpace.bench.method_runner import MethodRunner
from outpace.bench.quality import surprise
from outpace.bench.run import Bench, BenchOptions
from outpace.bench.store import ANSWERS, RecordKey, Store
from outpace.core.errors import UserError
from outpace.simulate import trace

Run = Callable[..., tuple[int, str, str]]
COLUMNS = {"task", "method", "peer", "tokens_per_second", "speedup", "mean_accepted_length", "hit_rate", "equal_text"}
MAX_TOKENS = 8
PROMPTS = (("a", "one", "hello world 12 hello"), ("b", "two", "12 12 12"), ("c", "two", "world or world"))
TURNS = ("hello world", "12 hello", "world or")


def write_prompts(file: Path, *entries: dict[str, Any]) -> Path:
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return file


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    entries = [{"id": name, "task": task, "turns": [text]} for name, task, text in PROMPTS]
    return write_prompts(tmp_path_factory.mktemp("tasks") / "prompts.jsonl", *entries)


@pytest.fixture
def talk(tmp_path: Path) -> Path:
    """A conversation of three turns, and one of a single turn."""
    entries = [{"id": "a", "task": "t", "turns": list(TURNS)}, {"id": "b", "task": "t", "turns": ["12"]}]
    return write_prompts(tmp_path / "talk.jsonl", *entries)


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[Any]:
    with load(tiny, runtime="llama", dtype="float32", method="autoregressive") as llm:
        yield llm


@pytest.fixture(scope="module")
def answers(llm: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The prompts and the tiny model's answers, for the stand-ins."""
    encoded = [tuple(llm.target.tokenizer.encode_prompt(text)) for _, _, text in PROMPTS]
    results = llm.generate([list(prompt) for prompt in encoded], max_tokens=MAX_TOKENS)
    return [(prompt, result.tokens) for prompt, result in zip(encoded, results, strict=True)]


@contextmanager
def benching(tiny: Path, prompts: Path, folder: Path, answers: stand_ins.Answers = ()) -> Iterator[Run]:
    """Yield a function that runs a bench on the tiny model, with the stand-in peers: exit code, stdout, stderr. Stdout
    is JSON, or with `is_table` the table."""
    (folder / "peers").mkdir()
    threads = torch.get_num_threads()
    model = ("--target", tiny, "--runtime", "llama", "--dtype", "float32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTPACE_CACHE", str(folder / "cache"))
        stand_ins.install(folder / "peers", answers, patch)
        patch.setattr(bench_run, "REST", 0.0)
        patch.setattr("outpace.core.machine.BUFFER", 8192)
        common = ("bench", *model, "--tasks", prompts, "--max-tokens", MAX_TOKENS)
        yield lambda *words, is_table=False: run_command(*common, *words, *(() if is_table else ("--json",)))
    torch.set_num_threads(threads)


@pytest.fixture
def run(tiny: Path, prompts: Path, answers: stand_ins.Answers, tmp_path: Path) -> Iterator[Run]:
    """Runs a bench: exit code, stdout, stderr."""
    with benching(tiny, prompts, tmp_path, answers) as call:
        yield call


def by_label(out: str, task: str = "all", batch: int = 1) -> dict[str, dict[str, Any]]:
    rows = [row for row in last_line(out)["rows"] if row["task"] == task and row["batch"] == batch]
    return {row["method"] or row["peer"]: row for row in rows}


def test_methods_and_peers_side_by_side(run: Run, tiny: Path, tmp_path: Path) -> None:
    methods = ("card:worker=inline", "speculative:drafter=ngram,draft_length=2")
    kept = ("--out", tmp_path / "out", "--plot", tmp_path / "bench.png")
    what = ("--draft", tiny, "--methods", ",".join(methods), "--peers", "right,coarse", "--batch", "1,2")
    code, out, _ = run(*what, *kept)
    assert code == 0
    found = by_label(out)
    assert list(found) == ["autoregressive", *methods, "right", "coarse"]
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
    assert json.loads((tmp_path / "out" / "rows.json").read_text()) == last_line(out)["rows"]
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert {"processor", "versions", "commit", "command", "floor_seconds", "weight_bytes"} <= last_line(out).keys()
    _, table, _ = run(*what, *kept, is_table=True)  # nothing is measured again
    assert max(map(len, table.splitlines())) <= 80
    assert re.search(
        r"(is fastest: \d+\.\d\dx plain decoding|is fastest; .*), all \d+ texts equal$", " ".join(table.split())
    )
    _, table, _ = run(*what, *kept, "--wide", is_table=True)
    assert "tokens/s by plain decoding, if memory is the limit" in " ".join(table.split()), "the floor is an estimate"


def test_a_peer_that_fails_is_a_row_and_the_others_continue(run: Run, tmp_path: Path) -> None:
    """Peers that write another text, raise, write nothing, die, are not installed or do not start, and a right one."""
    peers = ("wrong", "failing", "silent", "dying", "right")
    kept = ("--out", tmp_path / "out")
    code, out, err = run("--methods", "speculative", "--peers", ",".join(("absent", "crashing", *peers)), *kept)
    assert code == 0
    again = ("--methods", "speculative", "--peers", "failing", *kept)
    table = " ".join(run(*again, is_table=True)[1].split())
    found = by_label(out)
    assert list(found) == ["autoregressive", "speculative", *peers]
    wrong = found["wrong"]
    assert (wrong["equal_text"], wrong["different"], wrong["compared"]) == (False, 3, 3)
    assert wrong["divergence"]["position"] == 3
    assert wrong["divergence"]["score_gap"] > 0, "greedy decoding took the token that the target scores highest"
    assert "wrote token" in table
    assert (found["failing"]["failed"], found["failing"]["reason"]) == (3, "RuntimeError: out of paper")
    assert "failing failed on 2 answers of two: RuntimeError: out of paper" in table
    assert (found["silent"]["failed"], found["silent"]["tokens_per_second"]) == (3, None)
    died = "PeerProcessError: its process ended with status 3"
    assert (found["dying"]["failed"], found["dying"]["reason"]) == (3, died)
    assert found["right"]["failed"] == 0
    assert "absent is left out: peer absent is not installed: run `pip install absent`" in err
    assert "crashing is left out, it failed to start (OSError: no such library)" in err


def limited(patch: pytest.MonkeyPatch, count: int, end: Callable[[], Any]) -> list[int]:
    """Let methods answer `count` prompts, and call `end` instead of the next; return the number left, to be changed."""
    wrote, left = MethodRunner.answer, [count]

    def answer(self: MethodRunner, *given: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            end()
        return wrote(self, *given)

    patch.setattr(MethodRunner, "answer", answer)
    return left


def interrupt() -> None:
    raise KeyboardInterrupt


def test_a_stopped_bench_continues(run: Run, tmp_path: Path) -> None:
    arguments = ("--methods", "speculative", "--out", tmp_path / "out")
    with pytest.MonkeyPatch.context() as patch:
        limited(patch, 8, interrupt)
        code, out, _ = run(*arguments)
    assert code == 130
    assert sum(row["prompts"] for row in by_label(out).values()) == 4, "two warm-ups each, then what was finished"
    before = (tmp_path / "out" / ANSWERS).read_text()
    code, out, _ = run(*arguments)
    assert code == 0
    assert (tmp_path / "out" / ANSWERS).read_text().startswith(before), "nothing is measured twice"
    assert [row["prompts"] for row in by_label(out).values()] == [3, 3]
    with pytest.MonkeyPatch.context() as patch:
        limited(patch, 0, interrupt)
        assert run(*arguments)[0] == 0, "all is stored: no answer is requested"
    assert (tmp_path / "out" / "rows.json").exists()
    code, _, err = run(*arguments, "--seed", 5)
    assert code == 2
    assert "was made with seed 0, now it is 5" in err


def test_sampled_texts_are_equal_too_and_nothing_is_learnt(run: Run, tmp_path: Path) -> None:
    methods = ("auto", "speculative:drafter=ngram")
    _, out, _ = run("--methods", ",".join(methods), "--temperature", 0.9, "--seed", 3, "--rounds", 2)
    for row in (by_label(out)[name] for name in methods):
        assert (row["equal_text"], row["compared"], row["prompts"]) == (True, 6, 3)
    assert not list(tmp_path.glob("cache/profiles/*")), "a bench starts cold and leaves no profile"


def test_a_trace_is_recorded(run: Run, tiny: Path, tmp_path: Path) -> None:
    code, out, _ = run("--draft", tiny, "--trace", tmp_path / "t.trace")
    assert code == 0
    assert [answer.task for answer in trace.load(tmp_path / "t.trace").answers] == ["one", "two", "two"]
    assert last_line(out)["acceptance"] == 1.0, "the draft is the target"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--methods", "speculative:breadth=2"), "unknown option 'breadth' of method speculative"),
        (("--max-tokens", "0"), "max_tokens is 0"),
        (("--trace", "t.trace", "--draft", "none"), "--trace records a pair"),
        (("--compare", "/nowhere/a", "/nowhere/b"), "--compare was removed"),
    ],
)
def test_wrong_arguments_are_refused(run: Run, arguments: tuple[str, ...], message: str) -> None:
    code, _, err = run(*arguments)
    assert code == 2
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--methods", "crad"), "did you mean 'card'"),
        (("--method", "card"), "write --methods card"),
        (("--peers", "vllm"), "unknown peer 'vllm'"),
        (("--peers", "right", "--temperature", "1"), "peers are measured greedily only"),
        (("--batch", "1,x"), "--batch is '1,x'"),
        (("--batch", "4"), "batch is 4, there are 3 prompts in all"),
        (("--prompts", "0"), "prompts is 0"),
        (("--turns", "0"), "turns is 0"),
        (("--rounds", "0"), "rounds is 0"),
        (("--tasks", "/nowhere/p.jsonl"), "/nowhere/p.jsonl cannot be read"),
        (("--plot", "/nowhere/b.png"), "--plot is /nowhere/b.png, but there is no folder /nowhere"),
        (("--plot", "/proc/b.png"), "--plot is /proc/b.png, which cannot be written"),
        (("--out", "{here}/file/below"), "--out is {here}/file/below, but {here}/file is a file"),
        (("--plot", "b.zzz"), "--plot is b.zzz, its name must end with one of"),
        (("--plot", "{here}/b.png"), "--plot needs `pip install matplotlib`; leave it out for the table alone"),
        (("--run-tests",), "--run-tests runs programs in the sandbox of bubblewrap, which is not installed"),
    ],
)
def test_wrong_arguments_are_refused_before_a_model_is_loaded(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr("outpace.api.llm.load", None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    if "matplotlib" in message:
        monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    (tmp_path / "file").touch()
    code, _, err = run(*(word.format(here=tmp_path) for word in arguments))
    assert code == 2
    assert message.format(here=tmp_path) in err
    assert len(err.splitlines()) == 1


def test_files_that_cannot_be_written_are_reported_after_the_line_of_json(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: Path, *rest: object) -> None:
        raise UserError(f"{file.name} cannot be written (No space left on device)")

    monkeypatch.setattr("outpace.models.files.reading.write_json", full)
    monkeypatch.setattr("outpace.bench.plot.plot", lambda found, facts, file: full(file))
    for kept, name in ((("--plot", tmp_path / "b.png"), "b.png"), (("--out", tmp_path / "out"), "rows.json")):
        code, out, err = run("--methods", "speculative", *kept)
        assert code == 2
        assert by_label(out)["speculative"]["prompts"] == 3
        assert f"error: {name} cannot" in err


def test_sigterm_shows_what_is_finished(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    left = limited(monkeypatch, 8, lambda: signal.raise_signal(signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    code, out, _ = run("--methods", "speculative")
    assert code == 143
    assert sum(row["prompts"] for row in by_label(out).values()) == 4
    assert signal.getsignal(signal.SIGTERM) is before
    left[0] = 0  # while the methods are warmed up: nothing is finished
    assert run("--methods", "speculative")[0] == 143


def test_a_prompt_that_is_too_long_fails_alone_and_all_of_them_are_refused(run: Run, tmp_path: Path) -> None:
    """One of two conversations does not fit by its first turn, another by its second."""
    long = [{"turns": ["x" * size]} for size in (500, 300)]
    code, out, err = run("--tasks", write_prompts(tmp_path / "t.jsonl", *long), "--methods", "speculative")
    assert (code, out) == (2, "")
    assert "every prompt is too long: 30" in err
    assert "the target's context holds 128" in err
    file = write_prompts(tmp_path / "t.jsonl", {"turns": ["12", "x" * 500]}, long[0], {"turns": ["12 12", "12"]})
    code, out, _ = run("--tasks", file, "--methods", "speculative:drafter=ngram", "--turns", "2")
    assert code == 0
    rows = {row["task"]: row for row in last_line(out)["rows"] if row["method"] == PLAIN}
    for task, finished in (("t", 2), ("t 2", 1)):
        assert (rows[task]["prompts"], rows[task]["failed"]) == (finished, 1)
        assert "the target's context holds 128" in rows[task]["reason"]


def test_a_bench_without_one_finished_answer_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: MethodRunner, prompt: Any, max_tokens: int) -> Any:
        raise RuntimeError("out of paper")

    monkeypatch.setattr(MethodRunner, "answer", fail)
    code, out, err = run("--methods", "speculative")
    assert code == 2
    assert by_label(out)["speculative"]["failed"] == 3, "the line of JSON is there all the same"
    assert "error: no answer was finished, the first one failed with RuntimeError: out of paper" in err


def test_a_method_may_have_a_prediction(run: Run, tmp_path: Path) -> None:
    """All but every fourth token of plain decoding's answer are as predicted: three of four in each pass."""
    methods = "speculative:drafter=prediction,nodes=8,guess=4,speculative:drafter=ngram"
    code, out, _ = run("--methods", methods, "--out", tmp_path / "out")
    rows = by_label(out)
    guessing = rows["speculative:drafter=prediction,nodes=8,guess=4"]
    assert (code, guessing["equal_text"], guessing["failed"]) == (0, True, 0)
    assert guessing["mean_accepted_length"] > 2
    [(name, verified, written)] = guessing["sources"]
    assert (name, verified, written) == ("prediction", guessing["drafted"], guessing["accepted"])
    assert 0 < written < verified
    assert rows["autoregressive"]["sources"] == []
    lines = [json.loads(line) for line in (tmp_path / "out" / ANSWERS).read_text().splitlines()]
    places = {(line["task"], line["prompt"], line["label"]): number for number, line in enumerate(lines)}
    for task, prompt, label in places:
        assert places[task, prompt, "autoregressive"] <= places[task, prompt, label] or "guess" not in label


def test_the_surprise_of_a_text_is_that_of_its_tokens(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, long = [5, 6, 7], [3 + number % 40 for number in range(100)]
    result = llm.generate([prompt], max_tokens=6, logprobs=0, temperature=1.5, ignore_eos=True)[0]
    expected = -sum(found.logprob for found in result.logprobs)
    assert expected > 1
    assert surprise(llm.target.model, prompt, result.tokens) == pytest.approx(expected, abs=1e-4)
    assert surprise(llm.target.model, prompt, []) == 0.0
    whole = surprise(llm.target.model, prompt, long)
    monkeypatch.setattr("outpace.models.base.TEXT_CHUNK", 7)
    assert surprise(llm.target.model, prompt, long) == pytest.approx(whole, abs=1e-3)


def test_a_bench_of_rules_judges_its_texts_and_continues(run: Run, tiny: Path, tmp_path: Path) -> None:
    entries = [
        {"id": "a", "task": "one", "turns": ["hello world"], "reference": "no such text"},
        {"id": "b", "task": "two", "turns": ["12 12 12"], "choices": ["x", "y"], "reference": "x"},
    ]
    tasks = ("--tasks", write_prompts(tmp_path / "prompts.jsonl", *entries))
    kept = ("--out", tmp_path / "out", "--plot", tmp_path / "plot.svg")
    rules = ("--rules", "gumbel,top_beta,typical:epsilon=0.001", "--temperature", 0.8)
    code, out, _ = run("--draft", tiny, *tasks, *rules, *kept)
    assert code == 0
    lossy = "speculative:rule=typical,epsilon=0.001"
    found = by_label(out)
    cold = [
        f"{name}temperature=0" for name in ("autoregressive:", "speculative:rule=greedy,", "speculative:rule=top_beta,")
    ]
    assert list(found) == ["autoregressive", cold[0], "speculative:rule=gumbel", lossy, *cold[1:]]
    assert [found[label]["equal_text"] for label in ("speculative:rule=gumbel", *cold[:2])] == [True] * 3
    assert found[cold[0]]["perplexity"] == found[cold[1]]["perplexity"] < found["autoregressive"]["perplexity"]
    assert found[cold[1]]["speedup"] == pytest.approx(
        found[cold[1]]["tokens_per_second"] / found[cold[0]]["tokens_per_second"], rel=0.01
    )
    assert found["autoregressive"]["perplexity"] == found["speculative:rule=gumbel"]["perplexity"] > 1
    assert found[lossy]["perplexity"] > 1
    assert found[lossy]["relaxed"] > 0
    assert found["speculative:rule=gumbel"]["relaxed"] is None
    assert {(row["scored"], row["accuracy"]) for row in found.values()} == {(2, 0.0)}
    assert f"{lossy} is lossy" in run("--draft", tiny, *tasks, *rules, *kept, is_table=True)[1]
    ElementTree.fromstring((tmp_path / "plot.svg").read_text())
    written = (tmp_path / "out" / ANSWERS).read_text()
    code, again, _ = run("--draft", tiny, *tasks, *rules, *kept)
    assert code == 0
    for before, after in zip(last_line(out)["rows"], last_line(again)["rows"], strict=True):
        assert before | {"commit": None} == after | {"commit": None}
    assert (tmp_path / "out" / ANSWERS).read_text() == written, "nothing is measured or judged twice"


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("stops", [[], [1], [2, 1], [1, 1, 1]])
def test_each_turn_is_written_once_by_each_method(
    llm: Any, talk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: int, stops: list[int]
) -> None:
    """Four prompts, with the three turns of a conversation: plain decoding's measured answers become the history, also
    if the bench is stopped after some of them and continues in its folder."""
    monkeypatch.setattr(bench_run, "REST", 0.0)
    written: dict[str, list[Sequence[int]]] = defaultdict(list)
    methods = tuple(parse_methods("speculative:drafter=ngram", {}))
    params = SamplingParams(max_tokens=MAX_TOKENS)
    options = BenchOptions((str(talk),), methods, turns=3, rounds=rounds, sampling_params=params)
    said: list[dict[str, str]] = []
    for text in TURNS[:2]:
        said.append({"role": "user", "content": text})
        said.append({"role": "assistant", "content": llm.chat(said, params).text})
    for most in [*stops, 1000]:
        with Bench(llm, options, Store(tmp_path / "out", options.settings(llm)), print) as bench:
            for method in methods:
                _spy(bench, method.label, written[method.label], most if method.label == PLAIN else 1000)
            with pytest.raises(KeyboardInterrupt) if most < 1000 else nullcontext():
                bench.measure(lambda *_: None)
    third = next(bench.encode(one) for one in bench.prompts if one.task == "t 3")
    assert third == tuple(llm.tokenizer.chat([*said, {"role": "user", "content": TURNS[2]}]))
    encoded = sorted(bench.encode(one) for one in bench.prompts)
    assert len(set(encoded)) == 4
    assert {label: sorted(found) for label, found in written.items()} == {
        method.label: sorted(encoded * rounds) for method in methods
    }
    assert {row.task for row in bench.rows()} == {"t", "t 2", "t 3", "all"}
    assert all(row.equal_text for row in bench.rows() if row.label != PLAIN)
    assert bench.store.records[RecordKey(PLAIN, "t 3", "a", 0, 1)].failed is None


def _spy(bench: Bench, label: str, written: list[Sequence[int]], most: int) -> None:
    """Record the prompts of a method; raise KeyboardInterrupt instead of the answer after `most` more."""
    method = bench._engines[label]
    assert isinstance(method, MethodRunner)
    answer, before = method.answer, len(written)

    def spied(prompt: Sequence[int], length: int) -> Any:
        if length == MAX_TOKENS:  # not a warm-up
            if len(written) == before + most:
                raise KeyboardInterrupt
            written.append(tuple(prompt))
        return answer(prompt, length)

    method.answer = spied  # type: ignore[method-assign]


def test_outside_a_measurement_each_earlier_turn_is_written_once(llm: Any, talk: Path) -> None:
    answered: list[Sequence[int]] = []

    def answer(prompt: Sequence[int]) -> Sequence[int]:
        answered.append(prompt)
        return llm.generate(list(prompt), max_tokens=MAX_TOKENS)[0].tokens

    encoded = tasks.encode_all(tasks.collect([str(talk)], 2, 3)[::-1], llm.tokenizer, answer)
    assert len(encoded) == 4
    assert answered == [encoded[3], encoded[2]], "of three turns the first two, not the single turn"


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
