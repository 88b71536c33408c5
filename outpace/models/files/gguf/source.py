"""Opens GGUF files with a checkpoint's interface, reading weights in place, and converts them to model folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from outpace.core.errors import UserError
from outpace.core.lazy import lazy_sha256, torch
from outpace.models.files.cache import make_once
from outpace.models.files.cache_folder import new_folder
from outpace.models.files.checkpoint import SINGLE, Checkpoint
from outpace.models.files.gguf import tokenizer as gguf_tokenizer
from outpace.models.files.gguf.config import GgufModel, read_model
from outpace.models.files.gguf.header import COMMON_TYPES, GgufHeader, ggml_type, open_gguf_model, part_files
from outpace.models.files.gguf.tokenizer import GgufTokenizer
from outpace.models.files.reading import write_json
from outpace.models.llama.config import llama_config as llama
from outpace.models.llama.config.footprint import StoredSize
from outpace.models.llama.weight_sources import StoredMatrix

Progress = Callable[[str, float], None]
FORMAT_VERSION = 2  # part of the folder's name: raise it when the output changes
ENDS_READ = 2**20  # bytes hashed at each end of the file
LONGEST_NAME = 100  # characters of the file's name in the folder's name
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def convert(path: Path, cache: Path, progress: Progress = lambda stage, fraction: None) -> Path:
    """Return the Hugging Face folder for the GGUF file `path`, converted under `cache` if it does not exist yet.

    `progress(stage, fraction)` is called meanwhile, fraction from 0 to 1. Processes that convert the same file
    concurrently wait for the first. Raises UserError: not a GGUF file, damaged, an unsupported model, or a disk error.
    """
    folder = cache / f"{path.stem[:LONGEST_NAME]}-{_identity(path)}-v{FORMAT_VERSION}"

    def make() -> None:
        with open_gguf_model(path) as header:
            _write_folder(header, folder, progress)
        progress("done", 1.0)

    make_once(
        folder, partial(is_complete_model, files=FILES), make, lambda: progress("waiting for another conversion", 0.0)
    )
    return folder


def _identity(path: Path) -> str:
    """Return a short hash of the model's files from size, time and both ends, cheap however large they are."""
    digest = lazy_sha256()
    for part in (file for file in part_files(path) if file == path or file.is_file()):
        try:
            with part.open("rb") as stream:
                status = part.stat()
                digest.update(f"{part.name} {status.st_size} {status.st_mtime_ns}".encode())
                digest.update(stream.read(ENDS_READ))
                stream.seek(max(0, status.st_size - ENDS_READ))
                digest.update(stream.read(ENDS_READ))
        except OSError as error:
            raise UserError(f"{part} cannot be read ({error.strerror})") from error
    return digest.hexdigest()[:16]


def is_complete_model(folder: Path, files: Sequence[str] = ("config.json",)) -> bool:
    """Return whether the folder holds these files and all weights, in the shapes that its config implies."""
    if not all((folder / name).is_file() for name in files):
        return False
    try:
        with Checkpoint.open(folder) as checkpoint:
            checkpoint.check_shapes(llama.tensor_shapes(llama.from_dict(checkpoint.config)))
    except UserError:
        return False
    return True


def _write_folder(header: GgufHeader, folder: Path, progress: Progress) -> None:
    progress("reading", 0.0)
    model = read_model(header)
    check_readable(header, model)
    tokenizer = gguf_tokenizer.build_for(header, model)
    _check_space(header.path, folder.parent, converted_bytes(header, model))
    with new_folder(folder) as temporary:
        write_json(temporary / "config.json", model.settings | tokenizer.special_ids)
        write_tokenizer(tokenizer, model.config.max_positions, temporary)
        write_weights(header, model, temporary / SINGLE, progress)


def write_tokenizer(tokenizer: GgufTokenizer, max_positions: int, folder: Path) -> None:
    """Write the tokenizer's files of a model folder."""
    (folder / "tokenizer.json").write_text(tokenizer.tokenizer.to_str(), encoding="utf-8")
    write_json(folder / "generation_config.json", {"_from_model_config": True} | tokenizer.special_ids)
    write_json(folder / "tokenizer_config.json", tokenizer.settings | {"model_max_length": max_positions})


