"""Completed drafts in the cache: one for each version of the draft's and the target's files."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from distill_files import target_folder
from safetensors.torch import load_file, save_file
from test_packed import EMBEDDING, draft_of, files_of

from outpace.core.errors import UserError
from outpace.models.files.cache import UNUSED_SECONDS
from outpace.models.files.packed import complete_draft, pack

ROOT = Path(__file__).parents[1]
WHOLE = """
import sys
from pathlib import Path
from outpace.models.files import packed
from outpace.models.files.packed import complete_draft
made, unpacked = [], packed.unpack
packed.unpack = lambda *arguments: made.append(unpacked(*arguments))
print(complete_draft(*map(Path, sys.argv[1:])), len(made), "torch" in sys.modules)
"""


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return target_folder(tmp_path / "target")


@pytest.fixture
def draft(target: Path, tmp_path: Path) -> Path:
    pack(draft_of(target, tmp_path / "draft"), target, tmp_path / "packed")
    return tmp_path / "packed"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def copied(folder: Path, to: Path) -> Path:
    """The same files at another place, written now."""
    shutil.copytree(folder, to, copy_function=shutil.copyfile)
    return to


def copies(cache: Path) -> list[str]:
    return sorted(folder.name for folder in (cache / "drafts").iterdir() if folder.is_dir())


def test_changed_files_have_another_copy(target: Path, draft: Path, cache: Path) -> None:
    found = {complete_draft(draft, target, cache)}
    assert {complete_draft(draft, target, cache)} == found
    tensors = load_file(target / "model.safetensors")
    tensors[EMBEDDING][-1, -1] += 1.0
    save_file(tensors, target / "model.safetensors")
    found.add(made := complete_draft(draft, target, cache))
    assert load_file(made / "model.safetensors")[EMBEDDING][-1, -1] == tensors[EMBEDDING][-1, -1].to(torch.bfloat16)
    (target / "tokenizer_config.json").write_text("{}")
    found.add(made := complete_draft(draft, target, cache))
    assert (made / "tokenizer_config.json").read_text() == "{}"
    own = load_file(draft / "model.safetensors")
    own["model.norm.weight"] = own["model.norm.weight"] + 1
    save_file(own, draft / "model.safetensors")
    found.add(complete_draft(draft, target, cache))
    assert len(found) == 4
    assert copies(cache) == sorted(made.name for made in found)


def test_a_filled_cache_is_enough_at_another_place_and_read_only(
    target: Path, draft: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = files_of(complete_draft(draft, target, cache))
    moved = copied(cache, tmp_path / "moved")
    shutil.rmtree(cache)

    def read_only(*arguments: Any, **options: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("tempfile.mkstemp", "tempfile.mkdtemp", "os.utime", "shutil.rmtree", "os.unlink"):
        monkeypatch.setattr(name, read_only)
    monkeypatch.setattr(Path, "mkdir", read_only)
    found = complete_draft(draft, target, moved)
    assert found.parent == moved / "drafts"
    assert files_of(found) == made
    with pytest.raises(UserError, match=r"cannot be written \(Read-only file system\)"):
        complete_draft(draft, target, tmp_path / "another")


def test_unused_copies_are_removed_when_another_is_made(target: Path, draft: Path, cache: Path) -> None:
    made, long_ago = complete_draft(draft, target, cache), time.time() - UNUSED_SECONDS - 60
    os.utime(made, (long_ago, long_ago))
    assert complete_draft(draft, target, cache).stat().st_mtime > long_ago, "now it is in use"
    os.utime(made, (long_ago, long_ago))
    (target / "tokenizer_config.json").write_text("{}")
    other = complete_draft(draft, target, cache)
    assert copies(cache) == [other.name]


def test_processes_that_want_it_at_once_make_it_once(target: Path, draft: Path, cache: Path) -> None:
    command = [sys.executable, "-c", WHOLE, str(draft), str(target), str(cache)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(2)]
    said = [process.communicate(timeout=120)[0].split() for process in both]
    assert sorted(count for _, count, _ in said) == ["0", "1"]
    assert {has_torch for *_, has_torch in said} == {"False"}, "whose import takes longer, and no interrupt"
    assert {place for place, *_ in said} == {str(cache / "drafts" / copies(cache)[0])}
    assert [file.name for file in (cache / "drafts").iterdir() if file.name.startswith(".")] == []


@pytest.mark.parametrize("stages", range(3))
def test_what_is_interrupted_leaves_nothing(target: Path, draft: Path, cache: Path, stages: int) -> None:
    """At each stage; the next start makes it whole."""
    seen: list[str] = []

    def progress(stage: str, fraction: float) -> None:
        if len(seen) == stages:
            raise KeyboardInterrupt
        seen.append(stage)

    with pytest.raises(KeyboardInterrupt):
        complete_draft(draft, target, cache, progress)
    assert not (cache / "drafts").exists() or not copies(cache)
    assert files_of(complete_draft(draft, target, cache)).keys() >= {"config.json", "model.safetensors"}
