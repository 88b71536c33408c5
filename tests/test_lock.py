"""The cache's locks: one process at a time, no files left, and file systems without locks."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outpace.core.errors import UserError
from outpace.models.files import cache
from outpace.models.files.cache import exclusive_lock, lock_path

ROOT = Path(__file__).parents[1]
HOLD = """
import sys
from pathlib import Path
from outpace.models.files.cache import exclusive_lock
with exclusive_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
TAKE_TURNS = """
import os, sys
from pathlib import Path
from outpace.models.files.cache import exclusive_lock
log = os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
for _ in range(25):
    with exclusive_lock(Path(sys.argv[1])) as is_held:
        assert is_held
        os.write(log, b"(")
        os.write(log, b")")
"""


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    command, pipe = [sys.executable, "-c", code, *map(str, arguments)], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)


def holder(path: Path) -> subprocess.Popen[str]:
    """A process that holds the lock until its input ends."""
    process = python(HOLD, path)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_processes_take_turns(tmp_path: Path) -> None:
    """The lock's file goes at each end of a turn, while the others wait for it."""
    processes = [python(TAKE_TURNS, tmp_path / "made", tmp_path / "log") for _ in range(4)]
    for process in processes:
        process.communicate(timeout=120)
    assert [process.returncode for process in processes] == [0] * 4
    assert (tmp_path / "log").read_bytes() == b"()" * 100
    assert [file.name for file in tmp_path.iterdir()] == ["log"]


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_other_is_waited_for(tmp_path: Path, is_killed: bool) -> None:
    other, said = holder(tmp_path / "made"), []

    def waiting() -> None:
        said.append(other.poll())
        other.kill() if is_killed else other.stdin.close()  # type: ignore[union-attr]

    with exclusive_lock(tmp_path / "made", waiting) as is_held:
        assert is_held
        assert said == [None], "it was called while the other held the lock"
        other.wait(60)


def test_waiting_may_raise(tmp_path: Path) -> None:
    other = holder(tmp_path / "made")

    def waiting() -> None:
        raise RuntimeError("no time")

    with pytest.raises(RuntimeError, match="no time"), exclusive_lock(tmp_path / "made", waiting):
        pytest.fail("the other holds it")
    assert lock_path(tmp_path / "made").exists(), "it is the other's"
    other.communicate(timeout=60)
    with exclusive_lock(tmp_path / "made", waiting) as is_held:
        assert is_held


@pytest.mark.skipif(os.name != "posix", reason="flock")
@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    def flock(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", flock)
    with exclusive_lock(tmp_path / "made") as is_held:
        assert not is_held
    assert list(tmp_path.iterdir()) == []
    assert not recwarn.list


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*arguments: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    def refused(path: Path, words: str) -> None:
        with pytest.raises(UserError, match=rf"made cannot be written \({words}\)"), exclusive_lock(path / "made"):
            pytest.fail("nothing can be written there")

    (tmp_path / "file").write_text("")
    refused(tmp_path / "file" / "below", "Not a directory")
    monkeypatch.setattr(cache.Path, "open", read_only)
    refused(tmp_path, "Read-only file system")
