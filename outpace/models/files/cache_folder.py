"""Where files of our own are kept, and what is said where they cannot be."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from outpace.core.errors import UserError

if TYPE_CHECKING:
    from filelock import BaseFileLock


def cache_folder() -> Path:
    """Where converted models are kept: OUTPACE_CACHE, else XDG_CACHE_HOME/outpace, else ~/.cache/outpace.

    UserError where a home folder is meant that the system does not know.
    """
    own, shared = os.environ.get("OUTPACE_CACHE"), os.environ.get("XDG_CACHE_HOME", "")
    try:
        if own:
            return Path(own).expanduser()
        is_valid = os.path.isabs(shared)  # by its specification a relative one is to be ignored
        return (Path(shared) if is_valid else Path.home() / ".cache") / "outpace"
    except RuntimeError as error:
        said = (
            f"OUTPACE_CACHE is {own!r:.200}, whose" if own else "the cache folder is to be in the user's home, but this"
        )
        raise UserError(f"{said} home folder is not known: name a folder by OUTPACE_CACHE") from error


def unwritable(path: Path, error: OSError) -> UserError:
    """For what cannot be written, with the way out where it is to lie in the cache folder."""
    said = f"{path} cannot be written ({error.strerror or error})"
    try:
        is_cached = cache_folder() in path.parents
    except UserError:  # it is nowhere
        is_cached = False
    return UserError(f"{said}: name another folder by OUTPACE_CACHE" if is_cached else said)


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


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path` that takes its name at the end of the block; removed if the block raises.

    If another writer took the name meanwhile, its folder stays and this one goes.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=temporary_prefix(path), dir=path.parent))
    except OSError as error:
        raise unwritable(path, error) from error
    try:
        yield folder
        _flush_to_disk(folder)
        folder.chmod(0o755)
        try:
            folder.rename(path)
        except OSError:
            if not path.is_dir():
                raise
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def temporary_prefix(path: Path) -> str:
    """How the names of the temporary folders of `path` start."""
    return f".{path.name}.part-"


def _flush_to_disk(folder: Path) -> None:
    """A rename may outlive a power cut that the files' contents do not, so contents go first."""
    for file in folder.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
