"""The conversation: what is asked again, what is left out, what is obeyed; from a pipe and from a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import Run, answer
from commands import environment as environment
from commands import run as run
from files import write_gguf
from rich.cells import cell_len
from rich.console import Console

from outpace.api.stream import Result
from outpace.api.text import Piece
from outpace.cli import display
from outpace.cli.chat import ChatFlags, ChatSession, is_loop
from outpace.core.errors import UserError

SECONDS = 60.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", {"llama.context_length": 128})


class Canned:
    """An LLM whose answers are known; `asked` is what it was asked, `interrupts` which answers Ctrl-C ends."""

    method = "card"
    tokenizer = SimpleNamespace(chat=lambda asked: [0] * sum(len(turn["content"]) for turn in asked))

    def __init__(self, *answers: Result | UserError, interrupts: tuple[int, ...] = (), context: int = 10**6) -> None:
        self.answers, self.interrupts = list(answers), interrupts
        self.target = SimpleNamespace(model=SimpleNamespace(max_positions=context))
        self.asked: list[list[dict[str, str]]] = []
        self.options: list[dict[str, Any]] = []

    def stream(self, asked: list[dict[str, str]], **options: Any) -> Any:
        self.options.append(options)
        number = len(self.asked)
        found = self.answers[number]
        self.asked.append(list(asked))
        if isinstance(found, UserError):
            raise found
        return CannedStream(found, number in self.interrupts)


class CannedStream:
    def __init__(self, result: Result, is_interrupted: bool) -> None:
        self.result, self._is_interrupted, self._is_aborted = result, is_interrupted, False

    def __iter__(self) -> Iterator[Piece]:
        yield Piece(self.result.text, self.result.tokens, True, reasoning=self.result.reasoning)
        if self._is_interrupted:
            signal.raise_signal(signal.SIGINT)
            if not self._is_aborted:
                yield Piece(" and goes on", (), False)

    def abort(self) -> None:
        self._is_aborted = True

    def finish(self) -> Result:
        return self.result


def talk(llm: Any, *lines: str, system: str | None = None) -> ChatSession:
    conversation = ChatSession(llm, ChatFlags(), system, color=False)
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


def test_ctrl_c_keeps_what_came(capsys: pytest.CaptureFixture[str]) -> None:
    llm = Canned(answer("half an ans", *range(6)), answer("two", *range(6)), interrupts=(0,))
    talk(llm, "a", "b")
    assert [turn["content"] for turn in llm.asked[1]] == ["a", "half an ans", "b"]
    assert capsys.readouterr().out == "half an ans\ntwo\n"


def test_thoughts_are_shown_apart_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    llm = Canned(replace(answer("one", *range(6)), reasoning="so"), answer("two", *range(6)))
    talk(llm, "a", "b")
    assert llm.asked[1][1] == {"role": "assistant", "content": "one", "reasoning_content": "so"}
    shown = capsys.readouterr()
    assert shown.out == "one\ntwo\n"
    assert shown.err.startswith("so\n")


def test_a_question_that_cannot_be_answered_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    llm = Canned(UserError("too long"), answer("two", *range(6)))
    talk(llm, "a", "/rest", "b")
    assert [turn["content"] for turn in llm.asked[1]] == ["b"]
    shown = capsys.readouterr().err
    assert "error: too long" in shown
    assert "unknown command /rest" in shown


def test_chat_from_a_pipe(run: Run, tiny: Path) -> None:
    words = ("chat", "--target", str(tiny), "--max-tokens", "6", "--color", "--method", "card")
    code, out, err = run(*words, stdin="hello\nworld\n/reset\nhello\n")
    assert (code, err.count("tokens/s")) == (0, 3)
    assert "> " not in out
    assert "\x1b[" not in out


def test_at_the_end_of_the_context_the_oldest_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    texts = [str(number) * 10 for number in range(6)]
    llm = Canned(*(answer(text, *range(6)) for text in texts), context=100)  # a quarter of it is for the answer
    talk(llm, *(f"{letter}" * 10 for letter in "abcdef"), system="brief")
    contents = [[turn["content"][0] for turn in asked[1:]] for asked in llm.asked]
    assert contents == [["a"], [*"a0b"], [*"a0b1c"], [*"a0b1c2d"], [*"b1c2d3e"], [*"c2d3e4f"]]
    assert all(asked[0] == {"role": "system", "content": "brief"} for asked in llm.asked)
    shown = capsys.readouterr().err
    assert shown.count("the oldest question and its answer were left out; /reset forgets all") == 2


def test_one_question_that_is_too_long_forgets_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    llm = Canned(answer("one", *range(6)), UserError("the prompt is too long"), answer("two", *range(6)), context=100)
    talk(llm, "a", "b" * 200, "c")
    assert [turn["content"] for turn in llm.asked[2]] == ["a", "one", "c"]
    assert "error: the prompt is too long" in capsys.readouterr().err


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    llm = Canned(*(answer("one", *range(6)) for _ in range(3)))
    conversation = talk(llm, "/help", "/helo now", "  /not one", "/usr/bin is a folder", "/12", "", "   ")
    assert [asked[-1]["content"] for asked in llm.asked] == ["/not one", "/usr/bin is a folder", "/12"]
    shown = capsys.readouterr().err
    for command in ("/help", "/reset", "/quit"):
        assert f"\n{command} " in f"\n{shown}"
    assert "unknown command /helo, the commands are /help, /set, /system, /save, /reset, /quit" in shown
    assert not conversation.take("/quit")


def test_options_and_the_system_message_change_within_a_conversation(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    llm = Canned(*(answer("one", *range(6)) for _ in range(3)))
    file = tmp_path / "chat.json"
    lines = ("a", "/set temperature 0.5", "/set top-k=7", "/system brief", "b", f"/save {file}", "/system", "c")
    conversation = talk(llm, *lines)
    assert [len(asked) for asked in llm.asked] == [1, 4, 5]
    assert llm.asked[1][0] == {"role": "system", "content": "brief"}
    assert [turn["content"] for turn in json.loads(file.read_text())["messages"]] == ["brief", "a", "one", "b", "one"]
    assert llm.options[0].keys() & {"temperature", "top_k"} == set()
    assert (llm.options[2]["temperature"], llm.options[2]["top_k"]) == (0.5, 7)
    wrong = (
        "/set temprature 1",
        "/set temperature hot",
        "/set temperature -1",
        "/set seed 1.5",
        "/save",
        "/save /no/x",
    )
    for line in wrong:
        assert conversation.take(line)
    shown = capsys.readouterr().err
    for said in (
        "did you mean 'temperature'",
        "temperature is 'hot', it must be a number",
        "temperature is -1.0",
        "seed is '1.5', it must be a whole number",
        "/save needs the name of a file",
        "there is no folder /no",
    ):
        assert f"{said}" in shown
    assert conversation.take("/set")
    assert "temperature 0.5" in capsys.readouterr().err


def test_quotes_hold_several_lines() -> None:
    llm = Canned(answer("one", *range(6)))
    talk(llm, '"""first\nsecond"""')
    assert llm.asked[0][0]["content"] == "first\nsecond"


@pytest.mark.parametrize(
    ("text", "is_repeated"),
    [
        ("He was chosen by the dragons. " * 8, True),
        ("Once. " + "No. It is a trap, she said again. " * 9, True),
        ("He was chosen by the dragons. " * 7, False),
        ("1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, ", False),
        ("-" * 300, False),  # a line, not a sentence
        ("", False),
    ],
)
def test_a_loop_is_the_same_words_many_times(text: str, is_repeated: bool) -> None:
    assert is_loop(text) is is_repeated


def test_chat_in_a_terminal(tiny: Path, environment: dict[str, str]) -> None:
    """Editing, a question of two lines, history, Tab in a command, Ctrl-C at the prompt and Ctrl-D."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "outpace", "chat", "--target", str(tiny), "--max-tokens", "6"]
    environment |= {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    with subprocess.Popen(
        command, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        shown = b""

        def until(text: bytes, count: int = 1) -> None:
            nonlocal shown
            while shown.count(text) < count:
                assert select.select([ours], [], [], SECONDS)[0], shown.decode(errors="replace")
                shown += os.read(ours, 1 << 16)

        try:
            until(b"\x1b[?2004h")  # the prompt takes what is pasted
            for number, keys in enumerate((b"helo\x1b[Dl\r", b"one\x1b\rtwo\r", b"\x1b[A\r"), 1):
                os.write(ours, keys)
                until(b"tokens/s", number)
                until(b"\x1b[?2004h", number + 1)
            os.write(ours, b"/set max_\t")
            until(b"tokens", shown.count(b"tokens") + 1)
            os.write(ours, b" 5\r")
            until(b"max_tokens is 5")
            until(b"\x1b[?2004h", 5)
            os.write(ours, b"never asked\x03")
            until(b"/help lists the commands", 2)
            until(b"\x1b[?2004h", 6)
            os.write(ours, b"\x04")
            process.wait(SECONDS)
        finally:
            process.kill()
            os.close(ours)
    assert process.returncode == 0
    assert b"hello" in shown
    assert b"Traceback" not in shown


def test_accepted_tokens_are_coloured(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    terminal = Console(file=file, force_terminal=True, color_system="standard", highlight=False, markup=False)
    monkeypatch.setattr(display, "stdout", lambda: terminal)
    printer = display.TextPrinter(color=True)
    printer.show(Piece("own [b]", (1,), False))
    printer.show(Piece("drafted\x1b[2J", (2,), True))
    printer.end()
    assert file.getvalue() == "own [b]\x1b[32mdrafted[2J\x1b[0m\n"
    assert display.printable("a\tb\n\x07\x9b é") == "a\tb\n é"


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_words_are_not_broken_at_the_edge_of_a_terminal(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    prose = "The cunning dragon of the mountains\nand 龙龙龙龙龙龙龙龙 longer-than-the-line-is-wide end"
    text = f"{prose}\n```\na = 1 # stays as it is\n```\nx"
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=16, color_system=None, highlight=False, markup=False)
    monkeypatch.setattr(display, "stdout", lambda: console)
    printer = display.TextPrinter()
    for start in range(0, len(text), size):
        printer.write(text[start : start + size])
    printer.end()
    shown = file.getvalue()
    assert shown.split() == text.split()
    assert "a = 1 # stays as it is" in shown
    lines = [line for line in shown.splitlines() if "stays" not in line and "longer" not in line]
    assert all(cell_len(line) <= 16 for line in lines), lines
    assert lines[:3] == ["The cunning ", "dragon of the ", "mountains"]


def test_the_bar_needs_a_terminal_and_a_long_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(is_terminal: bool, **options: Any) -> str:
        file = io.StringIO()
        monkeypatch.setattr(display, "stderr", lambda: Console(file=file, force_terminal=is_terminal))
        with display.loading_bar(**options) as progress:
            progress("converting", 0.5)
        return file.getvalue()

    assert "converting" in shown(True, after=0.0)
    assert shown(False, after=0.0) == shown(True, after=0.0, quiet=True) == shown(True, after=60.0) == ""
