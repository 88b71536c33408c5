"""Full disks, closed streams and broken pipes end in one sentence or in silence, never in a traceback."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import environment as environment
from commands import tiny as tiny

SECONDS = 120.0
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
