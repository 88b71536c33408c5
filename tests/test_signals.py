"""Ctrl-C, full disks, closed streams and broken pipes on the command line end in one sentence or in silence."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from commands import environment as environment
from commands import tiny as tiny

from outpace.cli import process
from outpace.cli.display import loading_bar

SECONDS = 120.0


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_waits_for_a_safe_point() -> None:
    passed = []

    @process.at_safe_points()
    def work() -> None:
        process.check()
        interrupt()
        passed.append("after the interrupt")
        process.check()
        passed.append("after the safe point")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert passed == ["after the interrupt"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_end_of_the_block_is_a_safe_point() -> None:
    passed = []

    @process.at_safe_points()
    def work(error: Exception | None = None) -> None:
        with process.at_safe_points():
            interrupt()
        passed.append("a block within")
        if error is not None:
            raise error

    with pytest.raises(KeyboardInterrupt):
        work()
    with pytest.raises(ArithmeticError):  # another error comes before the interrupt
        work(ArithmeticError())
    assert passed == ["a block within"] * 2


def test_take_forgets_the_interrupt() -> None:
    with process.at_safe_points():
        assert not process.take()
        interrupt()
        assert process.take()
        assert not process.take()
        process.check()
        interrupt()  # a first one again
        assert process.take()


def test_an_answer_is_stopped_at_once_or_before_it_begins() -> None:
    stopped: list[int] = []
    with process.at_safe_points():
        with process.stopping(lambda: stopped.append(1)):
            interrupt()
            assert stopped == [1]
        with process.stopping(lambda: stopped.append(2)):  # the first interrupt is still pending
            assert stopped == [1, 2]
        assert process.take()
        interrupt()
        assert stopped == [1, 2]
        assert process.take()
    with process.stopping(lambda: stopped.append(3)), pytest.raises(KeyboardInterrupt):
        interrupt()
    assert stopped == [1, 2]


def test_an_interrupt_while_typing() -> None:
    with process.at_safe_points():
        with pytest.raises(KeyboardInterrupt), process.at_any_point():
            interrupt()
        interrupt()
        with pytest.raises(KeyboardInterrupt), process.at_any_point():
            pytest.fail("it came before")
        process.check()


def test_ignored_interrupts_stay_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for block in (process.at_safe_points(), process.at_any_point(), process.stopping(lambda: None)):
            with block:
                interrupt()
                process.check()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_stage_of_loading_is_a_safe_point() -> None:
    def load() -> None:
        with loading_bar() as bar:
            bar("reading", 0.0)
            interrupt()
            bar("reading", 0.5)
            pytest.fail("it went on reading")

    with pytest.raises(KeyboardInterrupt):
        load()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


Script = Callable[..., tuple[int, str, str]]


def start(script: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start a script in which interrupts are not ignored, as they are in background jobs."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    default = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen([sys.executable, "-c", script], preexec_fn=default, **pipes)


@pytest.fixture
def run(tiny: Path, environment: dict[str, str], tmp_path: Path) -> Script:
    """Run a script and then the program in one process; return exit status, stdout and stderr."""

    def run(script: str, *arguments: str) -> tuple[int, str, str]:
        words = ["outpace", *arguments, "--target", str(tiny)]
        code = f"import signal, sys\nsys.argv = {words!r}\n{script}\nfrom outpace.__main__ import main; main()"
        child = start(code, environment | {"OUTPACE_CACHE": str(tmp_path / "cache")})
        out, err = child.communicate(timeout=SECONDS)
        assert "Traceback" not in err, err
        return child.returncode, out, err

    return run


WHEN_IMPORTED = """
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder())
"""
AT_STAGE = """
from outpace.cli import process
check, stages = process.check, []
def interrupted():
    stages.append(1)
    if len(stages) == {count}:
        signal.raise_signal(signal.SIGINT)
    check()
process.check = interrupted
"""
AT_PIECE = """
from outpace.api.stream import Stream
piece, pieces = Stream._piece, []
def interrupted(self, *given):
    pieces.append(1)
    for _ in range({times}):
        len(pieces) == {count} and signal.raise_signal(signal.SIGINT)
    return piece(self, *given)
