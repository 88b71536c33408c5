"""Reads the small files of a model folder: regular files only, of bounded size, with one sentence for what is wrong."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from outpace.core.errors import UserError

LARGEST_TEXT = 2**25  # bytes of a JSON file or a template; the index of a model with 200,000 tensors has half of it
LARGEST_TOKENIZER = 2**28


def check_file(file: Path, largest: int | None = None) -> None:
    """UserError unless `file` is a regular file of at most `largest` bytes: a pipe would block, a device never ends."""
    try:
        status = file.stat()
    except FileNotFoundError:
        raise UserError(f"{file} does not exist") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({getattr(error, 'strerror', None) or error})") from error
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{file} is not a file")
    if largest is not None and status.st_size > largest:
        raise UserError(f"{file} has {status.st_size} bytes, at most {largest} are read")


def is_there(file: Path) -> bool:
    """Whether something has this name, be it a link that leads nowhere."""
    return os.path.lexists(file)


def read_bytes(file: Path, largest: int = LARGEST_TEXT) -> bytes:
    """The content of `file`; UserError if it is missing, unreadable or larger than `largest` bytes."""
    check_file(file, largest)
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror})") from error


def read_text(file: Path) -> str:
    """The UTF-8 text in `file`; UserError if it is missing, unreadable or something else."""
    try:
        return read_bytes(file).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text ({error.reason} at byte {error.start})") from error


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`; UserError if the file is missing, unreadable or holds something else."""
    text = read_text(file)
    try:
        value = json.loads(text)
        if re.search(r"\\u[dD][89a-fA-F]", text):  # half a character may be written here, and nowhere else
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise UserError(f"{file} holds a JSON {type(value).__name__}, it must be an object")
    return value


def read_json_if_there(file: Path) -> dict[str, Any]:
    """The JSON object in `file`, empty if nothing has this name."""
    return read_json(file) if is_there(file) else {}
