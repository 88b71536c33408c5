"""The command line on a tiny random model: output and errors of all commands but chat. No test asserts a speed."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from commands import Run
from commands import run as run
from commands import tiny as tiny
from files import smollm2_file

import outpace
from outpace.api.llm import LLM
from outpace.bench.tune import TuneResult
from outpace.cli import display
from outpace.cli import doctor as doctor_file
from outpace.cli.main import COMMANDS, main
from outpace.core import registry, theory
from outpace.core.errors import install_command
from outpace.core.stats import RoundPlan, RoundStats
from outpace.drafters.ngram import NgramDrafter
from outpace.models.files import cache

FIELDS = {"text", "tokens", "finish_reason", "method", "precision", "seed", "sampling_params", "tokens_per_second"} | {
    "time_to_first_token",
    "mean_accepted_length",
    "draft_acceptance",
    "hit_rate",
}
PROMPT = "hello world 12 hello world 12 hello"


def generate(run: Run, tiny: Path, *arguments: str) -> dict[str, Any]:
    code, out, _ = run("generate", PROMPT, "--target", str(tiny), "--max-tokens", "12", "--json", *arguments)
    assert code == 0
    assert out.count("\n") == 1
    return dict(json.loads(out))


def test_generate_prints_text_to_stdout_and_statistics_to_stderr(run: Run, tiny: Path) -> None:
    found = generate(run, tiny, "--dtype", "float32")
    assert (set(found), found["precision"]) == (FIELDS, "float32")
    code, out, err = run("generate", PROMPT, "--target", str(tiny), "--max-tokens", "12", "--dtype", "float32")
    assert (code, out.rstrip("\n")) == (0, found["text"].rstrip("\n"))
    assert re.fullmatch("auto: .* tokens/s.*\n", err)


def test_explain_shows_the_plan_of_each_round(run: Run, tiny: Path) -> None:
    found = generate(run, tiny, "--explain", "--method", "auto", "--draft", "layers:0", "--drafter", "model")
    assert set(found) == FIELDS | {"rounds"}
    assert sum(one["emitted"] for one in found["rounds"]) == len(found["tokens"])
    for one in found["rounds"]:
        plan = one["plan"]
        assert set(plan) == {"widths", "tokens", "seconds", "price", "why", "estimates"}
        if (known := plan["estimates"]) is not None:
            assert known["requests"] == 1
            assert len(known["acceptance"]) == max(known["levels"], 1)
        assert one["verified_rows"] == 1 or plan["widths"]
        assert 1.0 <= plan["tokens"] <= one["verified_rows"]
        assert plan["why"]
    assert any(one["plan"]["estimates"] for one in found["rounds"])
    words = ("generate", PROMPT, "--target", str(tiny), "--max-tokens", "12", "--explain")
    _, _, err = run(*words, "--method", "auto", "--draft", "layers:0", "--drafter", "model")
    assert "what levels were chosen by" in err
    _, _, err = run(*words, "--method", "auto")
    assert "why no more" in err
    assert "rounds wrote 12 tokens" in err
    _, _, err = run(*words, "--method", "autoregressive")
    assert err.count("not planned by this method") == 12


def test_no_number_of_explain_is_cut_at_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of a long round, while other work runs."""
    monkeypatch.setenv("COLUMNS", "80")
    why = "no draft level pays, which is a long sentence"
    plan = RoundPlan((2, 2, 2, 2, 2, 2), 10.52, 0.0139, 20.0, why)
    display.show_rounds([RoundStats(40, 11, 12, seconds=1.446, verified_rows=41, plan=plan)])
    rows = capsys.readouterr().err.splitlines()
    assert "12 (10.52)  1446.0 (13.9)  no draft lev" in rows[-1]
    assert max(map(len, rows)) <= 80


def test_one_token_has_no_rate(run: Run, tiny: Path) -> None:
    _, _, err = run("generate", PROMPT, "--target", str(tiny), "--max-tokens", "1")
    assert re.fullmatch("auto: 1 token, first token .* s, cut\n", err)


def test_every_method_writes_the_same(run: Run, tiny: Path) -> None:
    drawn = ("--temperature", "1", "--seed", "3", "--top-k", "9")
    plain = generate(run, tiny, "--method", "autoregressive", *drawn)
    for method in (["card"], ["card", "--worker", "inline"], ["card", "--draft", "layers:0", "--width", "2"]):
        found = generate(run, tiny, "--method", *method, *drawn)
        assert (found["text"], found["tokens"]) == (plain["text"], plain["tokens"])
        assert found["hit_rate"] is not None
    assert plain["draft_acceptance"] is None


