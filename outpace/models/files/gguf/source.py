"""A GGUF file read where it lies: what a checkpoint's folder offers, without a copy of the weights in the cache.

Norms and biases come as arrays, matrices as the file's own blocks, which whoever wants floats dequantises.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from outpace.core.errors import UserError
from outpace.core.lazy import lazy_sha256, torch
from outpace.models.files.cache import made_once
from outpace.models.files.cache_folder import new_folder
from outpace.models.files.checkpoint import SINGLE, Checkpoint
from outpace.models.files.gguf import tokenizer as gguf_tokenizer
from outpace.models.files.gguf.config import GgufModel, read_model
from outpace.models.files.gguf.header import COMMON, GgufHeader, open_model, part_files, type_of
from outpace.models.files.gguf.tokenizer import GgufTokenizer
from outpace.models.llama.config import llama_config as llama
from outpace.models.llama.config.footprint import StoredSize
from outpace.models.llama.weight_sources import StoredMatrix

Progress = Callable[[str, float], None]
FORMAT_VERSION = 2  # part of the folder's name: a change of what is written must raise it
ENDS_READ = 2**20  # bytes at each end of the file that go into its identity
LONGEST_NAME = 100  # characters of the file's own name in the folder's
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def convert(path: Path, cache: Path, progress: Progress = lambda stage, fraction: None) -> Path:
    """The Hugging Face folder for the GGUF file `path`, made under `cache` if it is not there.

    `progress(stage, fraction)` is called while it works, fraction from 0 to 1. Processes that convert the same file
    at once wait for the first. UserError: not a GGUF file, torn, not a model that runs here, or the disk refuses.
    """
    folder = cache / f"{path.stem[:LONGEST_NAME]}-{_identity(path)}-v{FORMAT_VERSION}"

    def make() -> None:
        with open_model(path) as header:
            _write_folder(header, folder, progress)
        progress("done", 1.0)

    made_once(folder, _is_whole, make, lambda: progress("waiting for another conversion", 0.0))
    return folder


def _identity(path: Path) -> str:
    """A short name for the content of this file and its further parts, from size, time and both ends: cheap, however
    large they are."""
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


def _is_whole(folder: Path) -> bool:
    """Whether a folder from an earlier conversion is there and nobody has taken files out of it or cut them."""
    if not all((folder / name).is_file() for name in FILES):
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
    check_types(header, model)
    tokenizer = gguf_tokenizer.build_for(header, model)
    _check_space(header.path, folder.parent, num_bytes(header, model))
    with new_folder(folder) as temporary:
        _write_json(temporary / "config.json", model.settings | tokenizer.special_ids)
        write_tokenizer(tokenizer, model.config.max_positions, temporary)
        write_weights(header, model, temporary / SINGLE, progress)


def write_tokenizer(tokenizer: GgufTokenizer, max_positions: int, folder: Path) -> None:
    """The tokenizer's files of a model folder."""
    (folder / "tokenizer.json").write_text(tokenizer.tokenizer.to_str(), encoding="utf-8")
    _write_json(folder / "generation_config.json", {"_from_model_config": True} | tokenizer.special_ids)
    _write_json(folder / "tokenizer_config.json", tokenizer.settings | {"model_max_length": max_positions})


