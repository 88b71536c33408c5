"""Matrices by GPTQ and AWQ as the native kernels take them: in blocks of 32 or 64 inputs, no number rounded.

A block holds scale and -zero of an output in half precision, then nibbles as GGUF's formats have them: of every 32
inputs, the first 16 in the lower halves of 16 bytes, the others in the upper ones. (Q4_1 itself would not do: its
second number would be -scale * zero, which has up to 15 bits where half precision has 11.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from outpace.core.errors import UserError
from outpace.models.files.four_bits import AWQ, WHOLE, Matrix, Scheme, read_matrix, read_zeros, shape_of
from outpace.models.llama.native.binding import load_kernels

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


def blocks_of(kind: str, scheme: Scheme, parts: Mapping[str, np.ndarray], where: str) -> np.ndarray:
    """uint8 [outputs, bytes of a row] of the parts of a matrix, as read_matrix takes them; errors as there."""
    convert = _converter()
    if convert is None:
        return by_numpy(kind, read_matrix(scheme, parts, where))
    read_zeros(scheme, parts, where)
    outputs, inputs = shape_of(scheme, parts["qweight"].shape)
    types = {"qweight": np.uint32, "qzeros": np.uint32, "scales": np.uint16}
    held = [np.require(parts[name], requirements=["C", "A"]).view(dtype) for name, dtype in types.items()]
    data = np.empty((outputs, held_bytes(kind, inputs)), np.uint8)
    group = inputs if scheme.group == WHOLE else scheme.group
    convert(kind, *held, group, scheme.method == AWQ, scheme.first_zero, data)
    return data


def _converter() -> Any:
    """The kernels' way from words to blocks; None where they are not there, or were built before they had one."""
    try:
        return getattr(load_kernels(), "blocks_of_words", None)
    except UserError:
        return None


def by_numpy(kind: str, matrix: Matrix) -> np.ndarray:
    """As `blocks_of`, slower; its definition."""
    outputs = len(matrix.q)
    groups = matrix.groups[:: INPUTS[kind]]
    numbers = (matrix.scales, -matrix.zeros.astype("<f2"))
    q = matrix.q.reshape(outputs, len(groups), -1, PART)
    data = np.empty((outputs, len(groups), BYTES[kind]), np.uint8)
    data[..., :4] = np.stack([part.astype("<f2")[:, groups] for part in numbers], axis=-1).view(np.uint8)
    data[..., 4:] = (q[..., : PART // 2] | q[..., PART // 2 :] << 4).reshape(*data.shape[:2], -1)
    return data.reshape(outputs, -1)