@pytest.mark.parametrize("place", [0, 1, 2])
def test_passed_through_options_may_be_anywhere(run: Run, tiny: Path, place: int) -> None:
    words = ["generate", "--max-tokens=4", PROMPT, "--target", str(tiny)]
    words[1 + place : 1 + place] = ["--copies", "3", "--deepest=2"]
    assert run(*words)[0] == 0


def test_two_dashes_end_the_options(run: Run, tiny: Path) -> None:
    code, _, err = run("generate", "--raw", "--target", str(tiny), "--max-tokens", "2", "--", "--copies")
    assert (code, "cut at 2 tokens" in err) == (0, True)


def test_the_prompt_from_standard_input(run: Run, tiny: Path) -> None:
    words = ("generate", "-", "--raw", "--target", str(tiny), "--max-tokens", "12", "--json")
    found = json.loads(run(*words, stdin=PROMPT + "\n")[1])
    assert found["tokens"] == generate(run, tiny, "--raw")["tokens"]


def test_the_answer_continues_a_prefill(run: Run, tiny: Path) -> None:
    found = generate(run, tiny, "--prefill", "hello w")
    with outpace.load(str(tiny)) as llm:
        messages = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": "hello w"}]
        expected = llm.chat(messages, continue_final_message=True, max_tokens=12)
        assert tuple(found["tokens"]) == expected.tokens != llm.chat(messages[:1], max_tokens=12).tokens


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--temprature", "1"], "did you mean --temperature?"),
        (["--logit-bias", "7"], "--logit-bias is '7'"),
        (["--n", "2"], "greedy answers are all alike"),
        (["--logprobs", "2"], "--logprobs needs --json"),
        (["--width", "4"], "'width'"),
        (["--copies"], "--copies needs a value"),
        (["--copies", "two"], "copies is 'two'"),
        (["--method", "crad"], "did you mean 'card'?"),
        (["--drafter", "ngrm"], "did you mean 'ngram'?"),
        (["--drafter", ""], "unknown drafter ''"),
        (["--drafter", "model+recycle"], "drafter 'recycle' was removed: use suffix or ngram"),
        (["--inflate", "8B"], "option 'inflate' (--inflate) was removed: use bench/gpu.py"),
        (["--tp-plan", "auto"], "option 'tp_plan' (--tp-plan) was removed: use pp_plan or device_map"),
        (["--drafter", "model"], "needs a draft model"),
        (["--worker", "process", "--method", "speculative"], "method speculative takes no worker: leave out worker"),
        (["--worker", "thread", "--method", "autoregressive"], "method autoregressive takes no worker"),
        (["--worker", "polled", "--method", "card"], "worker polled needs a target on a GPU and a draft on the CPU"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--temperature", "warm"], "--temperature"),
        (["--nodes", "0"], "nodes is 0"),
        (["--threads", "0"], "threads is 0"),
        (["--exact", "--dtype", "float16"], "exact mode is not available"),
        (["--draft", "layers:99"], "layers is '99', it must be numbers from 0 to 1 in rising order"),
        (["--draft", "no/such/draft"], "does not exist"),
        (["--raw", "--system", "Be brief."], "--system needs the chat template"),
        (["--raw", "--prefill", "12"], "--prefill needs the chat template"),
        (["surplus"], "surplus"),
    ],
)
def test_a_bad_option_is_one_sentence_and_exit_2(run: Run, tiny: Path, words: list[str], said: str) -> None:
    code, out, err = run("generate", PROMPT, "--target", str(tiny), "--dtype", "float32", *words)
    assert (code, out, err.count("\n"), said in err) == (2, "", 1, True), err
    assert err.startswith("error: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generate"], "missing argument 'PROMPT'; - reads it from standard input"),
        (["generate", "--version"], "--version is an option of the program, not of a command: `outpace --version`"),
        (["generate", "x", "--temperature", "abc"], "'--temperature': it must be a number\n"),
        (["tune", "--rounds", "1.5"], "'--rounds': it must be a whole number\n"),
        (["generate", "x", "--draft-length", "4"], "(--draft-length) of method auto"),
        (["genrate", "x"], "did you mean 'generate'?"),
        (
            ["foo"],
            "no such command 'foo', there are bench, chat, demo, distill, doctor, draft-worker, edge, forecast, ",
        ),
        (["doctor", "--colour"], "unknown option --colour; "),
        (["generate", "x", "--target", "none.gguf"], "'none.gguf' does not exist"),
        (["demo", "--rounds", "0"], "rounds is 0"),
    ],
)
def test_a_bad_command_is_one_sentence_and_exit_2(run: Run, words: list[str], said: str) -> None:
    code, out, err = run(*words)
    assert (code, out, said in err) == (2, "", True), err