def _check_space(path: Path, folder: Path, needed: int) -> None:
    """Raise UserError before a long conversion that would fill the disk: 4-bit weights become 32-bit."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return
    if needed > free:
        needs = f"{path} becomes {needed / 1e9:.1f} GB in {folder}, where {free / 1e9:.1f} GB are free"
        raise UserError(f"{needs}: make room, or name another folder by OUTPACE_CACHE")


PIECE_VALUES = 2**22  # values dequantised at once; numpy needs several times their memory
F32, F16, BF16 = 0, 1, 30  # ggml's numbers of types that safetensors also has
STORED = {F32: ("F32", "<u4", 0x7F800000), F16: ("F16", "<u2", 0x7C00), BF16: ("BF16", "<u2", 0x7F80)}
PIECE_OF_TYPE = STORED[F32]  # everything else is dequantised to float32


def check_readable(header: GgufHeader, model: GgufModel, known: Container[int] = ()) -> None:
    """Raise UserError for a tensor whose quantisation `gguf` cannot undo. Types in `known` need no import of the
    package."""
    for name in model.sources.values():
        kind = header.tensors[name].kind
        if kind not in known and not can_read(kind):
            found = f"tensor {name!r} has the unsupported quantisation {ggml_type(kind).name}"
            raise UserError(f"{header.file_of(name)}: {found}, allowed are {', '.join(readable_types())}")


def can_read(kind: int) -> bool:
    """Return whether tensors of this ggml type can be read."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    if kind in STORED:
        return True
    try:
        _, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        dequantize(np.zeros((1, block_bytes), np.uint8), GGMLQuantizationType(kind))
    except (ValueError, KeyError, NotImplementedError):
        return False
    return True


def readable_types() -> list[str]:
    """List the names of all readable ggml types."""
    from gguf.constants import GGMLQuantizationType

    return [kind.name for kind in GGMLQuantizationType if can_read(int(kind))]


def converted_bytes(header: GgufHeader, model: GgufModel) -> int:
    """Return the size of the converted weights."""
    return sum(_stored_bytes(header, source) for source in model.sources.values())


def write_weights(header: GgufHeader, model: GgufModel, file: Path, progress: Callable[[str, float], None]) -> None:
    """Write one safetensors file: float32, except for tensors stored in 16 bits. Memory holds a piece of one tensor."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for target, source in model.sources.items():
        entry = header.tensors[source]
        start, end = end, end + _stored_bytes(header, source)
        kind = STORED.get(entry.kind, PIECE_OF_TYPE)[0]
        table[target] = {"dtype": kind, "shape": list(entry.shape), "data_offsets": [start, end]}
    head = json.dumps(table, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with file.open("wb") as stream:
        stream.write(len(head).to_bytes(8, "little") + head)
        for target, source in model.sources.items():
            for piece in _pieces(header, model, source):
                stream.write(piece.data.cast("B"))
            progress("converting", table[target]["data_offsets"][1] / end)


def deinterleave_rope(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder rows [heads * head_dim, ...] from llama.cpp's interleaved rotary pairs to pairs (i, i + head_dim / 2)."""
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])  # [heads, head_dim / 2, 2, ...]
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _stored_bytes(header: GgufHeader, source: str) -> int:
    entry = header.tensors[source]
    return prod(entry.shape) * np.dtype(STORED.get(entry.kind, PIECE_OF_TYPE)[1]).itemsize


def rope_rows(model: GgufModel, name: str) -> int:
    """Return the number of rows per head if the tensor is in llama.cpp's interleaved order, else 1."""
    part = name.split(".")[2] if name.startswith("blk.") else ""
    return model.config.head_dim if model.has_interleaved_rope and part in ("attn_q", "attn_k") else 1


def read_values(header: GgufHeader, model: GgufModel, name: str) -> np.ndarray:
    """Return the tensor as float32 in Hugging Face's order; UserError if a value is not finite."""
    kind = header.tensors[name].kind
    pieces = [_as_float(piece, kind) for piece in _pieces(header, model, name)]
    values = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    return values.reshape(header.tensors[name].shape)


def _as_float(values: np.ndarray, kind: int) -> np.ndarray:
    """Convert the bits that `_read` returns to float32."""
    if kind == BF16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.view(np.float16).astype(np.float32) if kind == F16 else values.view(np.float32)


