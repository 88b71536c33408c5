"""The command line on a tiny random model: output and errors. No test asserts a speed."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from files import smollm2_file, tokens, write_gguf

from outpace.bench.tune import TuneOptions, TuneResult
from outpace.cli import doctor as doctor_file
from outpace.cli.main import main
from outpace.core import registry
from outpace.core.errors import install_command
from outpace.drafters.ngram import NgramDrafter

Run = Callable[..., tuple[int, str, str]]
FIELDS = {"text", "tokens", "finish_reason", "method", "precision", "seed", "tokens_per_second"} | {
    "time_to_first_token",
    "mean_accepted_length",
    "draft_acceptance",
    "hit_rate",
}
PROMPT = "hello world 12 hello world 12 hello"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture
def run(tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command; return exit status, stdout and stderr."""
    monkeypatch.setenv("OUTPACE_CACHE", str(tiny.parent / "cache"))

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(arguments)
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err, shown.err
        return int(end.value.code or 0), shown.out, shown.err

    return call


def generate(run: Run, tiny: Path, *arguments: str) -> dict[str, Any]:
    code, out, _ = run("generate", PROMPT, "--target", str(tiny), "--max-tokens", "12", "--json", *arguments)
    assert code == 0
    assert out.count("\n") == 1
    return dict(json.loads(out))


def test_generate_prints_text_to_stdout_and_statistics_to_stderr(run: Run, tiny: Path) -> None:
    found = generate(run, tiny, "--dtype", "float32")
    assert (set(found), found["precision"]) == (FIELDS, "float32")
    code, out, err = run("generate", PROMPT, "--target", str(tiny), "--max-tokens", "12", "--dtype", "float32")
    assert code == 0
    assert out.rstrip("\n") == found["text"].rstrip("\n")
    assert err.startswith("auto: ")
    assert "tokens/s" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("drawn", [(), ("--temperature", "1", "--seed", "3", "--top-k", "9")])
def test_every_method_writes_the_same(run: Run, tiny: Path, drawn: tuple[str, ...]) -> None:
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
    code, _, err = run(*words)
    assert (code, "auto" in err) == (0, True)


def test_two_dashes_end_the_options(run: Run, tiny: Path) -> None:
    code, _, err = run("generate", "--raw", "--target", str(tiny), "--max-tokens", "2", "--", "--copies")
    assert (code, "cut at 2 tokens" in err) == (0, True)


def test_the_prompt_from_standard_input(run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = generate(run, tiny, "--raw")
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT + "\n"))
    words = ("generate", "-", "--raw", "--target", str(tiny), "--max-tokens", "12", "--json")
    assert json.loads(run(*words)[1])["tokens"] == expected["tokens"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--temprature", "1"], "did you mean --temperature?"),
        (["--copis", "4"], "did you mean --copies?"),
        (["--stap", "x"], "unknown option --stap"),
        (["--stop", ""], "stop has an empty string"),
        (["--logit-bias", "7"], "--logit-bias is '7'"),
        (["--n", "2"], "greedy answers are all alike"),
        (["--logprobs", "2"], "--logprobs needs --json"),
        (["--quantize", "int8"], "unknown option --quantize"),
        (["--width", "4"], "'width'"),
        (["--copies"], "--copies needs a value"),
        (["--copies", "--raw"], "--copies needs a value"),
        (["--copies", "two"], "copies is 'two'"),
        (["--copies", "0"], "copies is 0"),
        (["--method", "crad"], "did you mean 'card'?"),
        (["--drafter", "ngrm"], "did you mean 'ngram'?"),
        (["--drafter", ""], "unknown drafter ''"),
        (["--drafter", "model"], "needs a draft model"),
        (["--rule", "gumble"], "did you mean 'gumbel'?"),
        (["--rule", "gumbel"], "rule gumbel does not work with temperature 0"),
        (["--worker", "thred"], "did you mean 'thread'?"),
        (["--worker", "process", "--method", "speculative"], "method speculative has no worker: leave out worker"),
        (["--worker", "thread", "--method", "autoregressive"], "method autoregressive has no worker"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--temperature", "warm"], "--temperature"),
        (["--top-p", "0"], "top_p is 0.0"),
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--seed", "-1"], "seed is -1"),
        (["--nodes", "0"], "nodes is 0"),
        (["--threads", "0"], "threads is 0"),
        (["--draft-threads", "0"], "draft_threads is 0"),
        (["--dtype", "foo"], "unknown dtype 'foo'"),
        (["--device", "warp"], "device 'warp' is not available"),
        (["--exact", "--dtype", "float16"], "exact mode is not available"),
        (["--draft", "layers:99"], "between 0 and 1"),
        (["--draft", "layers:x"], "names no layers"),
        (["--draft", "no/such/draft"], "does not exist"),
        (["--raw", "--system", "Be brief."], "--system needs the chat template"),
        (["surplus"], "surplus"),
    ],
)
def test_a_bad_option_is_one_sentence_and_exit_2(run: Run, tiny: Path, words: list[str], said: str) -> None:
    code, out, err = run("generate", PROMPT, "--target", str(tiny), "--dtype", "float32", *words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said in err


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
            "no such command 'foo', there are bench, chat, demo, distill, doctor, generate, ",
        ),
        (["doctor", "--colour"], "no such option: --colour"),
        (["generate", "x", "--target", "none.gguf"], "'none.gguf' does not exist"),
        (["demo", "--rounds", "0"], "rounds is 0"),
    ],
)
def test_a_bad_command_is_one_sentence_and_exit_2(run: Run, words: list[str], said: str) -> None:
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert said in err


