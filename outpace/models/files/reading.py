"""Reads a model folder's small files, regular files of bounded size only, and memory-maps safetensors without torch."""

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

MAX_TEXT_BYTES = 2**25  # the index of a model with 200,000 tensors takes half of it
MAX_TOKENIZER_BYTES = 2**28


def check_file(file: Path, largest: int | None = None) -> None:
    """Raise UserError unless `file` is a regular file of at most `largest` bytes: a pipe could block, a device never
    end."""
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


def read_bytes(file: Path, largest: int = MAX_TEXT_BYTES) -> bytes:
    """Return the content of `file`; UserError if it is missing, unreadable or larger than `largest` bytes."""
    check_file(file, largest)
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror})") from error


def read_text(file: Path) -> str:
    """Return the UTF-8 text in `file`; UserError if it is missing, unreadable or not UTF-8."""
    try:
        return read_bytes(file).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text ({error.reason} at byte {error.start})") from error


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`; UserError if it is missing, unreadable or no JSON object."""
    text = read_text(file)
    try:
        value = json.loads(text)
        if re.search(r"\\u[dD][89a-fA-F]", text):  # JSON escapes can hold lone surrogates, which no other file can
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise UserError(f"{file} holds a JSON {type(value).__name__}, it must be an object")
    return value


def read_optional_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`, or {} if it does not exist."""
    return read_json(file) if os.path.lexists(file) else {}


# bfloat16: the upper half of a float32's bits
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_ALL = DTYPES | {"I32": "<i4"}  # packed 4-bit words, read but never written
_ORDER = ("F64", "F32", "BF16", "F16")  # order of tensors in a file, then by name
_LENGTH = 8  # bytes of the header's length field


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object, indented."""
    file.write_text(json.dumps(dict(value), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class RawTensor(NamedTuple):
    """A tensor in its stored type."""

    kind: str  # one of KINDS
    values: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray, kind: str) -> RawTensor:
        """Round float32 values to the nearest value of this type, ties to even."""
        if kind != "BF16":
            with np.errstate(over="ignore"):
                return cls(kind, values.astype(DTYPES[kind]))
        bits = np.ascontiguousarray(values, "<f4").view("<u4")
        return cls(kind, ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2"))

    def is_finite(self) -> bool:
        """Return whether no value is nan or infinite."""
        if self.kind == "BF16":
            return not ((self.values & 0x7F80) == 0x7F80).any()
        return all_finite(self.values)

    def float32(self) -> np.ndarray:
        """Return the values as float32, without a copy if they are float32 already."""
        held = self.values
        if self.kind == "BF16":
            wide = np.zeros((*held.shape, 2), "<u2")
            wide[..., 1] = held
            held = wide.view("<f4")[..., 0]
        return np.require(held, np.float32, ["C", "A"])


class SafetensorsFile:
    """A memory-mapped file that the safetensors library has validated before. Returned arrays keep it mapped."""

    def __init__(self, path: Path) -> None:
        """Map the file; OSError or ValueError if that fails or the file has changed."""
        with path.open("rb") as stream:
            self._mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self._start = _LENGTH + int.from_bytes(self._mapped[:_LENGTH], "little")
        self._entries = json.loads(self._mapped[_LENGTH : self._start])
        self._values = np.frombuffer(self._mapped, np.uint8, offset=self._start)

    def raw(self, name: str) -> RawTensor:
        """Return one tensor of a type in DTYPES, or I32, as a view of the mapping."""
        entry = self._entries[name]
        first, last = entry["data_offsets"]
        held = self._values[first:last].view(_ALL[entry["dtype"]]).reshape(entry["shape"])
        return RawTensor(entry["dtype"], held)

    def forget(self, name: str) -> None:
        """Release the memory of a tensor's whole pages; a later access reads them from the file again."""
        first, last = self._entries[name]["data_offsets"]
        release_pages(self._mapped, self._start + first, self._start + last)


def release_pages(mapped: mmap.mmap, start: int, end: int) -> None:
    """Release the memory of the whole pages between two bytes of a mapping, where the system supports it."""
    page = mmap.PAGESIZE
    start, end = -(-start // page) * page, end // page * page
    if end > start and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED, start, end - start)


def write_safetensors(file: Path, tensors: Mapping[str, RawTensor]) -> None:
    """Write a new safetensors file, byte-identical to the safetensors library's. Raises OSError."""
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


def all_finite(values: np.ndarray) -> bool:
    """Return whether no element is nan or infinite. The sum decides at memory speed unless it overflows itself."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(np.add.reduce(values, axis=None)) or np.isfinite(values).all())
