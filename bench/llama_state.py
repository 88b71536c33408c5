"""A text that llama.cpp has read, over and over: long contexts in no time, as long_context.py fills the native runtime.

It rewrites what `llama_state_seq_get_data` gives (llama.cpp's src/llama-kv-cache.cpp, `state_write`): magic, sequence
and streams, then a count of cells; of each its position and sequence; whether values lie transposed, and how many
layers; each layer's keys, then each layer's values.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

START = 12  # bytes before the count of cells


class _Reader:
    """A position in a saved state."""

    def __init__(self, state: np.ndarray) -> None:
        self._state, self._at = state, 0

    def take(self, size: int) -> np.ndarray:
        start, self._at = self._at, self._at + size
        return self._state[start : self._at]


def _number(taken: np.ndarray) -> int:
    return int.from_bytes(taken.tobytes(), "little")


def repeated(state: np.ndarray, length: int) -> np.ndarray:
    """A saved sequence with its cells over and over, so many of them, at rising positions. uint8 [bytes]"""
    reader = _Reader(state)
    out = [reader.take(START)]
    count = _number(reader.take(4))
    reader.take(12 * count)
    cells = np.stack([np.arange(length), np.ones(length), np.zeros(length)], axis=1)  # position, one sequence: 0
    out += [np.array([length], "<u4"), cells.astype("<i4")]
    chosen = np.arange(length) % count
    transposed, layers = reader.take(4), reader.take(4)
    out += [transposed, layers]
    for is_column in [False] * _number(layers) + [bool(_number(transposed))] * _number(layers):
        kind, size = reader.take(4), reader.take(4 if is_column else 8)
        width = reader.take(4 if is_column else 0)
        rows = _number(width) if is_column else 1  # of all cells each
        held = reader.take(rows * count * _number(size)).reshape(rows, count, -1)
        out += [kind, size, width, held[:, chosen]]
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8).reshape(-1) for part in out])


def lengthen(context: Any, length: int) -> None:
    """What sequence 0 of a `llama_context` holds, over and over, up to so many tokens."""
    import llama_cpp

    size = llama_cpp.llama_state_seq_get_size(context, 0)
    state = np.empty(size, np.uint8)
    pointer = ctypes.POINTER(ctypes.c_uint8)
    llama_cpp.llama_state_seq_get_data(context, state.ctypes.data_as(pointer), size, 0)
    longer = repeated(state, length)
    if llama_cpp.llama_state_seq_set_data(context, longer.ctypes.data_as(pointer), len(longer), 0) != len(longer):
        raise RuntimeError("llama.cpp does not take a state that was made longer: its layout has changed")
