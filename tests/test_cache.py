"""The cache folder: what of it is ours, what is removed, what never is; and its locks, one process at a time."""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outpace.cli.main import main
from outpace.core.errors import UserError
from outpace.models.files import cache
from outpace.models.files.cache import exclusive_lock, list_entries, lock_path

HASH = "0123456789abcdef"
OURS = (
    f"Model.Q4_1-{HASH}-v2/model.safetensors",
    f"gguf/model-{HASH}-Q4_1.gguf",
    f"profiles/{HASH}{HASH[:8]}.json",
    f"tables/retrieval-{HASH}.tables",
    f".Model.Q4_1-{HASH}-v2.lock",
    f".Model.Q4_1-{HASH}-v2.part-x_8abcde/config.json",
    f"gguf/.model-{HASH}-Q4_1.gguf.part-abcdefgh",
)
NOT_OURS = (
    "notes.txt",
    "thesis/chapter.md",
    f"model-{HASH}-v2",  # a file
    f"backup-{HASH}-v2/photos/one.png",  # holds folders
    f"model-{HASH[:-1]}-v2/config.json",
    f"{HASH}-v2/model.safetensors",  # without a model's name
    f"gguf/{HASH}.gguf",
    "profiles/mine.json",
    "tables/mine.tables",
    ".hidden.lock",
    ".hidden.part-abcdefgh/file",
)


def filled(folder: Path, *names: str, size: int = 1000) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes(size))
    return folder


def files(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def first(name: str) -> str:
    """The entry that a file belongs to."""
    parts = Path(name).parts
    return "/".join(parts[: 2 if parts[0] in ("gguf", "profiles", "tables") else 1])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    return filled(tmp_path / "cache", *OURS, *NOT_OURS)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def call(*arguments: str) -> str:
        with pytest.raises(SystemExit) as end:
            main(["doctor", *arguments])
        assert end.value.code == 0
        return capsys.readouterr().out

    return call


def test_what_is_ours(folder: Path) -> None:
    assert {str(entry.path.relative_to(folder)) for entry in list_entries(folder)} == set(map(first, OURS))
    assert {entry.bytes for entry in list_entries(folder)} == {1000}


def test_links_are_not_ours(folder: Path, tmp_path: Path) -> None:
    shutil.rmtree(folder)
    elsewhere = filled(tmp_path / "elsewhere", "model.safetensors")
    folder.mkdir()
    (folder / f"Model-{HASH}-v2").symlink_to(elsewhere)
    assert list_entries(folder) == []


def test_a_cache_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "none", tmp_path / "file"):
        assert list_entries(place) == []


def test_clean_removes_what_is_ours_only(folder: Path, run: Callable[..., str]) -> None:
    shown = run("--clean")
    assert files(folder) == set(NOT_OURS)
    assert f"{folder}: entries removed: {len(OURS)}, 0.0 MB" in shown
    assert json.loads(run("--clean", "--json")) == {"folder": str(folder), "bytes": 0, "removed": 0, "kept": []}


def test_clean_leaves_what_another_process_is_making(folder: Path, run: Callable[..., str]) -> None:
    name = f"Model.Q4_1-{HASH}-v2"
    other = holder(folder / name)
    found = json.loads(run("--clean", "--json"))
    other.communicate(timeout=60)
    kept = {each["name"]: each["reason"] for each in found["kept"]}
    names = (name, f".{name}.lock", f".{name}.part-x_8abcde")
    assert kept == dict.fromkeys(names, "another process is making it")
    assert (folder / name / "model.safetensors").exists()


def test_clean_says_why_something_stays(folder: Path, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **options: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    shown = run("--clean")
    assert f"kept Model.Q4_1-{HASH}-v2: Read-only file system" in shown
    assert (folder / f"Model.Q4_1-{HASH}-v2" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (("--unused-days", "10"), {"new", "newer"}),
        (("--max-gib", "0.0000019"), {"new", "newer"}),  # two of three entries of 1,000 bytes
        (("--max-gib", "1"), {"old", "new", "newer"}),
        (("--unused-days", "3", "--max-gib", "1"), {"newer"}),
        ((), set()),
    ],
)
def test_doctor_cleans_by_age_and_size(
    tmp_path: Path,
    run: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    left: set[str],
) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path))
    for name, days in (("old", 20), ("new", 5), ("newer", 1)):
        file = tmp_path / "gguf" / f"{name}-{HASH}-Q4_1.gguf"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(bytes(1000))
        os.utime(file, (time.time() - days * 86400,) * 2)
    found = json.loads(run("--clean", *options, "--json"))
    assert {path.name.partition("-")[0] for path in (tmp_path / "gguf").glob("*.gguf")} == left
    assert (found["removed"], found["bytes"]) == (3 - len(left), 1000 * (3 - len(left)))