def test_an_empty_and_a_too_long_prompt(run: Run, tiny: Path) -> None:
    assert "no tokens" in run("generate", "", "--raw", "--target", str(tiny))[2]
    code, _, err = run("generate", "0123456789" * 20, "--raw", "--target", str(tiny))
    assert (code, "context holds 128" in err) == (2, True)


def test_a_truncated_file_and_a_draft_that_does_not_fit(run: Run, tiny: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn.gguf"
    torn.write_bytes(tiny.read_bytes()[: tiny.stat().st_size // 2])
    code, _, err = run("generate", "x", "--target", str(torn))
    assert (code, "torn.gguf" in err) == (2, True)
    words = tokens()
    words[-1], words[-2] = words[-2], words[-1]
    other = write_gguf(tmp_path / "other.gguf", {"tokenizer.ggml.tokens": words})
    code, _, err = run("generate", "x", "--target", str(tiny), "--draft", str(other))
    assert (code, "does not fit the target" in err) == (2, True)


@pytest.mark.parametrize("method", ["speculative", "card"])
def test_a_failing_drafter_is_one_warning(run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    expected = generate(run, tiny, "--method", "autoregressive", "--dtype", "float32")["text"]

    def fail(*_: object) -> list[int]:
        raise RuntimeError("out of ideas")

    monkeypatch.setattr(NgramDrafter, "grow", fail)
    options = ("--max-tokens", "12", "--method", method, "--dtype", "float32")
    code, out, err = run("generate", PROMPT, "--target", str(tiny), *options)
    assert code == 0
    assert out.rstrip("\n") == expected.rstrip("\n")
    assert err.startswith(f"warning: the drafter {'' if method == 'card' else 'ngram '}failed")
    assert err.count("\n") == 2


def test_a_bug_shows_its_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor_file, "collect", lambda quiet: 1 / 0)
    with pytest.raises(SystemExit) as end:
        main(["doctor"])
    assert end.value.code == 1
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_warning_is_one_sentence(run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example with XDG_CACHE_HOME=/dev/null."""
    monkeypatch.setattr("outpace.planning.profile.cache_folder", lambda: Path("/dev/null/outpace"))
    code, _, err = run("generate", PROMPT, "--target", str(tiny), "--draft", str(tiny), "--max-tokens", "4")
    assert code == 0
    (line,) = (line for line in err.splitlines() if "profile" in line)
    assert line.startswith("warning: the profile /dev/null/outpace/profiles/")
    assert "UserWarning" not in err


def test_methods_lists_all(run: Run) -> None:
    found = json.loads(run("methods", "--json")[1])
    assert {"card", "speculative", "autoregressive"} <= {method["name"] for method in found["decoders"]}
    shown, said = run("methods")[1:]
    for kind in ("decoders", "drafters", "rules"):
        assert all(method["paper"] and method["needs"] for method in found[kind])
        for method in found[kind]:
            assert sum(line.split() == [method["name"], *method["help"].split()] for line in shown.splitlines()) == 1
    assert "outpace methods NAME" in said


def test_methods_with_names(run: Run) -> None:
    shown = run("methods", "speculative", "greedy")[1]
    assert "--draft-length 4" in shown
    assert "argmax for each row" in shown
    assert "drafters" not in shown
    assert [method["name"] for method in json.loads(run("methods", "ngram", "--json")[1])["drafters"]] == ["ngram"]
    assert "did you mean 'card'?" in run("methods", "crad")[2]
    assert "leave out --markdown or the names" in run("methods", "card", "--markdown")[2]


def test_each_method_has_a_one_line_help_and_a_paper() -> None:
    for kind in registry.KINDS:
        for method in (registry.describe(kind, name) for name in registry.names(kind)):
            first = (registry.find(kind, method.name).__doc__ or "").splitlines()[0]
            assert first.endswith("."), f"the help of {method.name} goes on in the next line"
            assert method.paper[:1].isupper() or not method.paper[:1].isalpha(), method.name
            assert method.paper


@pytest.mark.parametrize(
    ("chosen", "path", "said"),
    [
        ("auto", Path("profile.json"), "method auto plans with these times for this pair; kept in profile.json"),
        (
            "card",
            Path("profile.json"),
            "method auto is method card, which was faster, for this pair; kept in profile.json",
        ),
        ("auto", None, "these times are not kept: the cache folder cannot be written"),
    ],
)
def test_tune_reports_the_result(
    run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch, chosen: str, path: Path | None, said: str
) -> None:
    found = TuneResult({1: 0.01}, None, {"autoregressive": 100.0}, chosen, path, {}, TuneOptions())
    monkeypatch.setattr("outpace.bench.tune.tune", lambda *given: found)
    code, _, err = run("tune", "--target", str(tiny))
    assert (code, said in err) == (0, True)


def test_doctor_without_a_model(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.models.files.find.SHIPPED", "no_such_package")
    monkeypatch.setitem(doctor_file.EXTRAS, "none", ("nothing", ("json", "no_such_module")))
    code, out, _ = run("doctor", "--json")
    found = json.loads(out)
    assert (code, found["extras"]["none"]) == (0, False)
    assert "not installed" in found["model"]["missing"]
    assert install_command("none").replace(" ", "") in "".join(run("doctor")[1].split())


def test_doctor_has_a_line_for_each_extra() -> None:
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert set(doctor_file.EXTRAS) == set(extras) - {"native", "docs", "dev"}
    modules = {"llama_cpp_python": "llama_cpp"}
    for name, (_, brought) in doctor_file.EXTRAS.items():
        packages = [re.split(r"[<>=]", package)[0].replace("-", "_") for package in extras[name]]
        assert list(brought) == [modules.get(package, package) for package in packages]


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
def test_doctor_measures_the_shipped_model(capsys: pytest.CaptureFixture[str]) -> None:
    smollm2_file()
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--json"])
    model = json.loads(capsys.readouterr().out)["model"]
    assert end.value.code == 0
    if model == {"missing": doctor_file.NOT_CONVERTED}:
        pytest.skip("without the native kernels it would be converted first")
    expected = {"file": 96436224, "float32": 538060032}  # with the native kernels, and without
    assert model["weight_bytes"] == expected[model["precision"]]
    assert 0 < model["floor_seconds"] < model["pass_seconds"] * 10


def test_help_and_version_load_no_torch() -> None:
    script = "import sys; from outpace.cli import display, doctor, demo, chat, flags, generate, methods, options"
    check = "; heavy = {'torch', 'transformers'} & set(sys.modules); sys.exit(str(heavy) if heavy else 0)"
    lazy = "import sys, types, pathlib; m = types.ModuleType('outpace'); sys.modules['outpace'] = m; "
    lazy += "m.__path__ = [str(pathlib.Path('outpace').resolve())]; "
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", lazy + script + check], cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
