"""Locates the cache folder, writes files whole or not at all, and lists and removes what outpace created there.

    NAME-<hash>-v4/            a model converted from a .gguf file, for runtimes other than the native one
    gguf/NAME-<hash>-Q.gguf    a model written for llama.cpp
    profiles/<hash>.json       the planner's measurements of a model pair
    tables/NAME-<hash>.tables  tables that `outpace tune --corpus` made for a drafter

The folder also holds locks (.NAME.lock) and leftovers of killed programs (.NAME.part-...).
"""

from __future__ import annotations

import atexit
import functools
import glob
import os
import re
import secrets
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from outpace.core.errors import UserError

if TYPE_CHECKING:
    from hashlib import _Hash

_ENTRY = re.compile(  # paths in the cache folder; only the first is that of a folder
    r"[^/]+-[0-9a-f]{16}-v\d+|gguf/[^/]+-[0-9a-f]{16}-\w+\.gguf|profiles/[0-9a-f]{24}\.json|tables/\w+-[0-9a-f]{16}\.tables"
)
_LEFTOVER = re.compile(r"\.(.+)\.(?:lock|part-\w+)")  # a file or folder of an entry that is being made
ENDS_READ = 2**20  # bytes hashed at each end of a file


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


def entry_path(name: str, cache: Path | None = None) -> Path:
    """Return the path of an entry in the cache folder, or in a temporary folder, with one warning, if the cache folder
    has no such entry and cannot be written."""
    try:
        path = (cache or cache_folder()) / name
    except UserError:
        return _temporary_cache() / name
    with suppress(OSError):  # tried, because root is said to have access even to /proc
        path.parent.mkdir(parents=True, exist_ok=True)
    is_usable = os.access(path, os.R_OK) or os.access(path.parent, os.W_OK | os.X_OK)
    return path if is_usable else _temporary_cache() / name


