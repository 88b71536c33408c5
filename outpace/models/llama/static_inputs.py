"""What one captured forward reads: numbers at fixed places of the device, filled on the host and sent in one copy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

WORDS = 4  # of 64 pending nodes each
MOST_PENDING = 64 * WORDS
Shapes = Mapping[str, tuple[int, ...]]


class StaticInputs:
    """int64 tensors of these shapes by name, on the device in `device` and on the host in `host`.

    `idle` are the values that do no harm, by name; 0 for all others. The host writes into one of two buffers while the
    other may still be on its way.
    """

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        total = sum(math.prod(shape) for shape in shapes.values())
        pinned = device.type == "cuda"
        self._sent = torch.zeros(total, dtype=torch.int64, device=device)
        self._hosts = [torch.zeros(total, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._events = [torch.cuda.Event() for _ in range(2)] if pinned else []
        self._views = [_views(shapes, buffer.numpy()) for buffer in self._hosts]
        self.device: dict[str, Tensor] = _views(shapes, self._sent)
        self._turn = 0

    @property
    def buffer(self) -> Tensor:
        """All of it on the device."""
        return self._sent

    def begin(self, idle: Mapping[str, int]) -> dict[str, np.ndarray]:
        """The host's side with idle values, to be filled; waits where the copy before the last is not done."""
        self._turn = 1 - self._turn
        if self._events:
            self._events[self._turn].synchronize()
        host: dict[str, np.ndarray] = self._views[self._turn]
        self._hosts[self._turn].zero_()
        for name, value in idle.items():
            host[name].fill(value)
        return host

    @torch.inference_mode()
    def send(self) -> None:
        """One copy to the device, which the host does not wait for."""
        self._sent.copy_(self._hosts[self._turn], non_blocking=True)
        if self._events:  # on the stream of the copy: another device may be the current one
            self._events[self._turn].record(torch.cuda.current_stream(self._sent.device))


def _views(shapes: Shapes, flat: Any) -> dict[str, Any]:
    """Parts of a flat tensor or array, by name."""
    views, start = {}, 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        views[name] = flat[start : start + size].reshape(shape)
        start += size
    return views


def pass_shapes(batch: int, nodes: int) -> Shapes:
    """Of a forward over so many nodes of so many sessions."""
    each = (batch, nodes)
    return {
        "tokens": each,
        "positions": each,
        "slots": each,
        "depths": each,
        "lengths": (batch,),
        "bits": (*each, WORDS),
        "below": (batch, MOST_PENDING),
    }


def seen_bits(sees: np.ndarray) -> np.ndarray:
    """Which pending nodes each new node sees, bool [nodes, pending], as bits: int64 [nodes, WORDS]"""
    bits = np.zeros((len(sees), MOST_PENDING // 8), dtype=np.uint8)
    packed = np.packbits(sees, axis=1, bitorder="little")
    bits[:, : packed.shape[1]] = packed
    return bits.view("<i8")
