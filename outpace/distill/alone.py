"""One process at a time at a stage of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outpace.core.errors import UserError
from outpace.models.files.cache_folder import exclusive_lock


@contextmanager
def alone(path: Path, work: str) -> Iterator[None]:
    """UserError where another process is at the same work on this path: one would overwrite what the other made."""

    def taken() -> None:
        raise UserError(f"another process is {work} in {path}: wait for it, end it, or choose another --out")

    with exclusive_lock(path, taken):
        yield
