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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path, PurePath
from typing import Any, TypeVar

import numpy as np

from outpace.core.errors import UserError
from outpace.models.files.reading import release_pages
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
}


def ggml_type(kind: int) -> BlockFormat:
    """Return the ggml type of this number; ValueError or KeyError if there is none."""
    if kind in COMMON_TYPES:
        return COMMON_TYPES[kind]
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
SCALARS = dict(
    zip(
        (*range(8), 10, 11, 12),
        ["<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "<u1", "<u8", "<i8", "<f8"],
        strict=True,
    )
)


@dataclass(frozen=True)
class TensorEntry:
    """Location of a tensor: `shape` is outermost first, `start` and `num_bytes` count bytes in file number `part`."""

    shape: tuple[int, ...]
    kind: int
    start: int
    num_bytes: int
    part: int = 0


@dataclass(frozen=True)
class GgufHeader:
    """A GGUF file's metadata (text, numbers, lists) and its tensors by name, including those in the model's other
    files."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]
    data: Any = field(repr=False)  # the mapped file
    further: tuple[GgufHeader, ...] = ()  # the model's other parts, in order

    def raw(self, name: str) -> np.ndarray:
        """Return the stored bytes of one tensor, mapped from the file."""
        entry = self.tensors[name]
        return np.frombuffer(self._part(entry).data, np.uint8, entry.num_bytes, entry.start)

    def file_of(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self._part(self.tensors[name]).path

    def _part(self, entry: TensorEntry) -> GgufHeader:
        return self.further[entry.part - 1] if entry.part else self

    def forget(self, name: str) -> None:
        """Release the memory of a tensor's whole pages; a later access reads them from the file again."""
        entry = self.tensors[name]
        release_pages(self._part(entry).data, entry.start, entry.start + entry.num_bytes)

    def forget_front(self) -> None:
        """Release the memory of everything before the first tensor."""
        release_pages(self.data, 0, min((one.start for one in self.tensors.values() if not one.part), default=0))


@contextmanager
def open_gguf(path: Path) -> Iterator[GgufHeader]:
    """Map the file and read its header; UserError names the file and what is wrong with it."""
    try:
        stream = path.open("rb")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error
    with stream:
        if stream.read(len(MAGIC)) != MAGIC:
            raise UserError(f"{path} is not a GGUF file")
        # Never closed explicitly: close() raises while arrays still point into the mapping.
        data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            header = _Reader(path, data).header()
        except struct.error as error:
            raise UserError(f"{path} is truncated: its header ends too early") from error
        yield header


class _Reader:
    """A position in the mapped file; every read advances it and stays inside the file."""

    def __init__(self, path: Path, data: Any) -> None:
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
        return GgufHeader(self.path, metadata, self.placed(table, self.alignment(metadata)), self.data)

    def take(self, num_bytes: int) -> bytes:
        end = self.position + num_bytes
        if end > len(self.data):
            raise UserError(f"{self.path} is truncated: its header needs {end} bytes, the file has {len(self.data)}")
        self.position, start = end, self.position
        return self.data[start:end]

    def check_count(self, count: int) -> None:
        if count > len(self.data) - self.position:  # every counted entry takes at least one byte
            raise UserError(
                f"{self.path} is damaged: it announces {count} entries, the file has {len(self.data)} bytes"
            )

    def unsigned(self, num_bytes: int) -> int:
        return int.from_bytes(self.take(num_bytes), "little")

    def text(self) -> str:
        data = self.take(self.unsigned(8))
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{self.path} is damaged: a text in its header is not UTF-8") from error

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
        try:
            return [text.decode("utf-8") for text in found]
        except UnicodeDecodeError as error:
            raise UserError(f"{self.path} is damaged: a text in its header is not UTF-8") from error

    def numbers(self, kind: int, count: int) -> list[Any]:
        if kind not in SCALARS:
            raise UserError(f"{self.path} is damaged: its header names the unknown value type {kind}")
        dtype = np.dtype(SCALARS[kind])
        values = np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
        return [bool(value) for value in values] if kind == BOOL else values

    def alignment(self, metadata: Mapping[str, Any]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 8 <= alignment <= MAX_ALIGNMENT or alignment % 8:
            raise UserError(f"{self.path} is damaged: general.alignment is {alignment!r}")
        return alignment

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
            entry = TensorEntry(shape, kind, start + offset, self.num_bytes(name, shape, kind))
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
            raise UserError(
                f"{self.path} is damaged: tensor {name!r} has shape {list(shape)}, blocks hold {block} values"
            )
        return prod(shape) // block * block_bytes


P = TypeVar("P", bound=PurePath)
_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)")
NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"


def part_names(name: str) -> list[str]:
    """List the file names of all parts of a model from the name of one; just that name if it is not split."""
    found = _NAME.fullmatch(name)
    if found is None or not 1 <= int(found[2]) <= int(found[3]):
        return [name]
    return [f"{found[1]}-{number:05}-of-{found[3]}{found[4]}" for number in range(1, int(found[3]) + 1)]


def part_files(path: P) -> list[P]:
    """List the paths of all parts of a model from the path of one."""
    return [path.with_name(name) for name in part_names(path.name)]


@contextmanager
def open_gguf_model(path: Path) -> Iterator[GgufHeader]:
    """Open all files of the model whose first file is `path`, as `open_gguf`; UserError names a missing part."""
    with ExitStack() as stack:
        first = stack.enter_context(open_gguf(path))
        count = first.metadata.get(COUNT, 0)
        if count in (0, 1):
            yield first
            return
        files = part_files(path)
        _check_first(first, count, files)
        missing = next((file for file in files if not file.is_file()), None)
        if missing is not None:
            raise UserError(f"{missing} is missing: {path} is the first of {count} parts of a model")
        yield join_parts(first, [stack.enter_context(open_gguf(file)) for file in files[1:]])


def join_parts(first: GgufHeader, further: Sequence[GgufHeader]) -> GgufHeader:
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
            tensors[name] = replace(entry, part=number)
    count = first.metadata.get(TENSORS, len(tensors))
    if count != len(tensors):
        raise UserError(f"{first.path} and its parts hold {len(tensors)} tensors, {TENSORS} is {count!r:.50}")
    return replace(first, tensors=tensors, further=tuple(further))


def _check_first(header: GgufHeader, count: Any, files: Sequence[Path]) -> None:
    path, number = header.path, header.metadata.get(NUMBER, 0)
    if isinstance(count, bool) or not isinstance(count, int) or not isinstance(number, int):
        raise UserError(f"{path} is damaged: {NUMBER} is {number!r:.50} and {COUNT} {count!r:.50}, both are numbers")
    if len(files) != count:
        ending = f"-00001-of-{count:05}.gguf"
        raise UserError(f"{path} is one of {count} parts of a model, so the first one's name must end in {ending}")
    if number or path.name != files[0].name:
        raise UserError(f"{path} is part {number + 1} of {count}: name the first one, {files[0]}")
