"""Reads the metadata and tensor table of GGUF files; every count and offset is checked against the file's size.

The reader of the `gguf` package trusts the file's counts, so that a damaged file can make it run for ever. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

A model may be split over several files, named -00001-of-00003.gguf and so on, as `llama-gguf-split` writes them: the
first has the metadata, all have tensors.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path, PurePath
from typing import Any, TypeVar

import numpy as np

from outpace.core.errors import UserError
from outpace.models.files.reading import check_downloaded, check_file, release_pages
from outpace.models.llama.weight_sources import Q4_1, BlockFormat

COMMON_TYPES = {
    0: BlockFormat("F32", 1, 4),
    1: BlockFormat("F16", 1, 2),
    2: BlockFormat("Q4_0", 32, 18),
    3: Q4_1,
    6: BlockFormat("Q5_0", 32, 22),
    7: BlockFormat("Q5_1", 32, 24),
    8: BlockFormat("Q8_0", 32, 34),
    12: BlockFormat("Q4_K", 256, 144),
    13: BlockFormat("Q5_K", 256, 176),
    14: BlockFormat("Q6_K", 256, 210),
    20: BlockFormat("IQ4_NL", 32, 18),
    30: BlockFormat("BF16", 1, 2),
    39: BlockFormat("MXFP4", 32, 17),
}
INTEGER_TYPES = {26: BlockFormat("I32", 1, 4), 27: BlockFormat("I64", 1, 8)}


def ggml_type(kind: int) -> BlockFormat:
    """Return the ggml type of this number; ValueError or KeyError if there is none."""
    if kind in COMMON_TYPES | INTEGER_TYPES:
        return (COMMON_TYPES | INTEGER_TYPES)[kind]
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    found = GGMLQuantizationType(kind)
    return BlockFormat(found.name, *GGML_QUANT_SIZES[found])


MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 2**20
MAX_DIMENSIONS = 4
MAX_METADATA_VALUES = 2**24  # in all metadata together; a vocabulary has a million at most
MAX_ARRAY_DEPTH = 4
STRING, ARRAY, BOOL = 8, 9, 7
NUMBER_TYPES = ("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "<u1", None, None, "<u8", "<i8", "<f8")


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a mapped file: `shape` is outermost first, `start` and `num_bytes` count bytes."""

    path: Path
    data: mmap.mmap = field(repr=False)
    shape: tuple[int, ...]
    kind: int
    start: int
    num_bytes: int

    def raw(self) -> np.ndarray:
        """Return the stored bytes, mapped from the file."""
        return np.frombuffer(self.data, np.uint8, self.num_bytes, self.start)

    def forget(self) -> None:
        """Release the memory of the tensor's whole pages; a later access reads them from the file again."""
        release_pages(self.data, self.start, self.start + self.num_bytes)


@dataclass(frozen=True)
class GgufHeader:
    """A GGUF file's metadata (text, numbers, lists) and its tensors by name, including those in the model's other
    files."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]
    data: mmap.mmap = field(repr=False)

    def forget_metadata(self) -> None:
        """Release the memory of everything before the file's first tensor."""
        starts = [entry.start for entry in self.tensors.values() if entry.data is self.data]
        release_pages(self.data, 0, min(starts, default=0))