Stream._piece = interrupted
"""
ANSWER = ("generate", "hello", "--max-tokens", "16000", "--ignore-eos")


@pytest.mark.parametrize("module", ["typer", "outpace.cli.main"])
def test_during_imports_the_signal_ends_the_program(run: Script, module: str) -> None:
    assert run(WHEN_IMPORTED.format(module=module), *ANSWER)[0] == -signal.SIGINT


@pytest.mark.parametrize(
    ("count", "dtype"), [(1, "auto"), *(pytest.param(count, "float32", marks=pytest.mark.long) for count in (1, 3, 6))]
)
def test_interrupted_loading(run: Script, tmp_path: Path, count: int, dtype: str) -> None:
    assert run(AT_STAGE.format(count=count), *ANSWER, "--dtype", dtype)[0] == process.INTERRUPTED
    left = [file.name for file in (tmp_path / "cache").glob(".*.part-*")]
    assert left == []


WAYS: dict[str, Sequence[str]] = {
    "auto": (),
    "card, thread": ("--method", "card", "--drafter", "ngram"),
    "card, process": ("--method", "card", "--drafter", "ngram", "--worker", "process"),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_interrupted_answer(run: Script, way: str) -> None:
    code, out, err = run(AT_PIECE.format(count=9, times=1), *ANSWER, *WAYS[way])
    assert code == process.INTERRUPTED
    assert out.endswith("\n")
    assert err.endswith(", stopped\n")


def test_a_second_interrupt_ends_the_program(run: Script) -> None:
    code, out, _ = run(AT_PIECE.format(count=9, times=2), *ANSWER, "--json")
    assert (code, out) == (-signal.SIGINT, "")


LOUD = """
import sys
from outpace.api.stream import Stream
piece = Stream._piece
def loud(self, *given):
    sys.stderr.write("."); sys.stderr.flush()
    return piece(self, *given)
Stream._piece = loud
from outpace.cli.main import main
main({words})
"""


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_an_interrupt_from_outside(tiny: Path, environment: dict[str, str], form: list[str]) -> None:
    child = start(LOUD.format(words=[*ANSWER, "--target", str(tiny), *form]), environment)
    assert child.stderr is not None
    assert child.stderr.read(8) == "." * 8
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=SECONDS)
    assert child.returncode == process.INTERRUPTED, err
    assert "Traceback" not in err
    if form:
        assert json.loads(out)["finish_reason"] == "abort"
    else:
        assert out.endswith("\n")
        assert ", stopped\n" in err


GENERATE = ("generate", "hello", "--max-tokens", "4", "--drafter", "ngram", "--target", "TINY")
COMMANDS = [("--help",), ("--version",), ("methods",), ("methods", "--json"), GENERATE, (*GENERATE, "--json")]
FULL_DISK = [pytest.param(words, marks=pytest.mark.long if words in COMMANDS[2:5] else ()) for words in COMMANDS]


@pytest.fixture
def outpace(tiny: Path, environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the program with the redirections of a shell."""

    def run(arguments: tuple[str, ...], redirections: str = "") -> subprocess.CompletedProcess[str]:
        words = [str(tiny) if word == "TINY" else word for word in arguments]
        command = ["sh", "-c", f'exec "$@" {redirections}', "sh", sys.executable, "-m", "outpace", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)

    return run


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
@pytest.mark.parametrize("arguments", FULL_DISK, ids=" ".join)
def test_a_full_disk(outpace: Any, arguments: tuple[str, ...]) -> None:
    done = outpace(arguments, "> /dev/full")
    assert done.returncode == 2
    assert done.stderr.endswith("error: standard output cannot be written (No space left on device)\n")
    assert not re.search("Traceback|Exception ignored", done.stderr)


@pytest.mark.parametrize("arguments", COMMANDS[:2] + COMMANDS[-1:], ids=" ".join)
def test_a_closed_output(outpace: Any, arguments: tuple[str, ...]) -> None:
    done = outpace(arguments, ">&-")
    assert (done.returncode, done.stderr) == (2, "error: standard output is closed, there is nowhere to write to\n")


def test_an_output_for_reading_only(outpace: Any) -> None:
    done = outpace(("--version",), "1< /dev/null")
    assert (done.returncode, done.stderr) == (2, "error: standard output cannot be written (Bad file descriptor)\n")


@pytest.mark.parametrize("redirections", ["2>&-", "2> /dev/full"])
def test_stderr_that_cannot_be_written(outpace: Any, redirections: str) -> None:
    assert outpace(("--version",), redirections).stdout.startswith("outpace ")
    done = outpace(("--nonsense",), redirections)
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize(
    ("redirections", "worker"),
    [
        ("<&-", "process"),
        ("<&- 2>&-", "thread"),
        *(pytest.param(*long, marks=pytest.mark.long) for long in (("<&-", "thread"), ("<&- 2>&-", "process"))),
    ],
)
def test_a_closed_input_that_is_not_read(outpace: Any, redirections: str, worker: str) -> None:
    done = outpace((*GENERATE, "--json", "--method", "card", "--worker", worker), redirections)
    assert (done.returncode, done.stdout[:8]) == (0, '{"text":'), done.stderr


@pytest.mark.parametrize("arguments", [("generate", "-"), ("chat", "--target", "TINY")], ids=" ".join)
def test_a_closed_input_that_is_read(outpace: Any, arguments: tuple[str, ...]) -> None:
    done = outpace(arguments, "<&-")
    assert (done.returncode, done.stderr) == (2, "error: standard input is closed, there is nothing to read from\n")


def test_an_input_for_writing_only(outpace: Any) -> None:
    done = outpace(("generate", "-"), "0> /dev/null")
    assert (done.returncode, done.stderr[:38]) == (2, "error: standard input cannot be read (")


def test_a_closed_pipe_is_quiet(tiny: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "outpace", "generate", "hello", "--target", str(tiny)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert not re.search(b"Traceback|Exception ignored", err)
