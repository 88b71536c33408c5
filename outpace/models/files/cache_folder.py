"""Locates the cache folder, and writes files there: one process at a time, whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from outpace.core.errors import UserError


def cache_folder() -> Path:
    """Return the folder for converted models: OUTPACE_CACHE, else XDG_CACHE_HOME/outpace, else ~/.cache/outpace.

    Raises UserError if the path needs a home folder that the system does not know.
    """
    own, shared = os.environ.get("OUTPACE_CACHE"), os.environ.get("XDG_CACHE_HOME", "")
    try:
        if own:
            return Path(own).expanduser()
        is_valid = os.path.isabs(shared)  # the XDG specification says to ignore relative paths
        return (Path(shared) if is_valid else Path.home() / ".cache") / "outpace"
    except RuntimeError as error:
        reason = f"OUTPACE_CACHE is {own!r:.200}, whose" if own else "the cache folder is in the user's home, but this"
        raise UserError(f"{reason} home folder is not known: name a folder by OUTPACE_CACHE") from error


def write_error(path: Path, error: OSError) -> UserError:
    """Return the error for a file that cannot be written, with advice if it belongs in the cache folder."""
    reason = f"{path} cannot be written ({error.strerror or error})"
    try:
        is_cached = cache_folder() in path.parents
    except UserError:  # there is no cache folder
        is_cached = False
    return UserError(f"{reason}: name another folder by OUTPACE_CACHE" if is_cached else reason)


def lock_path(path: Path) -> Path:
    """Return the lock file for `path`, in the same folder."""
    return path.parent / f".{path.name}.lock"


@contextmanager
def exclusive_lock(path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[bool]:
    """Hold the lock of `path`; call `waiting` first if another process holds it (`waiting` may raise).

    Yields False if the file system has no locks: several processes may then run the block at once. Raises UserError if
    nothing can be written next to `path`. The system frees the lock of a killed process.
    """
    from filelock import FileLock, Timeout

    file = lock_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file.open("ab").close()
    except OSError as error:
        raise write_error(path, error) from error
    lock, is_held = FileLock(file, fallback_to_soft=False), True  # a soft lock would outlive a killed process
    try:
        lock.acquire(timeout=0)
    except Timeout:
        waiting()
        lock.acquire()
    except OSError:
        is_held = False
    try:
        yield is_held
    finally:
        with suppress(OSError):  # processes waiting for the removed file open a new one
            file.unlink()
        if is_held:
            lock.release()


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `path` that is renamed to `path` when the block ends; removed if the block
    raises.

    If another process created `path` meanwhile, its folder stays and this one is removed.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=temporary_prefix(path), dir=path.parent))
    except OSError as error:
        raise write_error(path, error) from error
    try:
        yield folder
        for file in folder.iterdir():  # after a power cut the rename could survive without the files' contents
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        folder.chmod(0o755)
        try:
            folder.rename(path)
        except OSError:
            if not path.is_dir():
                raise
    except OSError as error:
        raise write_error(path, error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file next to `path` that replaces `path` when the block ends; removed if the block raises.

    Processes that have the old file open keep its content. Raises OSError.
    """
    handle, name = tempfile.mkstemp(prefix=temporary_prefix(path), dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def temporary_prefix(path: Path) -> str:
    """Return the prefix of the names of temporary files and folders for `path`."""
    return f".{path.name}.part-"
