"""Reads and writes a drafter's lookup tables: memory-mapped arrays with a checksum, made for one tokenizer.

The file is a line that names the format, a line of JSON (kind, tokenizer, arrays, checksum), then the arrays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from outpace.core.drafting import BuildContext
from outpace.core.errors import UserError
from outpace.models.files.cache import cache_folder, lazy_sha256, new_file

SHIPPED = Path(__file__).parents[2] / "drafters" / "tables"  # files that come with outpace
_MAGIC = b"outpace token tables, version 1\n"
_MAX_HEADER = 1 << 20  # bytes in the line of JSON
_BLOCK = 1 << 24  # bytes hashed at a time
Arrays = Mapping[str, np.ndarray]


def write(path: Path, kind: str, tokenizer: str, arrays: Arrays) -> None:
    """Write the file, whole or not at all; UserError if that fails."""
    bodies = [np.ascontiguousarray(array) for array in arrays.values()]
    shapes = {name: [str(body.dtype), list(body.shape)] for name, body in zip(arrays, bodies, strict=True)}
    head: dict[str, Any] = {"kind": kind, "tokenizer": tokenizer, "arrays": shapes}
    head["sha256"] = _checksum(head, bodies)
    line = json.dumps(head).encode()
    with new_file(path) as part, part.open("wb") as file:
        file.write(_MAGIC + line + b" " * (-(len(_MAGIC) + len(line) + 1) % 64) + b"\n")  # arrays are aligned
        for body in bodies:
            file.write(body.data)


def read(path: Path, kind: str, tokenizer: str | None, again: str = "") -> dict[str, np.ndarray]:
    """Map the arrays of a file into memory. With `tokenizer` None the tokenizer is not checked.

    Raises UserError, with the advice `again`, for a file that is damaged, of another kind or for another tokenizer.
    """
    again = again or f"build it again with outpace tune --drafter {kind} --corpus ..."
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise UserError(f"{path} is no file of token tables of this version; {again}")
            line = file.readline(_MAX_HEADER)
        head = json.loads(line)
        arrays = _mapped(path, len(_MAGIC) + len(line), head["arrays"])
        found = (str(head["kind"]), str(head["tokenizer"]), str(head.pop("sha256")))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); {again}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}); {again}") from error
    if found[0] != kind:
        raise UserError(f"{path} holds the tables of drafter {found[0]}, not of {kind}")
    if tokenizer is not None and found[1] != tokenizer:
        raise UserError(f"{path} was made with another tokenizer than the target's; {again}")
    if _checksum(head, list(arrays.values())) != found[2]:
        raise UserError(f"{path} is damaged (its checksum is wrong); {again}")
    return arrays


def find(kind: str, named: str, given: BuildContext | None) -> Path | None:
    """Return the file for a drafter's option: the named one, None for "none", or for "" the one for the target's
    tokenizer in the user's cache, else among the shipped ones, else None."""
    if named == "none":
        return None
    if named:
        return Path(named).expanduser()
    tokenizer = tokenizer_of(given)
    if tokenizer is None:
        return None
    places = [SHIPPED / file_name(kind, tokenizer)]
    with suppress(UserError):  # there is no cache folder
        places.insert(0, place_of(kind, tokenizer))
    return next((path for path in places if path.is_file()), None)


def place_of(kind: str, tokenizer: str) -> Path:
    """Return the default path of the file for a tokenizer."""
    return cache_folder() / "tables" / file_name(kind, tokenizer)


def file_name(kind: str, tokenizer: str) -> str:
    """Return the file name for a tokenizer."""
    return f"{kind}-{tokenizer[:16]}.tables"


def tokenizer_of(given: BuildContext | None) -> str | None:
    """Return the fingerprint of the target's tokenizer; None if it is unknown."""
    return given.tokenizer.fingerprint if given is not None and given.tokenizer is not None else None


def _mapped(path: Path, start: int, shapes: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Map the arrays; ValueError unless they fill the file exactly."""
    whole = np.memmap(path, np.uint8, "r")
    arrays: dict[str, np.ndarray] = {}
    for name, (kind, shape) in shapes.items():
        dtype = np.dtype(kind)
        if dtype.kind not in "iu" or not all(isinstance(size, int) and size >= 0 for size in shape):
            raise ValueError(f"{name} is {kind} {shape}")
        end = start + prod(shape) * dtype.itemsize
        arrays[name], start = whole[start:end].view(dtype).reshape(shape), end
    if start != len(whole):
        raise ValueError(f"it has {len(whole)} bytes, {start} are expected")
    return arrays


def _checksum(head: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> str:
    """Hash everything in the file except the checksum itself."""
    digest = lazy_sha256(json.dumps(head).encode())
    for array in arrays:
        flat = array.reshape(-1).view(np.uint8)
        for start in range(0, len(flat), _BLOCK):
            digest.update(flat[start : start + _BLOCK].tobytes())
    return digest.hexdigest()
