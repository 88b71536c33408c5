"""Writes files whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from outpace.core.errors import UserError


def write_atomically(file: Path, write: Callable[[Path], object], after_failure: str = "") -> None:
    """Call `write` with a temporary path, which then replaces `file`; UserError, with this addition, if that fails."""
    part = file.with_name(f".{file.name}.part")
    try:
        write(part)
        with part.open("rb") as stream:
            os.fsync(stream.fileno())
        part.rename(file)
    except Exception as error:  # safetensors has an error class of its own
        part.unlink(missing_ok=True)
        reason = f"{file} cannot be written ({getattr(error, 'strerror', None) or error})"
        raise UserError(f"{reason}; {after_failure}" if after_failure else reason) from error
