"""The files in the cache folder: made once, listed, and removed. Nothing is touched but what outpace has made there.

    NAME-<hash>-v2/            a model converted from a .gguf file, for other runtimes than the native one
    drafts/<hash>-v2/          a packed draft made whole with its target's embeddings
    gguf/NAME-<hash>-Q.gguf    a model written for llama.cpp
    profiles/<hash>.json       what the planner learnt of a pair of models
    tables/NAME-<hash>.tables  what `outpace tune --corpus` made for a drafter

Beside them are locks (.NAME.lock) and what killed programs left (.NAME.part-...).
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from outpace.core.errors import UserError
from outpace.models.files.cache_place import only_one, temporary_prefix

DRAFTS, DIGESTS = "drafts", "digests.json"
MODEL, DRAFT, LLAMA_CPP, PROFILE = "model", "draft", "model for llama.cpp", "profile"
TABLES = "tables of a drafter"
HASHES, LEFT = "hashes of files", "left by an earlier program"
HEX = "[0-9a-f]"
PLACES = {  # folder, and what the names of our entries there are like, by kind
    "": {MODEL: rf".+-{HEX}{{16}}-v\d+"},
    DRAFTS: {DRAFT: rf"{HEX}{{16}}-v\d+", HASHES: re.escape(DIGESTS)},
    "gguf": {LLAMA_CPP: rf".+-{HEX}{{16}}-\w+\.gguf"},
    "profiles": {PROFILE: rf"{HEX}{{24}}\.json", LEFT: r"tmp\w+\.part"},
    "tables": {TABLES: rf"\w+-{HEX}{{16}}\.tables", LEFT: rf"\.\w+-{HEX}{{16}}\.tables\.\w+\.part"},
}
FOLDERS = (MODEL, DRAFT)  # the other kinds are files
OLD_DRAFT = rf".+-{HEX}{{16}}-v1"  # a draft made whole by outpace 0.1; models are converted as v2 today
UNUSED_SECONDS = 30 * 24 * 3600.0


class Entry(NamedTuple):
    """A file or folder of ours in the cache. `used`: seconds since 1970, as far as is known."""

    path: Path
    kind: str
    bytes: int
    used: float


class _BusyError(Exception):
    """Another process is making the entry."""


def made_once(
    folder: Path, is_whole: Callable[[Path], bool], make: Callable[[], None], waiting: Callable[[], None] = lambda: None
) -> bool:
    """Calls `make` unless the folder is whole; whether it did. Processes that want it at once wait for the first.

    What processes that were killed have left of it is cleared away.
    """
    if is_whole(folder):
        return False
    with only_one(folder, waiting) as is_alone:
        if is_alone:
            for left in folder.parent.glob(glob.escape(temporary_prefix(folder)) + "*"):
                shutil.rmtree(left, ignore_errors=True)
        if is_whole(folder):
            return False
        shutil.rmtree(folder, ignore_errors=True)  # cut, or files were taken out of it
        make()
    return True


def mark_used(path: Path) -> None:
    """Notes that the entry is of use, for `remove_unused`."""
    with suppress(OSError):  # in a read-only cache nothing is removed either
        os.utime(path)


def remove_unused(cache: Path) -> list[Entry]:
    """Removes whole drafts that nobody has used for thirty days, or that this version does not look for."""
    now = time.time()
    stale = [
        entry
        for entry in entries(cache)
        if (entry.kind == DRAFT and now - entry.used > UNUSED_SECONDS)
        or (entry.kind == MODEL and re.fullmatch(OLD_DRAFT, entry.path.name))
    ]
    return [entry for entry in stale if remove(entry) is None]


def entries(cache: Path) -> list[Entry]:
    """What outpace has made there, the largest first."""
    found = [_entry(path, kind) for path, kind in _ours(cache)]
    return sorted((entry for entry in found if entry), key=lambda entry: (-entry.bytes, entry.path))


def others(cache: Path) -> list[Path]:
    """What else stands in the cache folder, and in our folders there."""
    ours = {path for path, _ in _ours(cache)} | {cache / place for place in PLACES}
    return [path for place in PLACES for path in _listed(cache / place) if path not in ours]


def remove(entry: Entry) -> str | None:
    """Removes an entry; None, or why it is still there. What others have open stays theirs until they close it."""

    def busy() -> None:
        raise _BusyError

    path = entry.path
    remains = re.fullmatch(r"\.(.+)\.(lock|part-\w+)", path.name)
    try:
        with only_one(path.parent / remains[1] if remains else path, waiting=busy):
            if path.exists() and path.stat().st_mtime != entry.used and path.suffix != ".lock":
                return "another process has just used it"
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    except _BusyError:
        return "another process is making it"
    except (OSError, UserError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None


def remove_empty(cache: Path) -> None:
    """Removes our folders in the cache that hold nothing any more."""
    for place in filter(None, PLACES):
        with suppress(OSError):  # it is not there, or holds what is not ours
            (cache / place).rmdir()


def _ours(cache: Path) -> Iterator[tuple[Path, str]]:
    """Entries by kind; a link is not ours, nor is a folder that holds folders."""
    for place, kinds in PLACES.items():
        for path in _listed(cache / place):
            for kind, pattern in kinds.items():
                if re.fullmatch(pattern, path.name) and path.is_dir() == (kind in FOLDERS) and _is_flat(path):
                    yield path, kind
                elif re.fullmatch(rf"\.({pattern})\.(lock|part-\w+)", path.name) and _is_flat(path):
                    yield path, LEFT


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _is_flat(path: Path) -> bool:
    return not path.is_symlink() and (path.is_file() or all(file.is_file() for file in _listed(path)))


def _entry(path: Path, kind: str) -> Entry | None:
    try:
        files = [path, *path.iterdir()] if path.is_dir() else [path]
        sizes = [file.stat().st_size for file in files if file.is_file()]
        return Entry(path, kind, sum(sizes), path.stat().st_mtime)
    except OSError:  # it went while we looked
        return None
