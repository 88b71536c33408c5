"""Processes of our own: what they start with, and that they end within a bounded time whatever they do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outpace.core import child_process

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
Started = list[subprocess.Popen[bytes]]


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    """All processes of a test; none of them may be left."""
    found: Started = []
    really = subprocess.Popen

    def popen(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
        found.append(really(*arguments, **options))  # type: ignore[call-overload]
        return found[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    yield found
    for process in found:
        assert process.returncode is not None, "was not reaped"


def answer(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().decode().strip()
    child_process.stop(process, 60.0)
    return line


def test_it_has_the_paths_the_arguments_and_a_session_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path), ""])
    child = child_process.start("print((sys.path, sys.argv[1:]))", "one", "")
    assert answer(child) == str((sys.path, ["one", ""]))
    assert answer(child_process.start("import os; print(os.getsid(0) == os.getpid())")) == "True"


def test_it_ends_with_its_standard_input() -> None:
    child = child_process.start("sys.exit(len(sys.stdin.read()))")
    assert child.stdin is not None
    child.stdin.write(b"123")
    assert child_process.stop(child, 60.0) == 3
    assert child_process.stop(child) == 3, "it may be ended twice"
    assert child_process.describe_exit(3) == "ended with status 3"
    assert child_process.describe_exit(-signal.SIGSEGV) == "was ended by SIGSEGV"


def test_a_process_that_does_not_end_or_is_stopped_is_killed() -> None:
    child = child_process.start(STUBBORN)
    assert child.stdout is not None
    child.stdout.readline()
    child.terminate()
    assert child_process.stop(child, 0.01) == -signal.SIGKILL
    child = child_process.start("sys.stdin.read()")
    os.kill(child.pid, signal.SIGSTOP)
    assert child_process.stop(child) == -signal.SIGKILL


def test_an_interrupt_while_waiting_kills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    child = child_process.start(STUBBORN)
    wait = child.wait

    def interrupted(timeout: float | None = None) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(child, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        child_process.stop(child, 600.0)
    assert wait() == -signal.SIGKILL


def test_a_process_that_cannot_be_reaped_is_left_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    child = child_process.start("sys.stdin.read()")
    wait, asked = child.wait, list[float | None]()

    def held_up(timeout: float | None = None) -> int:
        asked.append(timeout)
        raise subprocess.TimeoutExpired("", timeout or 0.0)

    monkeypatch.setattr(child, "wait", held_up)
    assert child_process.stop(child, 0.5) == -signal.SIGKILL
    assert len(asked) == 2
    assert None not in asked, "an unbounded wait"
    wait()