def _check_space(path: Path, folder: Path, needed: int) -> None:
    """Weights that are four bits here take 32 there, so it is told before and not after an hour."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return
    if needed > free:
        told = f"{path} becomes {needed / 1e9:.1f} GB in {folder}, where {free / 1e9:.1f} GB are free"
        raise UserError(f"{told}: make room, or name another folder by OUTPACE_CACHE")


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(dict(value), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


PIECE_VALUES = 2**22  # values dequantised at once: numpy needs several times their size for it
F32, F16, BF16 = 0, 1, 30  # ggml's numbers of the types that safetensors has too
STORED = {F32: ("F32", "<u4", 0x7F800000), F16: ("F16", "<u2", 0x7C00), BF16: ("BF16", "<u2", 0x7F80)}
PIECE_OF_TYPE = STORED[F32]  # everything else is dequantised to float32


def check_types(header: GgufHeader, model: GgufModel, known: Container[int] = ()) -> None:
    """UserError if a tensor has a quantisation that the `gguf` package cannot undo; it names those that it can. What is
    `known` is not tried, and the package not imported for it."""
    for name in model.sources.values():
        kind = header.tensors[name].kind
        if kind not in known and not can_read(kind):
            found = f"tensor {name!r} has the unsupported quantisation {type_of(kind).name}"
            raise UserError(f"{header.file_of(name)}: {found}, allowed are {', '.join(readable_types())}")


def can_read(kind: int) -> bool:
    """Whether tensors of this ggml type can be read."""
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
    """The names of all ggml types that can be read."""
    from gguf.constants import GGMLQuantizationType

    return [kind.name for kind in GGMLQuantizationType if can_read(int(kind))]


def num_bytes(header: GgufHeader, model: GgufModel) -> int:
    """How large the safetensors file's data will be."""
    return sum(_stored_bytes(header, source) for source in model.sources.values())


def write_weights(header: GgufHeader, model: GgufModel, file: Path, progress: Callable[[str, float], None]) -> None:
    """Writes one safetensors file; memory holds a piece of a tensor, not the model."""
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


def half_rotary(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows [heads * head_dim, ...] from llama.cpp's order, rotary pairs side by side, to pairs half a head apart."""
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])  # [heads, head_dim / 2, 2, ...]
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _stored_bytes(header: GgufHeader, source: str) -> int:
    entry = header.tensors[source]
    return prod(entry.shape) * np.dtype(STORED.get(entry.kind, PIECE_OF_TYPE)[1]).itemsize


def rotary_unit(model: GgufModel, name: str) -> int:
    """How many rows of the file's tensor make a head in llama.cpp's order; 1 where rows stand as they should."""
    part = name.split(".")[2] if name.startswith("blk.") else ""
    return model.config.head_dim if model.is_paired and part in ("attn_q", "attn_k") else 1


def read_values(header: GgufHeader, model: GgufModel, name: str) -> np.ndarray:
    """The tensor as float32 in the order of Hugging Face; UserError where a value is not finite."""
    kind = header.tensors[name].kind
    pieces = [_as_float(piece, kind) for piece in _pieces(header, model, name)]
    whole = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    return whole.reshape(header.tensors[name].shape)


def _as_float(values: np.ndarray, kind: int) -> np.ndarray:
    """Bits as `_read` gives them."""
    if kind == BF16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.view(np.float16).astype(np.float32) if kind == F16 else values.view(np.float32)


