"""MXFP4: blocks of 32 four-bit floats that share a power of two (OCP Microscaling Formats, version 1.0).

A GGUF block is the exponent's byte and 16 bytes, byte j holding values j and j + 16 in its lower and upper half. In
safetensors, blocks and exponents are tensors of their own, and byte j holds values 2j and 2j + 1.
"""

from __future__ import annotations

import numpy as np

MXFP4 = "MXFP4"  # ggml's name
BLOCK, BLOCK_BYTES = 32, 17
_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
VALUES = np.concatenate([_VALUES, -_VALUES])  # by code, the sign last
BIAS = 127  # of an exponent


def dequantise(raw: np.ndarray) -> np.ndarray:
    """Read rows of GGUF blocks, uint8 [rows, bytes], as float32 [rows, columns]; exponents of 255 give inf or nan."""
    blocks = raw.reshape(len(raw), -1, BLOCK_BYTES)
    codes = np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], -1)  # [rows, blocks, 32]
    with np.errstate(over="ignore", invalid="ignore"):
        scales = np.ldexp(np.float32(1), blocks[..., :1].astype(np.int32) - BIAS)
        return (VALUES[codes] * scales).reshape(len(raw), -1)


def to_ggml(blocks: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """Convert rows of safetensors blocks [rows, blocks, 16] and exponents [rows, blocks] to GGUF's: [rows, bytes]"""
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:-1], BLOCK)
    packed = codes[..., : BLOCK // 2] | codes[..., BLOCK // 2 :] << 4
    return np.concatenate([exponents[..., None], packed], -1).reshape(len(blocks), -1)