@functools.cache
def _temporary_cache() -> Path:
    """Make a folder that takes the place of the cache folder and is removed when this process ends."""
    try:
        reason = f"the cache folder {cache_folder()} cannot be written: name another one by OUTPACE_CACHE"
    except UserError as error:
        reason = str(error)
    warnings.warn(f"{reason}; until then each run converts and measures anew", stacklevel=3)
    folder = Path(tempfile.mkdtemp(prefix="outpace-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def write_error(path: Path, error: BaseException) -> UserError:
    """Return the error for a file that cannot be written, with advice if it belongs in the cache folder."""
    reason = f"{path} cannot be written ({getattr(error, 'strerror', None) or error})"
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
def replaced_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces `path` when the block ends; if the block raises, `path` stays."""
    replacement = path.with_name(f".{path.name}.new")
    shutil.rmtree(replacement, ignore_errors=True)
    with new_folder(replacement) as unfinished:
        yield unfinished
    shutil.rmtree(path, ignore_errors=True)
    replacement.rename(path)


@contextmanager
def new_file(path: Path, after_failure: str = "") -> Iterator[Path]:
    """Yield a temporary path next to `path`; its file replaces `path` when the block ends, and is removed if it raises.

    Processes that have the old file open keep its content. Raises UserError, which ends with `after_failure`, if the
    file cannot be written.
    """
    part = path.parent / f"{temporary_prefix(path)}{secrets.token_hex(4)}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield part
        with part.open("rb") as stream:
            os.fsync(stream.fileno())
        os.replace(part, path)
    except BaseException as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        if isinstance(error, OSError) or type(error).__name__ == "SafetensorError":
            raise UserError(f"{write_error(path, error)}{after_failure and '; '}{after_failure}") from error
        raise


def temporary_prefix(path: Path) -> str:
    """Return the prefix of the names of temporary files and folders for `path`."""
    return f".{path.name}.part-"


class CacheEntry(NamedTuple):
    """A file or folder in the cache that outpace created. `used`: last use, in seconds since 1970, as far as known."""

    path: Path
    bytes: int
    used: float


def lazy_sha256(data: bytes = b"") -> _Hash:
    """Return hashlib's SHA-256; hashlib loads OpenSSL, which takes 4 MB of memory."""
    import hashlib

    return hashlib.sha256(data)


def identity(files: Iterable[Path]) -> str:
    """Return a short hash of files from names, sizes, times and both ends, cheap however large they are.

    UserError if one cannot be read.
    """
    digest = lazy_sha256()
    for file in files:
        try:
            with file.open("rb") as stream:
                status = file.stat()
                digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}".encode())
                digest.update(stream.read(ENDS_READ))
                stream.seek(max(0, status.st_size - ENDS_READ))
                digest.update(stream.read(ENDS_READ))
        except OSError as error:
            raise UserError(f"{file} cannot be read ({error.strerror})") from error
    return digest.hexdigest()[:16]


def sampled_digest(file: Path) -> str:
    """Hash a file's size, beginning, middle and end: enough to distinguish weights without reading all of them."""
    size, digest = file.stat().st_size, lazy_sha256()
    digest.update(str(size).encode())
    with file.open("rb") as stream:
        for start in sorted({0, size // 2, max(size - ENDS_READ, 0)}):
            stream.seek(start)
            digest.update(stream.read(ENDS_READ))
    return digest.hexdigest()[:16]


def weights_digest(path: Path) -> str:
    """Return `sampled_digest` of a .gguf file, or of the safetensors in a model's folder."""
    return " ".join(map(sampled_digest, sorted(path.glob("*.safetensors")) if path.is_dir() else [path]))


def make_once(
    folder: Path, is_whole: Callable[[Path], bool], make: Callable[[], None], waiting: Callable[[], None] = lambda: None
) -> bool:
    """Call `make` unless the folder is complete; return whether it was called. Concurrent processes wait for the first.

    Leftovers of killed processes for the same folder are removed.
    """
    if is_whole(folder):
        return False
    with exclusive_lock(folder, waiting) as is_alone:
        if is_alone:
            for left in folder.parent.glob(glob.escape(temporary_prefix(folder)) + "*"):
                shutil.rmtree(left, ignore_errors=True)
        if is_whole(folder):
            return False
        shutil.rmtree(folder, ignore_errors=True)  # incomplete: truncated, or files were removed
        make()
    return True


def list_entries(cache: Path) -> list[CacheEntry]:
    """List the entries that outpace created, and leftovers of killed programs, largest first.

    Raises UserError if the folder cannot be read.
    """
    try:
        found = [_entry(path, cache) for path in [*cache.glob("*"), *cache.glob("*/*")]]
    except OSError as error:
        raise UserError(f"the cache folder {cache} cannot be read ({error.strerror})") from error
    return sorted((entry for entry in found if entry), key=lambda entry: (-entry.bytes, entry.path))


def remove_entry(entry: CacheEntry) -> str | None:
    """Remove an entry; return None, or the reason why it is still there. Processes that have it open keep their
    data."""

    def busy() -> None:
        raise UserError("another process is making it")

    path = entry.path
    leftover = _LEFTOVER.fullmatch(path.name)
    try:
        with exclusive_lock(path.parent / leftover[1] if leftover else path, waiting=busy):
            if path.exists() and path.stat().st_mtime != entry.used and path.suffix != ".lock":
                return "another process has just used it"
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    except (OSError, UserError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None


def _entry(path: Path, cache: Path) -> CacheEntry | None:
    """Return the entry at a path; None if outpace did not create it. Links and folders of folders are no entries."""
    leftover, folder = _LEFTOVER.fullmatch(path.name), path.parent.relative_to(cache)
    if not _ENTRY.fullmatch((folder / (leftover[1] if leftover else path.name)).as_posix()) or path.is_symlink():
        return None
    try:
        is_folder = path.is_dir()
        files = list(path.iterdir()) if is_folder else [path]
        if not all(file.is_file() for file in files) or (leftover is None and is_folder != (folder == Path())):
            return None
        sizes = [file.stat().st_size for file in files]
        return CacheEntry(path, sum(sizes), path.stat().st_mtime)
    except OSError:  # removed meanwhile, or not readable
        return None