def test_doctor_shows_the_cache(folder: Path, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.models.files.find.SHIPPED", "no_such_package")
    filled(folder, f"Large-{HASH}-v2/model.safetensors", size=10**7)
    found = json.loads(run("--json"))["cache"]
    assert (found["folder"], found["bytes"]) == (str(folder), 10**7 + 1000 * len(OURS))
    assert found["entries"][0]["name"] == f"Large-{HASH}-v2"
    assert found["entries"][0]["bytes"] == 10**7
    shown = run()
    assert "10.0 MB  Large-" in shown
    assert "--clean" in shown
    assert files(folder) >= {*OURS, *NOT_OURS}, "looking changes nothing"


def test_doctor_goes_on_without_a_cache_folder(run: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.models.files.find.SHIPPED", "no_such_package")
    monkeypatch.setenv("OUTPACE_CACHE", "~no_such_user/cache")
    found = json.loads(run("--json"))["cache"]
    assert (found["folder"], found["entries"]) == (None, [])
    assert "home folder is not known" in found["missing"]


@pytest.mark.parametrize("folder", ["~no_such_user/cache", "{tmp}/file", "{tmp}/file/deeper", "/proc/x"])
def test_a_cache_folder_that_cannot_be_used_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OUTPACE_CACHE", folder.format(tmp=tmp_path))
    monkeypatch.setattr(cache, "_temporary_cache", functools.cache(cache._temporary_cache.__wrapped__))
    with pytest.warns(UserWarning, match=r"OUTPACE_CACHE.*; until then") as said:
        paths = [cache.entry_path(name) for name in ("profiles/a.json", "gguf/b")]
    assert len(said) == 1
    assert not any(tmp_path in path.parents for path in paths)
    with cache.new_file(paths[0]) as part:
        part.touch()
    assert paths[0].exists()
    shutil.rmtree(paths[0].parents[1])


def test_a_cache_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example in a container that runs with another user id, where HOME is root's."""

    def refuse(*given: Any, **more: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_temporary_cache", lambda: tmp_path / "temporary")
    monkeypatch.setattr(os, "access", lambda *given: False)
    for method in ("exists", "mkdir", "glob"):
        monkeypatch.setattr(Path, method, refuse)
    assert cache.entry_path("profiles/a.json") == tmp_path / "temporary" / "profiles" / "a.json"
    with pytest.raises(UserError, match=r"the cache folder .* cannot be read \(Permission denied\)"):
        list_entries(tmp_path / "cache")


def test_an_entry_of_a_read_only_cache_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "profiles").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.R_OK)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.entry_path("profiles", tmp_path) == tmp_path / "profiles"


def test_an_entry_that_came_into_use_meanwhile_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = folder / f"Model.Q4_1-{HASH}-v2"
    os.utime(model, (0, 0))
    (entry,) = (entry for entry in list_entries(folder) if entry.path == model)
    os.utime(model)
    assert cache.remove_entry(entry) == "another process has just used it"
    assert model.exists()


def test_what_killed_makers_left_is_cleared_away(tmp_path: Path) -> None:
    made = tmp_path / f"Model[x]-{HASH}-v2"
    filled(tmp_path, f".{made.name}.part-abcdefgh/config.json", f".other-{HASH}-v2.part-abcdefgh/config.json")
    filled(made, "torn")
    assert cache.make_once(made, lambda folder: (folder / "whole").exists(), lambda: filled(made, "whole") and None)
    assert files(tmp_path) == {f"{made.name}/whole", f".other-{HASH}-v2.part-abcdefgh/config.json"}
    assert not cache.make_once(made, lambda folder: (folder / "whole").exists(), lambda: pytest.fail("made again"))


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
