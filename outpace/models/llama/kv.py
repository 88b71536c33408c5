"""How keys and values are held: float32, float16, or int8, where 32 entries of a head share a scale in bfloat16.

KIVI (arXiv:2402.02750) holds values so, by token, and keys by channel; by token for both, text that is added changes
nothing of what is there, and llama.cpp's Q8_0 cache does the same.
"""

from __future__ import annotations

from typing import Any

from outpace.core.errors import UserError
from outpace.models.llama.config.llama_config import LlamaConfig

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
