"""Opens GGUF files with a checkpoint's interface, reading weights in place, and converts them to model folders."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from outpace.core.arrays import torch
from outpace.core.errors import UserError
from outpace.models.files import mxfp4
from outpace.models.files.cache import entry_path, identity, make_once, new_folder
from outpace.models.files.checkpoint import NOTICES, SINGLE, Checkpoint
from outpace.models.files.gguf import tokenizer as gguf_tokenizer
from outpace.models.files.gguf.config import SHARED_GATE, expert_entry, read_model
from outpace.models.files.gguf.header import COMMON_TYPES, TensorEntry, ggml_type, open_gguf_model, part_files
from outpace.models.files.gguf.tokenizer import GgufTokenizer
from outpace.models.files.mxfp4 import MXFP4
from outpace.models.files.reading import DTYPES, RawTensor, write_json, write_safetensors
from outpace.models.llama.config.families import FAMILIES
from outpace.models.llama.config.llama_config import LlamaConfig
from outpace.models.llama.weight_sources import FLOATS, StoredMatrix, StoredSize
from outpace.models.options import Progress, silent

FORMAT_VERSION = 6  # part of the folder's name: raise it when the output changes
LONGEST_NAME = 100  # characters of the file's name in the folder's name
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
FILTERS = ("conv1d.weight", "conv.conv.weight")  # ends of names; Hugging Face's have one more dimension
PIECE_VALUES = 2**18  # values dequantised at once: numpy's several copies of them stay in a processor's cache


class GgufCheckpoint(AbstractContextManager["GgufCheckpoint"]):
    """An open .gguf file with Hugging Face tensor names and shapes. Arrays returned before keep the file mapped.

    Norms and biases are returned as float32 arrays, matrices as the file's own blocks.
    """

    def __init__(self, path: Path | str) -> None:
        """Raises UserError: not a GGUF file, damaged, or an unsupported model."""
        self.path = Path(path)
        self._header = open_gguf_model(self.path)
        self._model = read_model(self._header)
        for name in self._model.sources.values():
            entry = self._header.tensors[name]
            if entry.kind not in COMMON_TYPES and not can_read(entry.kind):
                found = f"tensor {name!r} has the unsupported quantisation {ggml_type(entry.kind).name}"
                raise UserError(f"{entry.path}: {found}, allowed are {', '.join(readable_types())}")
        metadata = gguf_tokenizer.cut_vocabulary(self._header.metadata, self._model.config.vocab_size)
        self._header = replace(self._header, metadata=metadata)
        special_ids = gguf_tokenizer.special_ids(self.path, metadata)
        self.config: dict[str, Any] = self._model.settings | special_ids
        self.notices: list[str] = self.config.get("outpace", {}).get(NOTICES, [])

    def __exit__(self, *error: object) -> None:
        """Do nothing: the mapping is released with the last array."""

    @property
    def has_chat_template(self) -> bool:
        return any(key.startswith("tokenizer.chat_template") for key in self._header.metadata)

    def vocabulary(self) -> dict[int, str]:
        """Return the tokens by id, without building the tokenizer."""
        return dict(enumerate(self._header.metadata.get("tokenizer.ggml.tokens", ())))

    @cached_property
    def tokenizer(self) -> GgufTokenizer:
        """The tokenizer, built at first use; UserError if it is damaged or has more tokens than the embedding has rows.

        The header's metadata, tens of megabytes for a large vocabulary, are released afterwards.
        """
        built, rows = gguf_tokenizer.build(self.path, self._header.metadata), self._model.config.vocab_size
        if built.size > rows:
            raise UserError(f"{self.path} names {built.size} tokens, its embedding has {rows} rows")
        self._header.forget_metadata()
        self._header = replace(self._header, metadata={})
        return built

    def names(self) -> list[str]:
        return sorted(self._model.sources)

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._entry(name).shape
        if name.endswith(SHARED_GATE):
            return (1, *shape)
        return (shape[0], 1, shape[1]) if name.endswith(FILTERS) else shape

    def read_config(self) -> LlamaConfig:
        """Return the configuration; the tensors are those that it implies since the file was opened."""
        return self._model.config

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Do nothing: all tensors had the shapes that the metadata imply when the file was opened."""

    def file_of(self, name: str) -> Path:
        return self._entry(name).path

    def held(self, name: str) -> StoredSize:
        entry = self._entry(name)
        return StoredSize(ggml_type(entry.kind).name, entry.num_bytes)

    def float_type(self, name: str) -> str:
        """Return the type that holds a tensor's values exactly: the stored one if it is a float type, else F32."""
        kind = self.held(name).kind
        return kind if kind in FLOATS else "F32"

    def write_tokenizer(self, folder: Path) -> None:
        built, limit = self.tokenizer, {"model_max_length": self._model.config.max_positions}
        (folder / "tokenizer.json").write_text(built.tokenizer.to_str(), encoding="utf-8")
        write_json(folder / "generation_config.json", {"_from_model_config": True} | built.special_ids)
        write_json(folder / "tokenizer_config.json", built.settings | limit)

    def raw(self, name: str) -> RawTensor:
        """Return one tensor in its `float_type`; UserError if it does not exist or is not finite."""
        return self.rounded(name, self.float_type(name))

    def rounded(self, name: str, kind: str) -> RawTensor:
        """Return one tensor rounded to a type in DTYPES. Raises as `raw`."""
        own, values, end = self.float_type(name), np.empty(prod(self.shape(name)), DTYPES[kind]), 0
        for piece in self.pieces(name):
            start, end = end, end + piece.size
            values[start:end] = RawTensor(own, piece).to(kind).values.reshape(-1)
        return RawTensor(kind, values.reshape(self.shape(name)))

    def array(self, name: str) -> np.ndarray:
        """Return one tensor as float32. Raises as `raw`."""
        return self.raw(name).float32()

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor as float32 for torch. Raises as `raw`."""
        return torch.from_numpy(np.require(self.array(name), requirements="W"))

    def weight(self, name: str) -> StoredMatrix | np.ndarray:
        """Return a matrix as stored, anything else as float32."""
        entry, source = self._entry(name), self._model.sources[name]
        if len(entry.shape) != 2 or name.endswith(FILTERS):
            return self.array(name)
        rows, columns = entry.shape
        unit, order = self._rows_of_head(source), np.arange(rows, dtype=np.int32)
        order = deinterleave_rope(order, rows // unit) if unit > 1 else order
        raw, kind = entry.raw().reshape(rows, -1), ggml_type(entry.kind).name
        return StoredMatrix(entry.path, source, kind, raw, order, columns, partial(self.array, name), entry.forget)

    def pieces(self, name: str) -> Iterator[np.ndarray]:
        """Yield a tensor's rows in Hugging Face's order, in its `float_type`. Raises as `raw`."""
        entry, source = self._entry(name), self._model.sources[name]
        unit, offset, columns = self._rows_of_head(source), self._norm_offset(source), entry.shape[-1]
        raw = entry.raw().reshape(prod(entry.shape[:-1]), -1)  # [rows, bytes]
        if unit > 1 and len(entry.shape) == 1:  # a bias
            raw, columns = raw.reshape(columns, -1), 1
        step = max(1, PIECE_VALUES // (columns * unit)) * unit
        for start in range(0, len(raw), step):
            found = dequantise(entry.kind, raw[start : start + step])
            if not found.is_finite():
                raise UserError(f"{entry.path} is damaged: tensor {source!r} holds values that are not finite")
            values = found.values - np.float32(offset) if offset else found.values
            if source.endswith(".ssm_a"):
                values = self._log_rates(entry, values)
            yield np.ascontiguousarray(deinterleave_rope(values, len(values) // unit) if unit > 1 else values)

    @staticmethod
    def _log_rates(entry: TensorEntry, rates: np.ndarray) -> np.ndarray:
        """Return A_log of a delta net's stored -exp(A_log)."""
        if not (rates < 0).all():
            raise UserError(f"{entry.path} is damaged: a decay rate of a recurrent layer is not below 0")
        return np.log(-rates.astype(np.float64)).astype(np.float32)

    def _rows_of_head(self, source: str) -> int:
        """Return the number of rows per head if the tensor is in llama.cpp's interleaved order, else 1."""
        is_rotated = source.startswith("blk.") and source.split(".")[2] in ("attn_q", "attn_k")
        return self._model.config.head_dim if self._model.has_interleaved_rope and is_rotated else 1

    def _norm_offset(self, source: str) -> float:
        """Return what to subtract from a norm's weights, 0 for other tensors."""
        is_norm = source.endswith("norm.weight") and not source.endswith("ssm_norm.weight")
        offset = self._model.config.norm_offset if is_norm else 0.0
        entry = self._header.tensors[source]
        if offset and ggml_type(entry.kind).name != "F32":
            found = f"the norm {source!r} has the type {ggml_type(entry.kind).name}"
            raise UserError(f"{entry.path}: {found}, norms of this architecture must have F32")
        return offset

    def _entry(self, name: str) -> TensorEntry:
        if name not in self._model.sources:
            raise UserError(f"{self.path} holds no tensor {name!r}")
        entry = self._header.tensors[self._model.sources[name]]
        return expert_entry(entry, name, self._model.config)


