"""Output of chat and demo. No test asserts a speed."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from files import smollm2_file, write_gguf
from rich.console import Console

from outpace.api.llm import LLM
from outpace.api.stream import Result
from outpace.api.text import Piece
from outpace.cli import display
from outpace.cli.demo import Comparison
from outpace.cli.display import LoadingBar, TextPrinter, printable
from outpace.cli.main import main
from outpace.core.stats import RoundStats, summarize

ROOT = Path(__file__).parent.parent
SECONDS = 60.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", {"llama.context_length": 16384})


@pytest.fixture
def environment(tiny: Path) -> dict[str, str]:
    return os.environ | {"OUTPACE_CACHE": str(tiny.parent / "cache"), "PYTHONPATH": str(ROOT)}


def answer(text: str, *tokens: int, seconds: float = 1.0) -> Result:
    return Result(text, tokens, "stop", "card", 0, seconds, 0.1, len(tokens) / seconds, summarize([]))


def test_accepted_tokens_are_coloured(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    terminal = Console(file=file, force_terminal=True, color_system="standard", highlight=False, markup=False)
    monkeypatch.setattr(display, "stdout", lambda: terminal)
    printer = TextPrinter(color=True)
    printer.show(Piece("own [b]", (1,), False))
    printer.show(Piece("drafted\x1b[2J", (2,), True))
    printer.end()
    assert file.getvalue() == "own [b]\x1b[32mdrafted[2J\x1b[0m\n"
    assert printable("a\tb\n\x07\x9b é") == "a\tb\n é"


def test_the_bar_needs_a_terminal_and_a_long_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(is_terminal: bool, **options: Any) -> str:
        file = io.StringIO()
        monkeypatch.setattr(display, "stderr", lambda: Console(file=file, force_terminal=is_terminal))
        with LoadingBar(**options) as progress:
            progress("converting", 0.5)
        return file.getvalue()

    assert "converting" in shown(True, after=0.0)
    assert shown(False, after=0.0) == shown(True, after=0.0, quiet=True) == shown(True, after=60.0) == ""


def test_the_first_difference_of_texts() -> None:
    one, same = answer("x", 1, 2, 3), answer("x", 1, 2, 3)
    assert Comparison("", [one], {"card": [same]}).differs_at is None
    assert Comparison("", [one], {"card": [answer("y", 1, 5, 3)]}).differs_at == 1
    assert Comparison("", [one, same], {"card": [same], "speculative": [answer("y", 1, 2)]}).differs_at == 2
    assert Comparison("", [answer("", 7, 1), one], {"card": [answer("", 7, 1), one]}).differs_at == 0


def test_implausible_times_are_reported() -> None:
    four_a_pass = summarize([RoundStats(drafted=3, accepted=3, emitted=4)])
    slow, fast = answer("", *range(10), seconds=2.0), answer("", *range(10), seconds=1.0)
    card = replace(fast, figures=four_a_pass)
    assert not Comparison("", [slow], {"card": [card]}).is_disturbed
    assert Comparison("", [slow, fast], {"card": [card]}).is_disturbed
    too_fast = replace(card, tokens_per_second=30.0)
    assert Comparison("", [slow], {"card": [card], "speculative": [too_fast]}).is_disturbed


def demo(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as end:
        main(["demo", "--rounds", "1", "--max-tokens", "6", *arguments])
    return int(end.value.code or 0), capsys.readouterr().out


def test_demo(tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tiny.parent / "cache"))
    code, out = demo(capsys, "--target", str(tiny), "--prompt", "hello hello hello", "--copies", "4")
    assert (code, out.count("tokens are equal")) == (0, 2)
    assert "speedup" in out
    assert "depends on the prompt" in " ".join(out.split())
    assert "green above" not in " ".join(out.split()), "there are no colours in a pipe"
    assert "the default method: ngram" in out
    for draft, drafter in (("layers:1", "model+ngram"), ("none", "ngram")):
        code, out = demo(capsys, "--target", str(tiny), "--json", "--temperature", "1", "--draft", draft)
        found = json.loads(out)
        assert (code, found["equal_text"], len(found["prompts"])) == (0, True, 2)
        methods = ["plain decoding", *(f"{name}, {drafter}" for name in ("auto", "card", "speculative"))]
        assert [row["method"] for row in found["prompts"][0]["methods"]] == methods


def test_demo_fails_when_the_texts_differ(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tiny.parent / "cache"))
    start = LLM.stream

    def lossy(self: LLM, prompt: Any, *, plain: bool = False, **options: Any) -> Any:
        return start(self, prompt if plain else "world", plain=plain, **options)

    monkeypatch.setattr(LLM, "stream", lossy)
    code, out = demo(capsys, "--target", str(tiny))
    assert (code, "DIFFERENT TEXT" in out) == (1, True)


@pytest.mark.long
@pytest.mark.smollm2
def test_demo_on_the_shipped_model(capsys: pytest.CaptureFixture[str]) -> None:
    smollm2_file()
    code, out = demo(capsys, "--json")
    first = json.loads(out)["prompts"][0]
    assert (code, first["text"][:4]) == (0, "Dear")
