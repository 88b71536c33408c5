"""Matrices by GPTQ and AWQ as the native kernels take them: in blocks of 32 or 64 inputs, no number rounded.

A block holds scale and -zero of an output in half precision, then nibbles as GGUF's formats have them: of every 32
inputs, the first 16 in the lower halves of 16 bytes, the others in the upper ones. (Q4_1 itself would not do: its
second number would be -scale * zero, which has up to 15 bits where half precision has 11.)
"""

from __future__ import annotations

import numpy as np

from outpace.models.files.four_bits import WHOLE, Matrix, Scheme

PART = 32  # inputs whose nibbles lie together
NARROW, WIDE = "U4_32", "U4_64"  # the kernels' names
INPUTS = {NARROW: 32, WIDE: 64}  # of a block
BYTES = {kind: 4 + inputs // 2 for kind, inputs in INPUTS.items()}  # of a block


def kind_of(scheme: Scheme, inputs: int) -> str | None:
    """The format of a matrix with so many inputs whose groups are of neighbours; None where none fits."""
    kinds = (WIDE, NARROW) if scheme.group == WHOLE or scheme.group % INPUTS[WIDE] == 0 else (NARROW,)
    return next((kind for kind in kinds if inputs % INPUTS[kind] == 0), None)


def held_bytes(kind: str, count: int) -> int:
    """Of so many weights."""
    return count // INPUTS[kind] * BYTES[kind]


def blocks_of(kind: str, matrix: Matrix) -> np.ndarray:
    """uint8 [outputs, bytes of a row]"""
    outputs = len(matrix.q)
    groups = matrix.groups[:: INPUTS[kind]]
    numbers = (matrix.scales, -matrix.zeros.astype("<f2"))
    q = matrix.q.reshape(outputs, len(groups), -1, PART)
    data = np.empty((outputs, len(groups), BYTES[kind]), np.uint8)
    data[..., :4] = np.stack([part.astype("<f2")[:, groups] for part in numbers], axis=-1).view(np.uint8)
    data[..., 4:] = (q[..., : PART // 2] | q[..., PART // 2 :] << 4).reshape(*data.shape[:2], -1)
    return data.reshape(outputs, -1)
