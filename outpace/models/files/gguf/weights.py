"""Writes a GGUF file's tensors as safetensors: float32, but for what the file holds in 16 bits, a piece at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from outpace.core.errors import UserError
from outpace.models.files.gguf.config import GgufModel
from outpace.models.files.gguf.header import GgufHeader
from outpace.models.files.gguf.types import type_of

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
