"""Remembered hashes: a file is read once for each of its contents, and what is remembered is never wrong or needed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outpace.core.errors import UserError
from outpace.models.files import cache
from outpace.models.files.cache import MAX_DIGESTS, Digests


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are read."""
    found: list[Path] = []
    hashed = cache._hash

    def counting(file: Path) -> str:
        found.append(file)
        return hashed(file)

    monkeypatch.setattr(cache, "_hash", counting)
    return found


def written(file: Path, content: bytes, age: float = 60.0) -> Path:
    file.write_bytes(content)
    os.utime(file, ns=(0, file.stat().st_mtime_ns - int(age * 1e9)))
    return file


def digest(root: Path, file: Path) -> str:
    with Digests(root / "digests.json", root) as known:
        return known.of_file(file)


def test_a_file_is_read_once(root: Path, tmp_path: Path, reads: list[Path]) -> None:
    for file in (written(root / "inside", b"one" * 10**6), written(tmp_path / "outside", b"two")):
        for _ in range(3):
            assert digest(root, file) == hashlib.sha256(file.read_bytes()).hexdigest()
    assert reads == [root / "inside", tmp_path / "outside"]


@pytest.mark.parametrize("change", [lambda file: written(file, b"other"), lambda file: written(file, b"one", 70)])
def test_a_file_that_changed_is_read_again(root: Path, reads: list[Path], change: Callable[[Path], Path]) -> None:
    file = written(root / "file", b"two")
    digest(root, file)
    assert digest(root, change(file)) == hashlib.sha256(file.read_bytes()).hexdigest()
    assert len(reads) == 2


def test_a_file_that_was_just_written_is_not_remembered(root: Path, reads: list[Path]) -> None:
    """A second write within the clock's grain would not show."""
    file = written(root / "file", b"one", 0.0)
    assert digest(root, file) != digest(root, written(file, b"two", 0.0))
    assert len(reads) == 2
    assert not (root / "digests.json").exists()


def test_what_is_remembered_moves_with_its_folder(root: Path, tmp_path: Path, reads: list[Path]) -> None:
    before = digest(root, written(root / "file", b"one"))
    shutil.copytree(root, tmp_path / "moved")  # times too
    assert digest(tmp_path / "moved", tmp_path / "moved" / "file") == before
    assert len(reads) == 1


def test_parts_of_a_file_are_remembered_apart(root: Path) -> None:
    file, asked = written(root / "file", b"one"), list[str]()

    def compute(part: str) -> Callable[[], str]:
        return lambda: asked.append(part) or part.upper()

    for _ in range(2):
        with Digests(root / "digests.json", root) as known:
            assert [known.of_part(file, part, compute(part)) for part in ("a", "b")] == ["A", "B"]
    assert asked == ["a", "b"]


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 10**5, '{"file\\n": 3}', '{"file\\n": "no stamp"}', "\xff"])
def test_a_damaged_memory_is_made_anew(root: Path, content: str) -> None:
    file = written(root / "file", b"one")
    (root / "digests.json").write_bytes(content.encode("latin-1"))
    for _ in range(2):
        assert digest(root, file) == hashlib.sha256(b"one").hexdigest()
    assert len(json.loads((root / "digests.json").read_text())) == 1


def test_a_memory_that_cannot_be_written_is_done_without(
    root: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    file = written(root / "file", b"one")
    monkeypatch.setattr("tempfile.mkstemp", read_only)
    assert digest(root, file) == digest(root, file) == hashlib.sha256(b"one").hexdigest()
    assert len(reads) == 2


def test_only_so_many_are_remembered(root: Path) -> None:
    with Digests(root / "digests.json", root) as known:
        for number in range(MAX_DIGESTS + 10):
            known.of_file(written(root / f"{number}", b"%d" % number))
    kept = json.loads((root / "digests.json").read_text())
    assert list(kept) == [f"{number}\n" for number in range(10, MAX_DIGESTS + 10)]
    with Digests(root / "digests.json", root) as known:
        known.of_file(root / "10")
        known.of_file(root / "0")
    kept = json.loads((root / "digests.json").read_text())
    assert list(kept)[-2:] == ["10\n", "0\n"], "the one that is asked for is not forgotten"
    assert [file.name for file in root.iterdir() if file.name.startswith(".")] == []


def test_a_file_that_is_missing_is_told(root: Path) -> None:
    with pytest.raises(UserError, match=r"none cannot be read \(No such file or directory\)"):
        digest(root, root / "none")