def dequantise(kind: int, raw: np.ndarray) -> RawTensor:
    """Read rows [rows, bytes] of a ggml type as values [rows, columns]: floats as stored, other types as F32."""
    name = ggml_type(kind).name
    if name in FLOATS:
        return RawTensor(name, np.ascontiguousarray(raw).view(DTYPES[name]))
    with np.errstate(over="ignore", invalid="ignore"):  # the caller checks the values
        if name == "Q8_0":  # mostly the embedding, which a packed draft shares; importing gguf takes as long as this
            blocks = raw.reshape(-1, 34)
            scales = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
            return RawTensor("F32", (scales * blocks[:, 2:].view(np.int8)).reshape(len(raw), -1))
        if name == MXFP4:
            return RawTensor("F32", mxfp4.dequantise(raw))
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        return RawTensor("F32", dequantize(raw, GGMLQuantizationType(kind)).astype(np.float32, copy=False))


def can_read(kind: int) -> bool:
    """Return whether tensors of this ggml type can be read."""
    try:
        dequantise(kind, np.zeros((1, ggml_type(kind).bytes), np.uint8))
    except (ValueError, KeyError, NotImplementedError):
        return False
    return True


def readable_types() -> list[str]:
    """List the names of all readable ggml types."""
    from gguf.constants import GGMLQuantizationType

    return [kind.name for kind in GGMLQuantizationType if can_read(int(kind))]