def _pieces(header: GgufHeader, model: GgufModel, name: str) -> Iterator[np.ndarray]:
    """The tensor's rows in the order of Hugging Face, as they are stored."""
    unit = rotary_unit(model, name)
    is_paired = unit > 1
    entry = header.tensors[name]
    columns = entry.shape[-1]
    raw = header.raw(name).reshape(prod(entry.shape[:-1]), -1)  # [rows, bytes]
    if is_paired and len(entry.shape) == 1:  # a bias
        raw, columns = raw.reshape(columns, -1), 1
    step = max(1, PIECE_VALUES // (columns * unit)) * unit
    offset = _norm_offset(header, model, name)
    for start in range(0, len(raw), step):
        piece = _read(header, name, raw[start : start + step])
        if offset:
            piece = (piece.view(np.float32) - np.float32(offset)).view(piece.dtype)
        yield np.ascontiguousarray(half_rotary(piece, len(piece) // unit) if is_paired else piece)


def _norm_offset(header: GgufHeader, model: GgufModel, name: str) -> float:
    """What a checkpoint's weights of a norm lack, where this tensor is a norm's."""
    offset = model.config.norm_offset if name.endswith("norm.weight") else 0.0
    kind = header.tensors[name].kind
    if offset and kind != F32:
        found = f"the norm {name!r} has the type {type_of(kind).name}"
        raise UserError(f"{header.file_of(name)}: {found}, norms of this architecture must have F32")
    return offset


def _read(header: GgufHeader, name: str, raw: np.ndarray) -> np.ndarray:
    """Bytes of some rows [rows, bytes] as values [rows, columns], 16 and 32 bits as unsigned numbers."""
    kind = header.tensors[name].kind
    if kind in STORED:
        values = np.ascontiguousarray(raw).view(STORED[kind][1])
        exponent = STORED[kind][2]
    else:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found below
            values = dequantize(raw, GGMLQuantizationType(kind)).astype(np.float32, copy=False).view("<u4")
        exponent = PIECE_OF_TYPE[2]
    if (values & exponent == exponent).any():
        raise UserError(f"{header.file_of(name)} is damaged: tensor {name!r} holds values that are not finite")
    return values


class GgufSource(AbstractContextManager["GgufSource"]):
    """An open .gguf file, with the names and shapes of Hugging Face. What was handed out keeps the file mapped."""

    def __init__(self, path: Path | str) -> None:
        """UserError: not a GGUF file, torn, or not a model that runs here."""
        self.path = Path(path)
        with ExitStack() as stack:
            self._header: GgufHeader = stack.enter_context(open_model(self.path))
            self._model: GgufModel = read_model(self._header)
            check_types(self._header, self._model, COMMON)
        special_ids = gguf_tokenizer.special_ids(self.path, self._header.metadata)
        self.config: dict[str, Any] = self._model.settings | special_ids

    def __exit__(self, *error: object) -> None:
        """Nothing is held but the mapping, which goes with the last array."""

    @cached_property
    def tokenizer(self) -> GgufTokenizer:
        """What the header says of it, built when it is asked for; UserError where it is damaged. The header's texts,
        tens of megabytes of a large vocabulary, are not held beside it."""
        built = gguf_tokenizer.build_for(self._header, self._model)
        self._header.forget_front()
        self._header = replace(self._header, metadata={})
        return built

    def names(self) -> list[str]:
        """The names of all tensors, sorted."""
        return sorted(self._model.sources)

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """UserError unless every tensor of `shapes` is there with that shape."""
        for name, expected in shapes.items():
            found = self._header.tensors[self._source(name)].shape
            if found != tuple(expected):
                raise UserError(f"{self.path}: tensor {name!r} has shape {list(found)}, expected {list(expected)}")

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor; UserError if there is none of that name."""
        return self._header.file_of(self._source(name))

    def held(self, name: str) -> StoredSize:
        """What a tensor takes in the file, and in which format."""
        entry = self._header.tensors[self._source(name)]
        return StoredSize(type_of(entry.kind).name, entry.num_bytes)

    def write_tokenizer(self, folder: Path) -> None:
        """The tokenizer's files of a model folder."""
        write_tokenizer(self.tokenizer, self._model.config.max_positions, folder)

    def array(self, name: str) -> np.ndarray:
        """One tensor as float32. UserError: there is none of that name, or it holds infinities or nan."""
        return read_values(self._header, self._model, self._source(name))

    def tensor(self, name: str) -> torch.Tensor:
        """As `array`."""
        return torch.from_numpy(np.require(self.array(name), requirements="W"))

    def weight(self, name: str) -> StoredMatrix | np.ndarray:
        """A matrix as the file has it, anything else as float32."""
        source = self._source(name)
        entry = self._header.tensors[source]
        if len(entry.shape) != 2:
            return self.array(name)
        raw = self._header.raw(source).reshape(entry.shape[0], -1)
        order, kind, file = np.arange(len(raw), dtype=np.int32), type_of(entry.kind).name, self._header.file_of(source)
        unit = rotary_unit(self._model, source)
        order = half_rotary(order, len(raw) // unit) if unit > 1 else order
        read, forget = partial(self.array, name), partial(self._header.forget, source)
        return StoredMatrix(file, source, kind, raw, order, entry.shape[1], read, forget)

    def _source(self, name: str) -> str:
        if name not in self._model.sources:
            raise UserError(f"{self.path} holds no tensor {name!r}")
        return self._model.sources[name]
