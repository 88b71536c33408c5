"""Reads the small files of a model folder: regular files only, of bounded size, with one sentence for what is wrong."""

from __future__ import annotations

import json
import mmap
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

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


# bfloat16: the upper half of a float32's bits
KINDS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_ALL = KINDS | {"I32": "<i4"}  # words of nibbles, which are read and not written
_ORDER = ("F64", "F32", "BF16", "F16")  # of tensors in a file, then by name
_LENGTH = 8  # bytes before the header, which say how long it is


class Raw(NamedTuple):
    """A tensor as a file has it."""

    kind: str  # one of KINDS
    values: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray, kind: str) -> Raw:
        """float32 values, rounded to the nearest of this type, to the even one of two."""
        if kind != "BF16":
            with np.errstate(over="ignore"):
                return cls(kind, values.astype(KINDS[kind]))
        bits = np.ascontiguousarray(values, "<f4").view("<u4")
        return cls(kind, ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2"))

    def is_finite(self) -> bool:
        """Whether no value is nan or infinite."""
        if self.kind == "BF16":
            return not ((self.values & 0x7F80) == 0x7F80).any()
        return is_finite(self.values)

    def float32(self) -> np.ndarray:
        """The values, in the same memory where they are float32 already."""
        held = self.values
        if self.kind == "BF16":
            wide = np.zeros((*held.shape, 2), "<u2")
            wide[..., 1] = held
            held = wide.view("<f4")[..., 0]
        return np.require(held, np.float32, ["C", "A"])


class MappedFile:
    """A file that safetensors has opened before, and so found whole. Arrays that were handed out keep it mapped."""

    def __init__(self, path: Path) -> None:
        """OSError or ValueError where it cannot be mapped, or is no longer what it was."""
        with path.open("rb") as stream:
            self._mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self._start = _LENGTH + int.from_bytes(self._mapped[:_LENGTH], "little")
        self._entries = json.loads(self._mapped[_LENGTH : self._start])
        self._values = np.frombuffer(self._mapped, np.uint8, offset=self._start)

    def raw(self, name: str) -> Raw:
        """One tensor of a type of KINDS, or of I32, in the file's own memory."""
        entry = self._entries[name]
        first, last = entry["data_offsets"]
        held = self._values[first:last].view(_ALL[entry["dtype"]]).reshape(entry["shape"])
        return Raw(entry["dtype"], held)

    def forget(self, name: str) -> None:
        """Gives the memory of a tensor's whole pages back; read again, they come from the file again."""
        first, last = self._entries[name]["data_offsets"]
        forget_pages(self._mapped, self._start + first, self._start + last)


def forget_pages(mapped: mmap.mmap, start: int, end: int) -> None:
    """Gives the memory of the whole pages between two bytes of a file's mapping back, where the system can."""
    page = mmap.PAGESIZE
    start, end = -(-start // page) * page, end // page * page
    if end > start and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED, start, end - start)


def write(file: Path, tensors: Mapping[str, Raw]) -> None:
    """A new safetensors file, byte by byte as that library writes it. OSError where it cannot be written."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ordered, end = sorted(tensors.items(), key=lambda one: (_ORDER.index(one[1].kind), one[0])), 0
    for name, (kind, values) in ordered:
        start, end = end, end + values.nbytes
        entries[name] = {"dtype": kind, "shape": values.shape, "data_offsets": [start, end]}
    head = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    head += b" " * (-len(head) % _LENGTH)
    with file.open("xb") as stream:
        stream.write(len(head).to_bytes(_LENGTH, "little") + head)
        for _, (_, values) in ordered:
            stream.write(np.ascontiguousarray(values).data)


def is_finite(values: np.ndarray) -> bool:
    """Whether no element is nan or infinite: the sum tells at the speed of memory, unless it overflows itself."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(np.add.reduce(values, axis=None)) or np.isfinite(values).all())