def deinterleave_rope(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder rows [heads * head_dim, ...] from llama.cpp's interleaved rotary pairs to pairs (i, i + head_dim / 2)."""
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])  # [heads, head_dim / 2, 2, ...]
    return pairs.swapaxes(1, 2).reshape(values.shape)


def convert(path: Path, cache: Path | None = None, progress: Progress = silent) -> Path:
    """Return the Hugging Face folder for the GGUF file `path`, converted under `cache` if it does not exist yet.

    `progress(stage, fraction)` is called meanwhile, fraction from 0 to 1. Processes that convert the same file
    concurrently wait for the first. Raises UserError: not a GGUF file, damaged, an unsupported model, or a disk error.
    """
    parts = [part for part in part_files(path) if part == path or part.is_file()]
    folder = entry_path(f"{path.stem[:LONGEST_NAME]}-{identity(parts)}-v{FORMAT_VERSION}", cache)
    make_once(
        folder,
        _is_complete,
        partial(_write_folder, path, folder, progress),
        partial(progress, "waiting for another conversion", 0.0),
    )
    return folder


def _is_complete(folder: Path) -> bool:
    """Return whether the folder holds FILES and all weights, in the shapes that its config implies."""
    if not all((folder / name).is_file() for name in FILES):
        return False
    try:
        with Checkpoint.open(folder) as checkpoint:
            checkpoint.read_config()
    except UserError:
        return False
    return True


def _write_folder(path: Path, folder: Path, progress: Progress) -> None:
    progress("reading", 0.0)
    with GgufCheckpoint(path) as source:
        family = FAMILIES[source.config["model_type"]]
        names = {family.stored_name(name): name for name in source.names()}
        tensors = {stored: (source.float_type(name), source.shape(name)) for stored, name in names.items()}
        _ = source.tokenizer  # refused before anything is written
        sizes = (prod(shape) * np.dtype(DTYPES[kind]).itemsize for kind, shape in tensors.values())
        _check_space(path, folder.parent, sum(sizes))
        with new_folder(folder) as temporary:
            write_json(temporary / "config.json", source.config)
            source.write_tokenizer(temporary)
            write_safetensors(
                temporary / SINGLE,
                tensors,
                lambda stored: source.pieces(names[stored]),
                partial(progress, "converting"),
            )
    progress("done", 1.0)


def _check_space(path: Path, folder: Path, needed: int) -> None:
    """Raise UserError before a long conversion that would fill the disk: 4-bit weights become 32-bit."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return
    if needed > free:
        needs = f"{path} becomes {needed / 1e9:.1f} GB in {folder}, where {free / 1e9:.1f} GB are free"
        raise UserError(f"{needs}: make room, or name another folder by OUTPACE_CACHE")
