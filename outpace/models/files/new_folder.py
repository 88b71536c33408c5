"""A folder that is written whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outpace.models.files.cache_place import unwritable


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
