"""Reads a model folder's small files, regular files of bounded size only, and memory-maps safetensors without torch."""

from __future__ import annotations

import json
import mmap
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from outpace.core.errors import UserError
from outpace.models.files.cache import new_file

if TYPE_CHECKING:
    from torch import Tensor

MAX_TEXT_BYTES = 2**25  # the index of a model with 200,000 tensors takes half of it
MAX_TOKENIZER_BYTES = 2**28
REPLACEMENTS = {  # first bytes of what lies in the place of a file that was not downloaded
    b"": "is not a whole file, it is empty: download it again",
    b"version https://git-lfs": "is a git-lfs pointer in place of the file: run `git lfs pull` there, or download it",
    b"# xet version": "is a Xet pointer in place of the file: download the file itself",
    b"<": "is a web page in place of the file, such as a request to log in: download the file itself",
    **dict.fromkeys((b"tjgg", b"lmgg"), "is in GGML, the format before GGUF: download a newer file"),
}


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


def check_downloaded(file: Path) -> None:
    """Raise UserError if something else lies in the place of a downloaded file, such as a git-lfs pointer."""
    try:
        with file.open("rb") as stream:
            first = stream.read(max(map(len, REPLACEMENTS))).lstrip()
    except OSError:  # which the reader of the file reports
        return
    for begin, found in REPLACEMENTS.items():
        if first.startswith(begin) and (begin or not first):
            raise UserError(f"{file} {found}")


def read_bytes(file: Path, largest: int | None = MAX_TEXT_BYTES) -> bytes:
    """Return the content of `file`; UserError if it is missing, unreadable or larger than `largest` bytes."""
    check_file(file, largest)
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror})") from error


