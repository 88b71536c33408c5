"""The conversation: what is asked again, what is left out, what is obeyed; from a pipe and from a terminal."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from files import write_gguf

from outpace.api.stream import Result
from outpace.api.text import Piece
from outpace.cli.chat import ChatFlags, LocalChat
from outpace.cli.main import main
from outpace.core.errors import UserError
from outpace.core.stats import summarize

ROOT = Path(__file__).parent.parent
SECONDS = 60.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", {"llama.context_length": 128})


@pytest.fixture
def environment(tiny: Path) -> dict[str, str]:
    return os.environ | {"OUTPACE_CACHE": str(tiny.parent / "cache"), "PYTHONPATH": str(ROOT)}


def answer(text: str, *tokens: int, seconds: float = 1.0) -> Result:
    return Result(text, tokens, "stop", "card", 0, seconds, 0.1, len(tokens) / seconds, summarize([]))


class Canned:
    """An LLM whose answers are known; `asked` is what it was asked, `interrupts` which answers Ctrl-C ends."""

    method = "card"
    tokenizer = SimpleNamespace(chat=lambda asked: [0] * sum(len(turn["content"]) for turn in asked))

    def __init__(self, *answers: Result | UserError, interrupts: tuple[int, ...] = (), context: int = 10**6) -> None:
        self.answers, self.interrupts = list(answers), interrupts
        self.target = SimpleNamespace(model=SimpleNamespace(max_positions=context))
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
        self.result, self._is_interrupted, self._is_aborted = result, is_interrupted, False

    def __iter__(self) -> Iterator[Piece]:
        yield Piece(self.result.text, self.result.tokens, True)
        if self._is_interrupted:
            signal.raise_signal(signal.SIGINT)
            if not self._is_aborted:
                yield Piece(" and goes on", (), False)

    def abort(self) -> None:
        self._is_aborted = True

    def finish(self) -> Result:
        return self.result


def talk(llm: Any, *lines: str, system: str | None = None) -> LocalChat:
    conversation = LocalChat(llm, ChatFlags(), system, color=False)
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
    assert "\x1b[" not in done.stdout


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
    assert "unknown command /helo, the commands are /help, /reset, /quit" in shown
    assert not conversation.take("/quit")


def converse(tiny: Path, monkeypatch: pytest.MonkeyPatch, lines: str, *options: str) -> int:
    monkeypatch.setenv("OUTPACE_CACHE", str(tiny.parent / "cache"))
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    with pytest.raises(SystemExit) as end:
        main(["chat", "--target", str(tiny), "--drafter", "ngram", *options])
    return int(end.value.code or 0)


def test_the_estimate_of_plain_decoding_asks_for_no_more_than_it_reads(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--min-tokens", "17", "--max-tokens", "20")
    assert converse(tiny, monkeypatch, "hello\nworld\n", *options) == 0
    assert capsys.readouterr().err.count("plain (estimate)") == 2


def test_a_long_conversation_goes_on(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert converse(tiny, monkeypatch, "hello world\n" * 12, "--max-tokens", "20", "--ignore-eos") == 0
    shown = capsys.readouterr().err
    assert (shown.count("tokens/s"), shown.count("error")) == (12, 0)
    assert "were left out; /reset forgets all" in shown


def test_chat_in_a_terminal(tiny: Path, environment: dict[str, str]) -> None:
    """Editing, a question of two lines, history, Ctrl-C at the prompt and Ctrl-D."""
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
            os.write(ours, b"never asked\x03")
            until(b"/help lists the commands", 2)
            until(b"\x1b[?2004h", 5)
            os.write(ours, b"\x04")
            process.wait(SECONDS)
        finally:
            process.kill()
            os.close(ours)
    assert process.returncode == 0
    assert b"hello" in shown
    assert b"Traceback" not in shown
