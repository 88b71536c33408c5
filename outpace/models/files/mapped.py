"""A safetensors file mapped into memory: its tensors as float32 arrays, read where they are used, without torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

KINDS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # bfloat16: the upper half of a float32's bits
_LENGTH = 8  # bytes before the header, which say how long it is


class MappedFile:
    """A file that safetensors has opened before, and so found whole. Arrays that were handed out keep it mapped."""

    def __init__(self, path: Path) -> None:
        """OSError or ValueError where it cannot be mapped, or is no longer what it was."""
        self._bytes = np.memmap(path, np.uint8, "r")
        start = _LENGTH + int.from_bytes(self._bytes[:_LENGTH].tobytes(), "little")
        self._entries = json.loads(self._bytes[_LENGTH:start].tobytes())
        self._values = self._bytes[start:]

    def array(self, name: str) -> np.ndarray:
        """One tensor of a type of KINDS as float32: the file's own memory where it holds float32 already."""
        entry = self._entries[name]
        first, last = entry["data_offsets"]
        held = self._values[first:last].view(KINDS[entry["dtype"]]).reshape(entry["shape"]).view(np.ndarray)
        if entry["dtype"] == "BF16":
            wide = np.zeros((*held.shape, 2), "<u2")
            wide[..., 1] = held
            held = wide.view("<f4")[..., 0]
        return np.require(held, np.float32, ["C", "A"])


def is_finite(values: np.ndarray) -> bool:
    """Whether no element is nan or infinite: the sum tells at the speed of memory, unless it overflows itself."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(np.add.reduce(values, axis=None)) or np.isfinite(values).all())
