"""Writes a GGUF file's tensors as safetensors: float32, but for what the file holds in 16 bits, a piece at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from outpace.core.errors import UserError
from outpace.models.files.gguf.config import GgufModel
from outpace.models.files.gguf.header import GgufHeader

PIECE_VALUES = 2**22  # values dequantised at once: numpy needs several times their size for it
F32, F16, BF16 = 0, 1, 30  # ggml's numbers of the types that safetensors has too
STORED = {F32: ("F32", "<u4", 0x7F800000), F16: ("F16", "<u2", 0x7C00), BF16: ("BF16", "<u2", 0x7F80)}
PIECE_OF_TYPE = STORED[F32]  # everything else is dequantised to float32


def check_types(header: GgufHeader, model: GgufModel) -> None:
    """UserError if a tensor has a quantisation that the `gguf` package cannot undo; it names those that it can."""
    for name in model.sources.values():
        kind = header.tensors[name].kind
        if not can_read(kind):
            found = f"tensor {name!r} has the unsupported quantisation {_type_name(kind)}"
            raise UserError(f"{header.path}: {found}, allowed are {', '.join(readable_types())}")


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


def _pieces(header: GgufHeader, model: GgufModel, name: str) -> Iterator[np.ndarray]:
    """The tensor's rows in the order of Hugging Face, as they are stored."""
    part = name.split(".")[2] if name.startswith("blk.") else ""
    is_paired = model.is_paired and part in ("attn_q", "attn_k")
    entry = header.tensors[name]
    columns = entry.shape[-1]
    raw = header.raw(name).reshape(prod(entry.shape[:-1]), -1)  # [rows, bytes]
    if is_paired and len(entry.shape) == 1:  # a bias
        raw, columns = raw.reshape(columns, -1), 1
    unit = model.config.head_dim if is_paired else 1
    step = max(1, PIECE_VALUES // (columns * unit)) * unit
    for start in range(0, len(raw), step):
        piece = _read(header, name, raw[start : start + step])
        yield np.ascontiguousarray(half_rotary(piece, len(piece) // unit) if is_paired else piece)


def _read(header: GgufHeader, name: str, raw: np.ndarray) -> np.ndarray:
    """Bytes of some rows [rows, bytes] as values [rows, columns], 16 and 32 bits as unsigned numbers."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = header.tensors[name].kind
    if kind in STORED:
        values = np.ascontiguousarray(raw).view(STORED[kind][1])
        exponent = STORED[kind][2]
    else:
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found below
            values = dequantize(raw, GGMLQuantizationType(kind)).astype(np.float32, copy=False).view("<u4")
        exponent = PIECE_OF_TYPE[2]
    if (values & exponent == exponent).any():
        raise UserError(f"{header.path} is damaged: tensor {name!r} holds values that are not finite")
    return values


def _type_name(kind: int) -> str:
    from gguf.constants import GGMLQuantizationType

    return GGMLQuantizationType(kind).name
