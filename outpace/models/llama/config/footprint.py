"""What a model will take in memory once it is loaded, told from the names, shapes and formats of its weights alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from outpace.core.errors import UserError
from outpace.models.llama.config.llama_config import LlamaConfig

FLOATS = ("F32", "F16", "BF16")  # formats of files that have no blocks
FLOAT_BYTES = 4
ROUNDED = "Q8_0"  # what int8 is, by its name in files
INT8_BYTES = 34 / 32  # of a weight: a byte, and a scale in half precision for 32
INT4_BYTES = 20 / 32  # half a byte, and a scale and a smallest value for 32


class StoredSize(NamedTuple):
    """A tensor as its file has it: the name of its format, and bytes."""

    kind: str
    bytes: int


Shapes = Mapping[str, tuple[int, ...]]


def has_blocks(kind: str, formats: Collection[str]) -> bool:
    """Whether the kernels, which take these formats, take this one as the file has it."""
    return kind in formats and kind not in FLOATS


def native_bytes(
    shapes: Shapes,
    held: Callable[[str], StoredSize],
    formats: Collection[str],
    kept: bool,
    in_four: bool = False,
    threads: int = 1,
) -> int:
    """By the native runtime: as the file has it where that is `kept` and the format one of `formats`, else int8, with
    what is rounded at a time: blocks of these formats, and floats of all else; floats of these formats are read where
    they lie. `in_four`: what a layer has in float in four bits, which each of `threads` does by way of floats."""
    total, rounded = 0.0, 0.0
    for name, shape in shapes.items():
        count = math.prod(shape)
        if len(shape) < 2:
            total += count * FLOAT_BYTES
            continue
        kind, size = held(name)
        if has_blocks(kind, formats):
            stays = kept or kind == ROUNDED
            total += size if stays else count * INT8_BYTES
            rounded = max(rounded, 0.0 if stays else size)
            continue
        is_small = in_four and ".layers." in name
        total += count * (INT4_BYTES if is_small else INT8_BYTES)
        at_once = threads if is_small else int(kind not in formats)
        rounded = max(rounded, 2 * FLOAT_BYTES * count * at_once)
    return int(total + rounded)


def float_bytes(shapes: Shapes, itemsize: int) -> int:
    """By the torch runtime, which holds all weights in one type and lays out one tensor at a time."""
    counts = [math.prod(shape) for shape in shapes.values()]
    return itemsize * (sum(counts) + max(counts))


ENTRY_BYTES = {"float32": 4, "float16": 2, "int8": 1}
SCALED = 32  # entries that share a scale


def num_scales(head_dim: int) -> int:
    """Scales of one head's key, or value, in int8."""
    return -(-head_dim // SCALED)


def token_bytes(config: LlamaConfig, kv_dtype: str) -> int:
    """Bytes of keys and values a token, all layers together."""
    scales = 2 * num_scales(config.head_dim) if kv_dtype == "int8" else 0
    return config.kv_entries // config.head_dim * (config.head_dim * ENTRY_BYTES[kv_dtype] + scales)


def held_as(kernels: Any, kv_dtype: str) -> str | bool:
    """What the native kernels call it; UserError where they are older than int8."""
    if hasattr(kernels, "KV_DTYPES"):
        return kv_dtype
    if kv_dtype == "int8":
        raise UserError("kv_dtype int8 needs newer kernels: `pip install ./kernels` in a checkout")
    return kv_dtype == "float16"
