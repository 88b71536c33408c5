"""Hashes of what large files hold, remembered by path, size and time: a file is read once, not at every start."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from outpace.core.errors import UserError
from outpace.core.lazy import lazy_sha256

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