def read_text(file: Path, largest: int | None = MAX_TEXT_BYTES) -> str:
    """Return the UTF-8 text in `file`; UserError if it is missing, unreadable, too large or not UTF-8."""
    try:
        return read_bytes(file, largest).decode("utf-8")
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
        check_downloaded(file)
        raise UserError(f"{file} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise UserError(f"{file} holds a JSON {type(value).__name__}, it must be an object")
    return value


def read_named_text(option: str, file: Path) -> str:
    """Return the UTF-8 text in the file, or from the pipe, that an option of the command line names."""
    try:
        return file.expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{option} is {file}, which cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{option} is {file}, which is not UTF-8 text (byte {error.start})") from error


def read_optional_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`, or {} if it does not exist."""
    return read_json(file) if os.path.lexists(file) else {}


def write_json(file: Path, value: Any) -> None:
    """Write a JSON file atomically, indented."""
    with new_file(file) as part:
        part.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# bfloat16: the upper half of a float32's bits
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
# packed 4-bit words, ids and MXFP4, read but never written
_ALL = DTYPES | {"I32": "<i4", "I64": "<i8", "BOOL": "|b1", "U8": "|u1"}
_ORDER = ("F64", "F32", "BF16", "F16")  # order of tensors in a file, then by name
_LENGTH = 8  # bytes of the header's length field


class RawTensor(NamedTuple):
    """A tensor in its stored type, a key of DTYPES."""

    kind: str
    values: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray, kind: str) -> RawTensor:
        """Round float32 values to the nearest value of this type, ties to even."""
        if kind != "BF16":
            with np.errstate(over="ignore"):
                return cls(kind, values.astype(DTYPES[kind]))
        bits = np.ascontiguousarray(values, "<f4").view("<u4")
        return cls(kind, ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2"))

    def to(self, kind: str) -> RawTensor:
        """Return the tensor in this type, rounded if it was in another one."""
        return self if kind == self.kind else RawTensor.of(self.float32(), kind)

    def is_finite(self) -> bool:
        if self.kind == "BF16":
            return not ((self.values & 0x7F80) == 0x7F80).any()
        with np.errstate(over="ignore", invalid="ignore"):  # the sum decides at memory speed unless it overflows
            return bool(np.isfinite(np.add.reduce(self.values, axis=None)) or np.isfinite(self.values).all())

    def float32(self) -> np.ndarray:
        """Return the values as float32, without a copy if they are float32 already."""
        held = self.values
        if self.kind == "BF16":
            wide = np.zeros((*held.shape, 2), "<u2")
            wide[..., 1] = held
            held = wide.view("<f4")[..., 0]
        return np.require(held, np.float32, ["C", "A"])


class SafetensorsEntry(NamedTuple):
    """A tensor's type, shape, and place in its file: bytes `start` to `end` after the header."""

    kind: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """A memory-mapped safetensors file. Returned arrays and tensors keep it mapped."""

    def __init__(self, path: Path) -> None:
        """Map the file, which the safetensors library validates; UserError if it is damaged."""
        from safetensors import safe_open

        self.path = path
        check_file(path)
        try:
            with safe_open(str(path), framework="np"):
                pass
            with path.open("rb") as stream:
                self._mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            self._start = _LENGTH + int.from_bytes(self._mapped[:_LENGTH], "little")
            table = json.loads(self._mapped[_LENGTH : self._start])
        except Exception as error:  # safetensors raises its own error, OSError or a bare Exception
            check_downloaded(path)
            raise UserError(f"{path} is not a whole safetensors file, download it again ({error!s:.200})") from error
        self.metadata: dict[str, str] = table.pop("__metadata__", None) or {}
        self.entries = {
            name: SafetensorsEntry(entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
            for name, entry in table.items()
        }
        self._values = np.frombuffer(self._mapped, np.uint8, offset=self._start)

    def raw(self, name: str) -> RawTensor:
        """Return one tensor of a type in DTYPES, or integers, as a view of the mapping."""
        self._check_unchanged(name)
        kind, shape, start, end = self.entries[name]
        return RawTensor(kind, self._values[start:end].view(_ALL[kind]).reshape(shape))

    def tensor(self, name: str) -> Tensor:
        """Return one tensor for torch, as a view of a mapping."""
        self._check_unchanged(name)
        tensor: Tensor = self._torch_file.get_tensor(name)
        return tensor

    @cached_property
    def _torch_file(self) -> Any:
        from safetensors import safe_open

        return safe_open(str(self.path), framework="pt")

    def _check_unchanged(self, name: str) -> None:
        """Raise UserError if the file has another size by now: access beyond its end would kill the process."""
        if self._mapped.size() != len(self._mapped):
            raise UserError(f"{self.path}: tensor {name!r} cannot be read (the file has changed)")

    def forget(self, name: str, number: int = 0, count: int = 1) -> None:
        """Release the memory of a tensor's whole pages, or of one of its `count` equal parts; a later access reads them
        from the file again."""
        entry = self.entries[name]
        first, size = self._start + entry.start, (entry.end - entry.start) // count
        release_pages(self._mapped, first + number * size, first + (number + 1) * size)


def release_pages(mapped: mmap.mmap, start: int, end: int) -> None:
    """Release the memory of the whole pages between two bytes of a mapping, where the system supports it."""
    page = mmap.PAGESIZE
    start, end = -(-start // page) * page, end // page * page
    if end > start and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED, start, end - start)


def write_safetensors(
    file: Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    read: Callable[[str], Iterable[np.ndarray]],
    progress: Callable[[float], None] = lambda share: None,
) -> None:
    """Write a new safetensors file, byte-identical to the safetensors library's. Raises OSError.

    `tensors` holds types and shapes by name; `read` yields a tensor's values in parts, so that one part is in memory.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ordered, end = sorted(tensors.items(), key=lambda one: (_ORDER.index(one[1][0]), one[0])), 0
    for name, (kind, shape) in ordered:
        start, end = end, end + prod(shape) * np.dtype(DTYPES[kind]).itemsize
        entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    head = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    head += b" " * (-len(head) % _LENGTH)
    with file.open("xb") as stream:
        stream.write(len(head).to_bytes(_LENGTH, "little") + head)
        for name, _ in ordered:
            for part in read(name):
                stream.write(np.ascontiguousarray(part).data)
            progress(entries[name]["data_offsets"][1] / end)
