"""One process at a time makes what goes to a path in the cache; the others wait and find it there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from outpace.models.files.cache_place import unwritable

if TYPE_CHECKING:
    from filelock import BaseFileLock


def lock_file(path: Path) -> Path:
    """The file beside `path` that is locked while `path` is made."""
    return path.parent / f".{path.name}.lock"


@contextmanager
def only_one(path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[bool]:
    """Holds the lock of `path`; `waiting` is called first where another holds it, and may raise.

    False where the file system has no locks: then several may be in the block at once. UserError where nothing can be
    written beside `path`. The system frees the lock of a process that is killed.
    """
    from filelock import FileLock

    file = lock_file(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file.open("ab").close()
    except OSError as error:
        raise unwritable(path, error) from error
    lock = FileLock(file, fallback_to_soft=False)  # a lock that is a mere file would outlive a process that is killed
    is_held = _acquired(lock, waiting)
    try:
        yield is_held
    finally:
        with suppress(OSError):  # whoever waits for the file that is removed here asks for a new one
            file.unlink()
        if is_held:
            lock.release()


def _acquired(lock: BaseFileLock, waiting: Callable[[], None]) -> bool:
    from filelock import Timeout

    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            waiting()
            lock.acquire()
    except OSError:
        return False
    return True