def is_gguf(path: Path) -> bool:
    """Return whether this file, whatever its name, begins as GGUF files do."""
    check_file(path)
    try:
        with path.open("rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error


def open_gguf(path: Path) -> GgufHeader:
    """Map the file and read its header; UserError names the file and what is wrong with it."""
    try:
        with path.open("rb") as stream:
            if stream.read(len(MAGIC)) != MAGIC:
                check_downloaded(path)
                raise UserError(f"{path} is not a GGUF file")
            # Never closed explicitly: close() raises while arrays still point into the mapping.
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error
    try:
        return _Reader(path, data).header()
    except struct.error as error:
        raise UserError(f"{path} is truncated: its header ends too early") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is damaged: a text in its header is not UTF-8") from error


class _Reader:
    """A position in the mapped file; every read advances it and stays inside the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.position = path, data, len(MAGIC)
        self.num_values = 0

    def header(self) -> GgufHeader:
        version = self.unsigned(4)
        if version not in VERSIONS:
            raise UserError(f"{self.path} has GGUF version {version}, supported are little-endian files of 2 and 3")
        num_tensors, num_fields = self.unsigned(8), self.unsigned(8)
        self.check_count(num_tensors)
        self.check_count(num_fields)
        metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            key = self.text()
            if key in metadata:
                raise UserError(f"{self.path} holds the metadata field {key!r} twice")
            metadata[key] = self.value(self.unsigned(4), 0)
        table = [self.tensor_entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 8 <= alignment <= MAX_ALIGNMENT or alignment % 8:
            raise UserError(f"{self.path} is damaged: general.alignment is {alignment!r}")
        return GgufHeader(self.path, metadata, self.placed(table, alignment), self.data)

    def take(self, num_bytes: int) -> bytes:
        end = self.position + num_bytes
        if end > len(self.data):
            raise UserError(f"{self.path} is truncated: its header needs {end} bytes, the file has {len(self.data)}")
        self.position, start = end, self.position
        return self.data[start:end]

    def check_count(self, count: int) -> None:
        if count > len(self.data) - self.position:  # every counted entry takes at least one byte
            raise UserError(f"{self.path} is damaged: it announces {count} entries in {len(self.data)} bytes")

    def unsigned(self, num_bytes: int) -> int:
        return int.from_bytes(self.take(num_bytes), "little")

    def text(self) -> str:
        return self.take(self.unsigned(8)).decode("utf-8")

    def value(self, kind: int, depth: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            if depth == MAX_ARRAY_DEPTH:
                raise UserError(f"{self.path} is damaged: its metadata nests too deep")
            return self.array(self.unsigned(4), self.unsigned(8), depth + 1)
        return self.numbers(kind, 1)[0]

    def array(self, kind: int, count: int, depth: int) -> list[Any]:
        self.check_count(count)
        self.num_values += count
        if self.num_values > MAX_METADATA_VALUES:
            raise UserError(f"{self.path} is damaged: its metadata announces more than {MAX_METADATA_VALUES} values")
        if kind == STRING:
            return self.texts(count)
        if kind == ARRAY:
            return [self.value(kind, depth) for _ in range(count)]
        return self.numbers(kind, count)

    def texts(self, count: int) -> list[str]:
        """Read many strings at once: a vocabulary and its merges are 100,000."""
        data, position, found = self.data, self.position, []
        length_at, most = struct.Struct("<Q").unpack_from, len(self.data)
        for _ in range(count):
            start = position + 8
            position = start + (length_at(data, position)[0] if start <= most else 0)
            if position > most:
                self.take(position - self.position)
            found.append(data[start:position])
        self.position = position
        return [text.decode("utf-8") for text in found]

    def numbers(self, kind: int, count: int) -> list[Any]:
        name = NUMBER_TYPES[kind] if kind < len(NUMBER_TYPES) else None
        if name is None:
            raise UserError(f"{self.path} is damaged: its header names the unknown value type {kind}")
        dtype = np.dtype(name)
        values = np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
        return [bool(value) for value in values] if kind == BOOL else values

    def tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dimensions = self.text(), self.unsigned(4)
        if num_dimensions > MAX_DIMENSIONS:
            raise UserError(f"{self.path} is damaged: tensor {name!r} has {num_dimensions} dimensions")
        shape = tuple(self.unsigned(8) for _ in range(num_dimensions))[::-1]
        return name, shape, self.unsigned(4), self.unsigned(8)

    def placed(self, table: list[tuple[str, tuple[int, ...], int, int]], alignment: int) -> dict[str, TensorEntry]:
        start = -(-self.position // alignment) * alignment
        tensors: dict[str, TensorEntry] = {}
        for name, shape, kind, offset in table:
            if name in tensors:
                raise UserError(f"{self.path} holds the tensor {name!r} twice")
            if offset % alignment:
                raise UserError(f"{self.path} is damaged: tensor {name!r} does not start at a multiple of {alignment}")
            size = self.num_bytes(name, shape, kind)
            entry = TensorEntry(self.path, self.data, shape, kind, start + offset, size)
            if entry.start + entry.num_bytes > len(self.data):
                raise UserError(f"{self.path} is truncated: tensor {name!r} reaches beyond its end")
            tensors[name] = entry
        end = start
        for name, entry in sorted(tensors.items(), key=lambda item: item[1].start):
            if entry.start < end:
                raise UserError(f"{self.path} is damaged: tensor {name!r} overlaps another")
            end = entry.start + entry.num_bytes
        return tensors

    def num_bytes(self, name: str, shape: tuple[int, ...], kind: int) -> int:
        try:
            _, block, block_bytes = ggml_type(kind)
        except (ValueError, KeyError):
            raise UserError(f"{self.path}: tensor {name!r} has the unknown quantisation {kind}") from None
        if not shape or 0 in shape or shape[-1] % block:
            raise UserError(f"{self.path} is damaged: tensor {name!r} has shape {list(shape)} in blocks of {block}")
        return prod(shape) // block * block_bytes


P = TypeVar("P", bound=PurePath)
_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)")
NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"


def part_files(path: P) -> list[P]:
    """List the paths of all parts of a model from the path of one; just that path if the model is not split."""
    found = _NAME.fullmatch(path.name)
    if found is None or not 1 <= int(found[2]) <= int(found[3]):
        return [path]
    count = int(found[3])
    return [path.with_name(f"{found[1]}-{number:05}-of-{found[3]}{found[4]}") for number in range(1, count + 1)]


def open_gguf_model(path: Path) -> GgufHeader:
    """Open all files of the model whose first file is `path`, as `open_gguf`; UserError names a missing part."""
    first = open_gguf(path)
    count, number = first.metadata.get(COUNT, 0), first.metadata.get(NUMBER, 0)
    if count in (0, 1):
        return first
    if isinstance(count, bool) or not isinstance(count, int) or not isinstance(number, int):
        raise UserError(f"{path} is damaged: {NUMBER} is {number!r:.50} and {COUNT} {count!r:.50}, both are numbers")
    files = part_files(path)
    if len(files) != count:
        ending = f"-00001-of-{count:05}.gguf"
        raise UserError(f"{path} is one of {count} parts of a model, so the first one's name must end in {ending}")
    if number or path.name != files[0].name:
        first_part = f"name the first one, {files[0]}{'' if files[0].is_file() else ', which is missing'}"
        raise UserError(f"{path} is part {number + 1} of {count}: {first_part}")
    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None:
        raise UserError(f"{missing} is missing: {path} is the first of {count} parts of a model")
    return _join_parts(first, [open_gguf(file) for file in files[1:]])


def _join_parts(first: GgufHeader, further: Sequence[GgufHeader]) -> GgufHeader:
    """Merge the headers of all parts; UserError if they do not belong together."""
    tensors: dict[str, TensorEntry] = dict(first.tensors)
    for number, part in enumerate(further, 1):
        found, expected = (part.metadata.get(NUMBER), part.metadata.get(COUNT)), (number, len(further) + 1)
        if found != expected:
            has, needs = (f"{NUMBER} {one} and {COUNT} {other}" for one, other in (found, expected))
            raise UserError(f"{part.path} does not belong to {first.path}: it has {has}, expected are {needs}")
        for name, entry in part.tensors.items():
            if name in tensors:
                raise UserError(f"{part.path} holds the tensor {name!r}, and so does another part")
            tensors[name] = entry
    count = first.metadata.get(TENSORS, len(tensors))
    if count != len(tensors):
        raise UserError(f"{first.path} and its parts hold {len(tensors)} tensors, {TENSORS} is {count!r:.50}")
    return replace(first, tensors=tensors)
