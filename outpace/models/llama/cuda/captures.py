"""Captures of a pass over static buffers, replayed as a CUDA graph, or by a stand-in on any device.

The stand-in runs the same callable each time; no buffer may move between two replays. In the tests it also refuses what
no graph can replay (`tests/graph_rules.py`), so a CPU tests what a GPU will do.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Work = Callable[[], None]
Shapes = Mapping[str, tuple[int, ...]]
WARM_UPS = 2  # runs before a capture, in which libraries choose their kernels and allocate workspaces
WORDS = 4  # of 64 pending nodes each
MAX_PENDING = 64 * WORDS

_CAPTURING = threading.Lock()  # the allocator's capture state is global to the process: one capture at a time


class HostRead(RuntimeError):
    """Raised when a captured callable does something that no graph can replay."""


class EagerCapture:
    """The stand-in for a graph: runs the same callable again. `buffers` must not move."""

    def __init__(self, work: Work, buffers: Sequence[Tensor]) -> None:
        self._work, self._buffers = work, buffers
        self._addresses = [buffer.data_ptr() for buffer in buffers]
        work()

    def replay(self) -> None:
        if self._addresses != [buffer.data_ptr() for buffer in self._buffers]:
            raise HostRead("a static buffer moved after the capture: a graph would write to where it was")
        self._work()


class CudaCapture:
    """A CUDA graph, warmed up and captured on `stream` and replayed on the caller's. `memory`: the graphs' own pool."""

    def __init__(self, work: Work, buffers: Sequence[Tensor], stream: Any, memory: Any) -> None:
        self._kept = buffers  # a graph knows addresses only
        self._graph = torch.cuda.CUDAGraph()
        with _CAPTURING, torch.cuda.device(stream.device):
            caller = torch.cuda.current_stream()
            stream.wait_stream(caller)
            try:
                with torch.cuda.stream(stream):
                    for _ in range(WARM_UPS):
                        work()
                # thread_local: another thread, which drafts, may allocate meanwhile
                with torch.cuda.graph(self._graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
                    work()
            finally:  # a failed capture would leave this thread on its stream, and its warm-ups running
                torch.cuda.set_stream(caller)
                caller.wait_stream(stream)

    def replay(self) -> None:
        self._graph.replay()


class Captures:
    """The captures of one model, by key. All of them are dropped when their buffers have moved."""

    def __init__(self, is_eager: bool) -> None:
        self.is_eager = is_eager
        self._memory: Any = None  # shared by the graphs: none leaves anything there that another reads
        self._stream: Any = None  # one for all captures, because libraries keep a workspace for each stream
        self._made: dict[Hashable, EagerCapture | CudaCapture] = {}
        self._buffers: dict[Hashable, Any] = {}
        self._addresses: tuple[int, ...] = ()
        self._is_busy = False
        self.count = 0  # captures so far

    def forget_if_moved(self, *tensors: Tensor) -> None:
        """Drop all captures if these tensors are not where they were."""
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
        if addresses != self._addresses:
            if self._stream is not None:
                with _CAPTURING:  # waiting for a device breaks another thread's capture there
                    torch.cuda.synchronize(self._stream.device)  # a replay may still be running in their memory
            self._made.clear()
            self._memory = None  # the allocator cannot reuse a pool whose graphs are all gone
            self._addresses = addresses

    def buffers(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return static buffers, which are created once and never within a captured pass."""
        if key not in self._buffers:
            if self._is_busy:
                raise HostRead(f"static buffers {key} are made within a captured pass")
            self._buffers[key] = make()
        return self._buffers[key]

    def prepare(self, key: Hashable, work: Work, *buffers: Tensor) -> None:
        """Capture `work` if it is not captured yet; the buffers must hold harmless values."""
        if key in self._made:
            return
        if not self.is_eager:
            self._stream = self._stream or torch.cuda.Stream(buffers[0].device)
            self._memory = self._memory or torch.cuda.graph_pool_handle()
        self._is_busy = True
        try:
            eager = self.is_eager
            made = EagerCapture(work, buffers) if eager else CudaCapture(work, buffers, self._stream, self._memory)
        finally:
            self._is_busy = False
        self._made[key] = made
        self.count += 1

    def begin(
        self, key: Hashable, inputs: StaticInputs, work: Work, *buffers: Tensor, idle: Mapping[str, int] | None = None
    ) -> dict[str, np.ndarray]:
        """Return the inputs to fill and send before `replay`; first capture `work` over idle inputs if needed."""
        if key not in self._made:
            inputs.begin(idle or {})
            inputs.send()
            self.prepare(key, work, inputs.buffer, *buffers)
        return inputs.begin(idle or {})

    def replay(self, key: Hashable) -> None:
        self._is_busy = True
        try:
            self._made[key].replay()
        finally:
            self._is_busy = False


class StaticInputs:
    """int64 inputs of a captured pass by name: filled on the host, and sent to fixed addresses in one copy.

    `device` holds the tensors on the device. The host writes to one of two buffers while the other may still be being
    copied.
    """

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        total = sum(math.prod(shape) for shape in shapes.values())
        pinned = device.type == "cuda"
        self.buffer = torch.zeros(total, dtype=torch.int64, device=device)  # all inputs on the device
        self._hosts = [torch.zeros(total, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._events = [torch.cuda.Event() for _ in range(2)] if pinned else []
        self._views = [_views(shapes, host.numpy()) for host in self._hosts]
        self.device: dict[str, Tensor] = _views(shapes, self.buffer)
        self._current = 0

    def begin(self, idle: Mapping[str, int]) -> dict[str, np.ndarray]:
        """Return the host's arrays to fill, with harmless values: those of `idle` by name, and 0 for all others.

        Waits if the copy before the last is not finished.
        """
        self._current = 1 - self._current
        if self._events:
            self._events[self._current].synchronize()
        host: dict[str, np.ndarray] = self._views[self._current]
        self._hosts[self._current].zero_()
        for name, value in idle.items():
            host[name].fill(value)
        return host

    @torch.inference_mode()
    def send(self) -> None:
        """Start the copy to the device; the host does not wait for it."""
        self.buffer.copy_(self._hosts[self._current], non_blocking=True)
        if self._events:  # on the stream of the copy: another device may be the current one
            self._events[self._current].record(torch.cuda.current_stream(self.buffer.device))


def _views(shapes: Shapes, flat: Any) -> dict[str, Any]:
    """Return parts of a flat tensor or array by name."""
    views, start = {}, 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        views[name] = flat[start : start + size].reshape(shape)
        start += size
    return views


def pass_shapes(batch: int, nodes: int) -> Shapes:
    """Return the input shapes of a pass over `nodes` nodes of `batch` sessions each."""
    each = (batch, nodes)
    return {
        **dict.fromkeys(("tokens", "positions", "slots", "depths"), each),
        "lengths": (batch,),
        "bits": (*each, WORDS),
        "below": (batch, MAX_PENDING),
    }


def visible_bits(visible: np.ndarray) -> np.ndarray:
    """Pack which pending nodes each new node sees, bool [nodes, pending], into bits: int64 [nodes, WORDS]"""
    bits = np.zeros((len(visible), MAX_PENDING // 8), dtype=np.uint8)
    packed = np.packbits(visible, axis=1, bitorder="little")
    bits[:, : packed.shape[1]] = packed
    return bits.view("<i8")