def test_a_truncated_file(run: Run, tiny: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn.gguf"
    torn.write_bytes(tiny.read_bytes()[: tiny.stat().st_size // 2])
    code, _, err = run("generate", "x", "--target", str(torn))
    assert (code, "torn.gguf" in err) == (2, True)


@pytest.mark.parametrize("method", ["speculative", "card"])
def test_a_failing_drafter_is_one_warning(run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    expected = generate(run, tiny, "--method", "autoregressive", "--dtype", "float32")["text"]

    def fail(*_: object) -> list[int]:
        raise RuntimeError("out of ideas")

    monkeypatch.setattr(NgramDrafter, "grow", fail)
    options = ("--max-tokens", "12", "--method", method, "--dtype", "float32")
    code, out, err = run("generate", PROMPT, "--target", str(tiny), *options)
    assert (code, out.rstrip("\n"), err.count("\n")) == (0, expected.rstrip("\n"), 2)
    assert err.startswith(f"warning: the drafter {'' if method == 'card' else 'ngram '}failed")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero; this is a bug in outpace"),
        (MemoryError("std::bad_alloc"), "MemoryError: std::bad_alloc; memory ran out"),
        (KeyError(), "KeyError; this is a bug"),
        (RuntimeError("two\nlines"), "RuntimeError: two; this is a bug"),
    ],
)
def test_an_unexpected_error_is_one_line_with_its_traceback_in_a_file(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    error: Exception,
    said: str,
) -> None:
    def fail(quiet: bool) -> None:
        raise error

    def ended() -> str:
        with pytest.raises(SystemExit) as end:
            main(["doctor"])
        assert end.value.code == 1
        return capsys.readouterr().err

    monkeypatch.setattr(doctor_file, "collect", fail)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (line,) = ended().splitlines()
    assert line.startswith(f"error: {said}")
    (file,) = tmp_path.iterdir()
    assert line.endswith(str(file))
    text = file.read_text()
    assert "in fail" in text
    assert "typer" not in text
    monkeypatch.setenv("OUTPACE_TRACEBACK", "1")
    assert ended().startswith("Traceback")


def test_a_warning_is_one_sentence(run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example with XDG_CACHE_HOME=/dev/null."""
    monkeypatch.setattr("outpace.api.profile.entry_path", cache.entry_path)
    monkeypatch.setattr(cache, "_temporary_cache", functools.cache(cache._temporary_cache.__wrapped__))
    monkeypatch.setenv("OUTPACE_CACHE", "/dev/null")
    code, _, err = run("generate", PROMPT, "--target", str(tiny), "--draft", str(tiny), "--max-tokens", "4")
    assert code == 0
    (line,) = (line for line in err.splitlines() if "cache folder" in line)
    assert line.startswith("warning: the cache folder /dev/null cannot be written")
    assert "UserWarning" not in err


def test_methods_lists_all(run: Run) -> None:
    found = json.loads(run("methods", "--json")[1])
    assert {"card", "speculative", "autoregressive"} <= {method["name"] for method in found["decoders"]}
    shown, said = run("methods")[1:]
    lines = [line.split() for line in shown.splitlines()]
    for kind in registry.KINDS:
        for method in found[kind]:
            assert method["needs"]
            assert lines.count([method["name"], *method["help"].split()]) == 1
            first = (registry.find(kind, method["name"]).__doc__ or "").splitlines()[0]
            assert first.endswith("."), f"the help of {method['name']} goes on in the next line"
            assert method["paper"][0].isupper() or not method["paper"][0].isalpha(), method["name"]
    assert "outpace methods NAME" in said


def test_methods_with_names(run: Run) -> None:
    shown = run("methods", "speculative", "greedy")[1]
    assert "--draft-length 4" in shown
    assert "argmax for each row" in shown
    assert "drafters" not in shown
    assert [method["name"] for method in json.loads(run("methods", "ngram", "--json")[1])["drafters"]] == ["ngram"]
    assert "did you mean 'card'?" in run("methods", "crad")[2]
    assert "--markdown was removed: docs/methods.md has the whole list" in run("methods", "--markdown")[2]


@pytest.mark.parametrize(
    ("chosen", "path", "said"),
    [
        ("auto", "profile.json", "method auto plans with these times for this pair; kept in profile.json"),
        ("card", "p.json", "method auto is method card, which was faster, for this pair; kept in p.json"),
        ("auto", None, "method auto cannot use these times: they could not be stored"),
    ],
)
def test_tune_reports_the_result(
    run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch, chosen: str, path: str | None, said: str
) -> None:
    rates, kept = {"autoregressive": 100.0}, Path(path) if path else None
    found = TuneResult({1: 0.01}, {1: 0.002, 4: 0.003}, rates, chosen, kept)
    monkeypatch.setattr("outpace.bench.tune.tune", lambda *given: found)
    code, _, err = run("tune", "--target", str(tiny))
    assert (code, said in err) == (0, True)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_short_and_ends_with_examples(run: Run, command: str) -> None:
    code, out, _ = run(command, "--help")
    options = [line for line in out.splitlines() if re.match(r"│ +\*? *--", line)]
    assert (code, len(options) <= 13, out.count("$ outpace ") >= 2) == (0, True, True), out


def test_doctor_without_a_model(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.models.files.find.SHIPPED", "no_such_package")
    monkeypatch.setitem(doctor_file.EXTRAS, "none", ("nothing", "json no_such_module"))
    code, out, _ = run("doctor", "--json")
    found = json.loads(out)
    assert (code, found["extras"]["none"]) == (0, False)
    assert "not installed" in found["model"]["missing"]
    shown = run("doctor")[1]
    assert shown.startswith("not ready: ")
    assert "· none" in shown
    assert install_command("NAME").replace(" ", "") in "".join(shown.split())


def test_doctor_has_a_line_for_each_extra() -> None:
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert set(doctor_file.EXTRAS) == set(extras) - {"native", "docs", "dev"}
    modules = {"grpcio": "grpc", "llama_cpp_python": "llama_cpp", "protobuf": "google.protobuf"}
    modules |= {"scikit_learn": "sklearn", "ray[serve]": "ray"}
    for name, (_, brought) in doctor_file.EXTRAS.items():
        whole = [part for package in extras[name] for part in (extras["torch"] if "[torch]" in package else [package])]
        packages = [re.split(r"[<>=]", package)[0].replace("-", "_") for package in whole]
        assert brought.split() == [modules.get(package, package) for package in packages]


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.002, "0.50 times the floor (memory is"), (0.008, "2.00 times the floor")]
)
def test_doctor_calls_the_memory_limit_an_estimate(seconds: float, said: str) -> None:
    model = {"name": "m", "weight_bytes": 10**6, "precision": "int8", "instruction_set": "avx2", "notice": None}
    model |= {"exact": True, "row_counts": [], "floor_seconds": 0.004, "pass_seconds": seconds}
    rows = dict(doctor_file._default_model(model))
    assert rows["floor of a pass"].endswith("(estimate): about 250 tokens/s by plain decoding, if memory is the limit")
    assert said in rows["measured pass"]


@pytest.mark.long
@pytest.mark.smollm2
def test_doctor_measures_the_shipped_model(run: Run) -> None:
    smollm2_file()
    code, out, _ = run("doctor", "--json")
    model = json.loads(out)["model"]
    assert code == 0
    assert (model["precision"], model["weight_bytes"]) == ("file", 96436224)
    assert 0 < model["floor_seconds"] < model["pass_seconds"] * 10


DEMO = ("demo", "--rounds", "1", "--max-tokens", "6")


def test_demo(run: Run, tiny: Path) -> None:
    code, out, _ = run(*DEMO, "--target", str(tiny), "--prompt", "hello hello hello")
    words = " ".join(out.split())
    assert (code, words.count("yes, 1")) == (0, 8)
    assert all(said in words for said in ("all tokens are equal", "depends on the prompt", "the default method: ngram"))
    assert "green above" not in words, "there are no colours in a pipe"
    for draft, drafter in (("layers:1", "model+ngram"), ("none", "ngram")):
        code, out, _ = run(*DEMO, "--target", str(tiny), "--json", "--temperature", "1", "--draft", draft)
        found = json.loads(out)
        assert (code, found["equal_text"], found["drafter"]) == (0, True, drafter)
        methods = ["autoregressive", "auto", "card", "speculative"]
        assert [(row["task"], row["method"]) for row in found["rows"]] == [
            (task, method) for task in ("your prompt", "a story") for method in methods
        ]


def test_demo_fails_when_the_texts_differ(run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = LLM.stream

    def lossy(self: LLM, prompt: Any, *given: Any, **more: Any) -> Any:
        return start(self, prompt if self.method == "autoregressive" else "world", *given, **more)

    monkeypatch.setattr(LLM, "stream", lossy)
    code, out, _ = run(*DEMO, "--target", str(tiny))
    assert (code, "DIFFERENT TEXT" in out) == (1, True)


def test_theory_follows_the_formulas(run: Run) -> None:
    found = json.loads(run("theory", "--verify", "0.02", "--json")[1])
    for row in found["lengths"]:
        gamma = row["draft_length"]
        assert row["tokens"] == pytest.approx(theory.expected_tokens(0.8, gamma))
        assert row["sequential_speedup"] == pytest.approx(theory.speedup(row["tokens"], gamma, 0.1, 1 + 0.02 * gamma))
        assert row["pearl_speedup"] == pytest.approx(theory.pearl_speedup(0.8, gamma, 0.1))
    assert found["limits"] == pytest.approx({"sequential_limit": 5.0, "parallel_limit": 10.0})
    rows = json.loads(run("theory", "--acceptance", "0.9,0.5", "--lengths", "3", "--json")[1])["lengths"]
    assert [row["tokens"] for row in rows] == pytest.approx([1.9, 2.35, 2.575])
    assert [row["pearl_speedup"] for row in rows] == pytest.approx(
        [theory.pearl_tokens([0.9, 0.5], gamma) for gamma in (1, 2, 3)]
    )
    found = json.loads(run("theory", "--acceptance", "0.9,0.5", "--drafts", "0.5,0", "--json")[1])
    assert found["limits"]["sequential_limit"] == pytest.approx(2.8)
    assert [bound["drafts"] for bound in found["bounds"]] == [1, 2, 3]
    assert [bound["ideal_speedup"] for bound in found["bounds"]] == pytest.approx([2.8, 2.9, 2.9])
    assert [1 / bound["rejections_per_token"] for bound in found["bounds"]] == pytest.approx([2.8, 2.9, 2.9])
    found = json.loads(run("theory", "--stages", "4", "--hop", "5", "--json")[1])
    for row in found["lengths"]:
        gamma = row["draft_length"]
        assert row["sequential_speedup"] == pytest.approx(theory.pipeline_speedup(row["tokens"], gamma, 0.1, 4, 5.0))
    best = max(found["lengths"], key=lambda row: row["sequential_speedup"])
    assert found["pipeline"]["travel_time"] == 20.0
    assert found["pipeline"]["travel_time_saved_per_token"] == theory.pipeline_saving(4, 5.0, best["tokens"])
    shown = run("theory", "--drafts", "0.5")[1]
    assert "with 1 free draft (Yin et al.): speedup 5.00, 20.0 rejections in 100 tokens" in shown
    assert "with 2 free drafts (Yin et al.): speedup 5.50, 18.2 rejections in 100 tokens" in shown
    assert "best: 6 drafted tokens a round, 2.47x plain decoding" in run("theory")[2]
    shown = run("theory", "--acceptance", "1.0", "--cost", "0")[1]
    assert all(said in shown for said in ("sequential limit: none", "11.00"))


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--acceptance", "high", "acceptance is 'high'"),
        ("--acceptance", "1.2", "acceptance is 1.2"),
        ("--stages", "0", "stages is 0"),
        ("--hop", "-1", "hop is -1"),
        ("--hop", "2", "which needs a pipeline"),
        ("--drafts", "0.5,1.5", "drafts is 1.5"),
        ("--drafts", "0.5;1", "drafts is '0.5;1'"),
        ("--cost", "-1", "cost"),
        ("--verify", "-1", "verify"),
        ("--overhead", "0.1", "--overhead was removed"),
        ("--lengths", "0", "lengths"),
    ],
)
def test_theory_refuses_invalid_numbers(run: Run, option: str, value: str, says: str) -> None:
    code, _, err = run("theory", option, value)
    assert (code, says in err) == (2, True)