def _pieces(header: GgufHeader, model: GgufModel, name: str) -> Iterator[np.ndarray]:
    """Yield the tensor's rows in Hugging Face's order, in their stored type."""
    unit = rope_rows(model, name)
    has_interleaved_rope = unit > 1
    entry = header.tensors[name]
    columns = entry.shape[-1]
    raw = header.raw(name).reshape(prod(entry.shape[:-1]), -1)  # [rows, bytes]
    if has_interleaved_rope and len(entry.shape) == 1:  # a bias
        raw, columns = raw.reshape(columns, -1), 1
    step = max(1, PIECE_VALUES // (columns * unit)) * unit
    offset = _norm_offset(header, model, name)
    for start in range(0, len(raw), step):
        piece = _read(header, name, raw[start : start + step])
        if offset:
            piece = (piece.view(np.float32) - np.float32(offset)).view(piece.dtype)
        yield np.ascontiguousarray(deinterleave_rope(piece, len(piece) // unit) if has_interleaved_rope else piece)


def _norm_offset(header: GgufHeader, model: GgufModel, name: str) -> float:
    """Return what to subtract from a norm's weights, 0 for other tensors."""
    offset = model.config.norm_offset if name.endswith("norm.weight") else 0.0
    kind = header.tensors[name].kind
    if offset and kind != F32:
        found = f"the norm {name!r} has the type {ggml_type(kind).name}"
        raise UserError(f"{header.file_of(name)}: {found}, norms of this architecture must have F32")
    return offset


def _read(header: GgufHeader, name: str, raw: np.ndarray) -> np.ndarray:
    """Read rows [rows, bytes] as values [rows, columns]; 16 and 32 bits as unsigned integers."""
    kind = header.tensors[name].kind
    if kind in STORED:
        values = np.ascontiguousarray(raw).view(STORED[kind][1])
        exponent = STORED[kind][2]
    else:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        with np.errstate(over="ignore", invalid="ignore"):  # checked below
            values = dequantize(raw, GGMLQuantizationType(kind)).astype(np.float32, copy=False).view("<u4")
        exponent = PIECE_OF_TYPE[2]
    if (values & exponent == exponent).any():
        raise UserError(f"{header.file_of(name)} is damaged: tensor {name!r} holds values that are not finite")
    return values


class GgufSource(AbstractContextManager["GgufSource"]):
    """An open .gguf file with Hugging Face tensor names and shapes. Arrays returned before keep the file mapped.

    Norms and biases are returned as float32 arrays, matrices as the file's own blocks.
    """

    def __init__(self, path: Path | str) -> None:
        """Raises UserError: not a GGUF file, damaged, or an unsupported model."""
        self.path = Path(path)
        with ExitStack() as stack:
            self._header: GgufHeader = stack.enter_context(open_gguf_model(self.path))
            self._model: GgufModel = read_model(self._header)
            check_readable(self._header, self._model, COMMON_TYPES)
        special_ids = gguf_tokenizer.special_ids(self.path, self._header.metadata)
        self.config: dict[str, Any] = self._model.settings | special_ids

    def __exit__(self, *error: object) -> None:
        """Do nothing: the mapping is released with the last array."""

    @cached_property
    def tokenizer(self) -> GgufTokenizer:
        """The tokenizer, built at first use; UserError if it is damaged.

        The header's metadata, tens of megabytes for a large vocabulary, are released afterwards.
        """
        built = gguf_tokenizer.build_for(self._header, self._model)
        self._header.forget_front()
        self._header = replace(self._header, metadata={})
        return built

    def names(self) -> list[str]:
        """List the names of all tensors, sorted."""
        return sorted(self._model.sources)

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise UserError unless every tensor of `shapes` exists with that shape."""
        for name, expected in shapes.items():
            found = self._header.tensors[self._source(name)].shape
            if found != tuple(expected):
                raise UserError(f"{self.path}: tensor {name!r} has shape {list(found)}, expected {list(expected)}")

    def file_of(self, name: str) -> Path:
        """Return the file that holds a tensor; UserError if there is no such tensor."""
        return self._header.file_of(self._source(name))

    def held(self, name: str) -> StoredSize:
        """Return a tensor's type and its number of bytes in the file."""
        entry = self._header.tensors[self._source(name)]
        return StoredSize(ggml_type(entry.kind).name, entry.num_bytes)

    def write_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer's files of a model folder."""
        write_tokenizer(self.tokenizer, self._model.config.max_positions, folder)

    def array(self, name: str) -> np.ndarray:
        """Return one tensor as float32; UserError if it does not exist or is not finite."""
        return read_values(self._header, self._model, self._source(name))

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor as float32."""
        return torch.from_numpy(np.require(self.array(name), requirements="W"))

    def weight(self, name: str) -> StoredMatrix | np.ndarray:
        """Return a matrix as stored, anything else as float32."""
        source = self._source(name)
        entry = self._header.tensors[source]
        if len(entry.shape) != 2:
            return self.array(name)
        raw = self._header.raw(source).reshape(entry.shape[0], -1)
        order, kind, file = (
            np.arange(len(raw), dtype=np.int32),
            ggml_type(entry.kind).name,
            self._header.file_of(source),
        )
        unit = rope_rows(self._model, source)
        order = deinterleave_rope(order, len(raw) // unit) if unit > 1 else order
        read, forget = partial(self.array, name), partial(self._header.forget, source)
        return StoredMatrix(file, source, kind, raw, order, entry.shape[1], read, forget)

    def _source(self, name: str) -> str:
        if name not in self._model.sources:
            raise UserError(f"{self.path} holds no tensor {name!r}")
        return self._model.sources[name]
