"""Memory that a model takes once it is loaded, computed from the names, shapes and formats of its weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from outpace.models.llama.config.llama_config import LlamaConfig

FLOATS = ("F32", "F16", "BF16")  # a file's formats without blocks
FLOAT_BYTES = 4
INT8_FORMAT = "Q8_0"  # the name of int8 in files
INT8_BYTES = 34 / 32  # per weight: a byte, and a half-precision scale for 32 of them
INT4_BYTES = 20 / 32  # per weight: half a byte, and a scale and a minimum for 32 of them
ENTRY_BYTES = {"float32": 4, "float16": 2, "int8": 1}  # of keys and values
SCALED = 32  # int8 entries of a head that share a scale in bfloat16

Shapes = Mapping[str, tuple[int, ...]]


class StoredSize(NamedTuple):
    """The format and size in bytes of a tensor in its file."""

    kind: str
    bytes: int


def has_blocks(kind: str, formats: Collection[str]) -> bool:
    """Return whether the kernels, which read these formats, keep this one as it is."""
    return kind in formats and kind not in FLOATS


def native_bytes(
    shapes: Shapes,
    stored: Callable[[str], StoredSize],
    formats: Collection[str],
    kept: bool,
    in_four: bool = False,
    threads: int = 1,
) -> int:
    """Return the bytes that the native runtime needs, with the largest buffers of loading.

    A matrix in a block format of `formats` stays as it is if `kept`; all others become int8, or four bits for the
    layers' float matrices if `in_four`. Float formats of `formats` are read in place; other matrices are rounded by way
    of a float32 copy, and four bits need one for each of `threads`.
    """
    total, buffer = 0.0, 0.0
    for name, shape in shapes.items():
        count = math.prod(shape)
        if len(shape) < 2:
            total += count * FLOAT_BYTES
            continue
        kind, size = stored(name)
        if has_blocks(kind, formats):
            stays = kept or kind == INT8_FORMAT
            total += size if stays else count * INT8_BYTES
            buffer = max(buffer, 0.0 if stays else size)
            continue
        is_small = in_four and ".layers." in name
        total += count * (INT4_BYTES if is_small else INT8_BYTES)
        copies = threads if is_small else int(kind not in formats)
        buffer = max(buffer, 2 * FLOAT_BYTES * count * copies)
    return int(total + buffer)


def float_bytes(shapes: Shapes, itemsize: int) -> int:
    """Return the bytes that the torch runtime needs: one type for all weights, and one tensor more while loading."""
    counts = [math.prod(shape) for shape in shapes.values()]
    return itemsize * (sum(counts) + max(counts))


def num_scales(head_dim: int) -> int:
    """Return the number of scales of one head's key, or value, in int8.

    KIVI (arXiv:2402.02750) scales values by token and keys by channel; by token for both, appended text does not change
    what is stored, and the Q8_0 cache of llama.cpp does the same.
    """
    return -(-head_dim // SCALED)


def token_bytes(config: LlamaConfig, kv_dtype: str) -> int:
    """Return the bytes of keys and values per token, all layers together."""
    scales = 2 * num_scales(config.head_dim) if kv_dtype == "int8" else 0
    return config.kv_entries // config.head_dim * (config.head_dim * ENTRY_BYTES[kv_dtype] + scales)
