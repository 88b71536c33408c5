"""Chat, demo, and what happens on Ctrl-C and on a closed pipe. Nothing here asserts a speed."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
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
from outpace.cli import generate as generate_module
from outpace.cli.chat import ChatWriting, Conversation
from outpace.cli.demo import Comparison
from outpace.cli.display import LoadingBar, Page, printable
from outpace.cli.main import main
from outpace.core.errors import UserError
from outpace.core.stats import fold
from outpace.core.types import Step

ROOT = Path(__file__).parent.parent
SECONDS = 60.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", {"llama.context_length": 16384})


@pytest.fixture
def environment(tiny: Path) -> dict[str, str]:
    return os.environ | {"OUTPACE_CACHE": str(tiny.parent / "cache"), "PYTHONPATH": str(ROOT)}


def answer(text: str, *tokens: int, seconds: float = 1.0) -> Result:
    return Result(text, tokens, "stop", "card", 0, seconds, 0.1, len(tokens) / seconds, fold([]))


class Canned:
    """An LLM whose answers are known; `asked` is what it was asked, `interrupts` which answers Ctrl-C ends."""

    method = "card"

    def __init__(self, *answers: Result | UserError, interrupts: tuple[int, ...] = ()) -> None:
        self.answers, self.interrupts = list(answers), interrupts
        self.asked: list[list[dict[str, str]]] = []
        self.plain = 0

    def stream(self, asked: list[dict[str, str]], plain: bool = False, **_: Any) -> Any:
        if plain:
            self.plain += 1
            return CannedStream(answer("plain", *range(8), seconds=2.0), False)
        found = self.answers[len(self.asked)]
        number = len(self.asked)
        self.asked.append(asked)
        if isinstance(found, UserError):
            raise found
        return CannedStream(found, number in self.interrupts)


class CannedStream:
    def __init__(self, result: Result, is_interrupted: bool) -> None:
        self.result, self._is_interrupted = result, is_interrupted

    def __iter__(self) -> Iterator[Piece]:
        yield Piece(self.result.text, self.result.tokens, True)
        if self._is_interrupted:
            raise KeyboardInterrupt

    def close(self) -> None:
        pass

    def finish(self) -> Result:
        return self.result


def talk(llm: Any, *lines: str, system: str | None = None) -> Conversation:
    conversation = Conversation(llm, ChatWriting(), system, color=False)
    for line in lines:
        assert conversation.take(line)
    return conversation


def test_the_conversation_so_far_is_asked_again(capsys: pytest.CaptureFixture[str]) -> None:
    llm = Canned(answer("one", *range(6)), answer("two", *range(6)), answer("three", *range(6)))
    conversation = talk(llm, "a", "b", "/reset", "", "c", system="brief")
    roles = [[turn["role"] for turn in asked] for asked in llm.asked]
    opening = ["system", "user"]
    assert roles == [opening, [*opening, "assistant", "user"], opening]
    assert [turn["content"] for turn in llm.asked[1]] == ["brief", "a", "one", "b"]
    assert not conversation.take("/exit")
    shown = capsys.readouterr()
    assert shown.out == "one\ntwo\nthree\n"
    assert "the conversation is forgotten" in shown.err


def test_the_speedup_is_an_estimate_taken_anew_when_the_text_has_doubled(capsys: pytest.CaptureFixture[str]) -> None:
    llm = Canned(*(answer("one", *range(8)) for _ in range(3)))
    talk(llm, "a long enough question", "b")
    assert llm.plain == 1
    talk(llm, "c" * 100)
    assert llm.plain == 2
    assert capsys.readouterr().err.count("about 2.00x plain (estimate)") == 3


def test_ctrl_c_keeps_what_came(capsys: pytest.CaptureFixture[str]) -> None:
    llm = Canned(answer("half an ans", *range(6)), answer("two", *range(6)), interrupts=(0,))
    talk(llm, "a", "b")
    assert [turn["content"] for turn in llm.asked[1]] == ["a", "half an ans", "b"]
    assert capsys.readouterr().out == "half an ans\ntwo\n"


def test_a_question_that_cannot_be_answered_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    llm = Canned(UserError("too long"), answer("two", *range(6)))
    talk(llm, "a", "/rest", "b")
    assert [turn["content"] for turn in llm.asked[1]] == ["b"]
    shown = capsys.readouterr().err
    assert "error: too long" in shown
    assert "unknown command /rest" in shown


def test_chat_from_a_pipe(tiny: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "outpace.cli.main", "chat", "--target", str(tiny), "--max-tokens", "6"]
    done = subprocess.run(
        [*command, "--color", "--method", "card"],
        input="hello\nworld\n/reset\nhello\n",
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("tokens/s") == 3
    assert done.stderr.count("plain (estimate)") >= 1
    assert "> " not in done.stdout
    assert "\x1b" not in done.stdout


def test_color_marks_accepted_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    terminal = Console(file=file, force_terminal=True, color_system="standard", highlight=False, markup=False)
    monkeypatch.setattr(display, "stdout", lambda: terminal)
    page = Page(color=True)
    page.show(Piece("own [b]", (1,), False))
    page.show(Piece("drafted\x1b[2J", (2,), True))
    page.end()
    assert file.getvalue() == "own [b]\x1b[32mdrafted[2J\x1b[0m\n"
    assert printable("a\tb\n\x07\x9b é") == "a\tb\n é"


def test_a_bar_only_on_a_terminal_and_only_when_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(is_terminal: bool, **options: Any) -> str:
        file = io.StringIO()
        monkeypatch.setattr(display, "stderr", lambda: Console(file=file, force_terminal=is_terminal))
        with LoadingBar(**options) as progress:
            progress("converting", 0.5)
        return file.getvalue()

    assert "converting" in shown(True, after=0.0)
    assert shown(False, after=0.0) == shown(True, after=0.0, quiet=True) == shown(True, after=60.0) == ""


def test_where_two_texts_part() -> None:
    one, same = answer("x", 1, 2, 3), answer("x", 1, 2, 3)
    assert Comparison("", [one], {"card": [same]}).differs_at is None
    assert Comparison("", [one], {"card": [answer("y", 1, 5, 3)]}).differs_at == 1
    assert Comparison("", [one, same], {"card": [same], "speculative": [answer("y", 1, 2)]}).differs_at == 2
    assert Comparison("", [answer("", 7, 1), one], {"card": [answer("", 7, 1), one]}).differs_at == 0


def test_times_that_cannot_be_right_are_said() -> None:
    four_a_pass = fold([Step(drafted=3, accepted=3, emitted=4)])
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


@pytest.mark.smollm2
def test_demo_on_the_shipped_model(capsys: pytest.CaptureFixture[str]) -> None:
    smollm2_file()
    code, out = demo(capsys, "--json")
    first = json.loads(out)["prompts"][0]
    assert (code, first["text"][:4]) == (0, "Dear")


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_ctrl_c_ends_an_answer_cleanly(tiny: Path, environment: dict[str, str], form: list[str]) -> None:
    script = f"""
import sys
from outpace.cli import display, main
from outpace.api.llm import Stream
class Loud(Stream):
    def _piece(self, *given):
        sys.stderr.write("."); sys.stderr.flush()
        return super()._piece(*given)
import outpace.api.llm; outpace.api.llm.Stream = Loud
main.main({["generate", "hello", "--target", str(tiny), "--max-tokens", "16000", *form]})
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background inherits "ignore"
    )
    assert process.stderr is not None
    assert process.stderr.read(8) == b"." * 8
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == generate_module.INTERRUPTED, err
    assert b"Traceback" not in err
    assert out.endswith(b"\n")
    if form:
        assert json.loads(out)["finish_reason"] == "abort"
    else:
        assert b", stopped\n" in err


def test_a_closed_pipe_is_quiet(tiny: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "outpace.cli.main", "generate", "hello", "--target", str(tiny)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert b"Traceback" not in err
    assert b"Exception ignored" not in err
