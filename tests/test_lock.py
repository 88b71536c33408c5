"""The cache's locks: one process at a time, no files left, and file systems without locks."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outpace.core.errors import UserError
from outpace.models.files import cache_folder
from outpace.models.files.cache_folder import exclusive_lock, lock_path

ROOT = Path(__file__).parents[1]
HOLD = """
import sys
from pathlib import Path
from outpace.models.files.cache_folder import exclusive_lock
with exclusive_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
TAKE_TURNS = """
import os, sys
from pathlib import Path
from outpace.models.files.cache_folder import exclusive_lock
log = os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
for _ in range(25):
    with exclusive_lock(Path(sys.argv[1])) as is_held:
        assert is_held
        os.write(log, b"(")
        os.write(log, b")")
"""


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdin=pipe, stdout=pipe, text=True, cwd=ROOT
    )


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
    other = python(HOLD, tmp_path / "made")
    assert other.stdout is not None
    assert other.stdin is not None
    assert other.stdout.readline() == "held\n"
    said = []

    def waiting() -> None:
        said.append(other.poll())
        other.kill() if is_killed else other.stdin.close()

    with exclusive_lock(tmp_path / "made", waiting) as is_held:
        assert is_held
        assert said == [None], "it was asked while the other held the lock"
        other.wait(60)
    other.stdout.close()


def test_who_does_not_want_to_wait_may_raise(tmp_path: Path) -> None:
    other = python(HOLD, tmp_path / "made")
    assert other.stdout is not None
    other.stdout.readline()

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
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match=r"file/below/made cannot be written \(Not a directory\)"),
        exclusive_lock(tmp_path / "file" / "below" / "made"),
    ):
        pytest.fail("there is no such folder")

    def read_only(*arguments: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(cache_folder.Path, "open", read_only)
    with (
        pytest.raises(UserError, match=r"made cannot be written \(Read-only file system\)"),
        exclusive_lock(tmp_path / "made"),
    ):
        pytest.fail("nothing can be written there")
