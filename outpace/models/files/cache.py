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
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import NamedTuple

from outpace.core.errors import UserError
from outpace.core.lazy import lazy_sha256
from outpace.models.files.cache_folder import only_one, temporary_prefix

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


MOST = 64  # hashes remembered
SETTLED = 2_000_000_000  # nanoseconds after which a further write would show in a file's time
BLOCK = 2**20


class Digests(AbstractContextManager["Digests"]):
    """Hashes by file; with the block's end those that are new are kept in `memory`, where that can be written."""

    def __init__(self, memory: Path, root: Path) -> None:
        """Files below `root` are known by their path from there: it may be moved, with `memory` in it."""
        self._memory, self._root = memory, root.resolve()
        self._known = _read(memory)
        self._is_new = False

    def __exit__(self, *error: object) -> None:
        if self._is_new:
            _write(self._memory, dict(list(self._known.items())[-MOST:]))

    def of_file(self, file: Path) -> str:
        """The hash of all that the file holds; UserError if it cannot be read."""
        return self.of_part(file, "", lambda: _hash(file))

    def of_part(self, file: Path, part: str, compute: Callable[[], str]) -> str:
        """What `compute` says of a part of the file, asked only if the file has changed since it was asked last."""
        try:
            status = file.stat()
            key = f"{self._name(file.resolve())}\n{part}"
        except OSError as error:
            raise UserError(f"{file} cannot be read ({error.strerror})") from error
        stamp = f"{status.st_size} {status.st_mtime_ns} "
        known = self._known.pop(key, "")
        is_known = known.startswith(stamp)
        digest = known.removeprefix(stamp) if is_known else compute()
        if is_known or abs(time.time_ns() - status.st_mtime_ns) > SETTLED:
            self._known[key] = stamp + digest  # as the last, for those that were not asked for long are forgotten
            self._is_new |= not is_known
        return digest

    def _name(self, file: Path) -> Path:
        return file.relative_to(self._root) if file.is_relative_to(self._root) else file


def _hash(file: Path) -> str:
    digest = lazy_sha256()
    try:
        with file.open("rb") as stream:
            while block := stream.read(BLOCK):
                digest.update(block)
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror})") from error
    return digest.hexdigest()


def _read(memory: Path) -> dict[str, str]:
    """What was kept; nothing where that is missing or damaged."""
    try:
        found = json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    sound = isinstance(found, dict) and all(isinstance(value, str) for value in found.values())
    return found if sound else {}


def _write(memory: Path, known: dict[str, str]) -> None:
    with suppress(OSError):  # a read-only cache costs the next start the time to read the files
        memory.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{memory.name}.part-", dir=memory.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                json.dump(known, stream, indent=1)
            os.replace(name, memory)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise
