"""Work that is captured once and then replayed on the same buffers: as a CUDA graph, or its stand-in on any device.

The stand-in runs the same callable each time and holds it to what a graph demands: no read of a device's values by the
host, no tensor made from the host's, no buffer that moves between two replays. So a CPU tests what a GPU will do.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Work = Callable[[], None]
WARM_UPS = 2  # runs before a capture: libraries choose their kernels and make their workspaces then

_CAPTURING = threading.Lock()  # the allocator's side of a capture is the process's: one at a time

# Operations whose result the host must have before it can go on, and those that take values from it.
HOST_OPERATIONS = {
    "_local_scalar_dense",
    "equal",
    "is_nonzero",
    "item",
    "lift_fresh",
    "lift_fresh_copy",
    "masked_select",
    "nonzero",
    "pin_memory",
    "_pin_memory",
    "resize_",
    "set_",
    "unique_consecutive",
    "_unique2",
}
HOST_METHODS = {"__bool__", "__float__", "__index__", "__int__", "cpu", "item", "numpy", "tolist"}


class HostRead(RuntimeError):
    """A captured callable did what no graph can replay."""


class _Operations(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and each operation would pay for being kept from it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = list(_tensors((*args, *kwargs.values())))
        is_chosen = name in ("index", "index_put", "index_put_") and any(
            tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors[1:]
        )
        goal = kwargs.get("device")
        crosses = len({tensor.device.type for tensor in tensors if tensor.dim() or name == "copy_"}) > 1 or (
            name == "_to_copy" and goal is not None and torch.device(goal).type != tensors[0].device.type
        )
        if crosses and name == "copy_" and (kwargs.get("non_blocking") or args[2:] == (True,)):
            crosses = not tensors[1].is_pinned()  # which a graph fetches anew whenever it runs
        if name in HOST_OPERATIONS or is_chosen or crosses:
            raise HostRead(f"{func} within a captured pass: a graph cannot wait for the host")
        return func(*args, **kwargs)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """An operation's tensors: what it is given, and what stands in its lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


class _Methods(TorchFunctionMode):
    """Reads of a CPU's tensor, which no operation shows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in HOST_METHODS:
            raise HostRead(f"Tensor.{func.__name__} within a captured pass: a graph cannot wait for the host")
        return func(*args, **(kwargs or {}))


def guarded(work: Work) -> None:
    """Runs it; HostRead for what no graph can replay."""
    with _Methods(), _Operations():
        work()


class EagerCapture:
    """The stand-in: the same callable, run anew. `buffers`: those that must stay where they are.

    Its operations are watched when it is captured; a replay could have others only after a read of the host's, and for
    these each replay is watched too.
    """

    def __init__(self, work: Work, buffers: Sequence[Tensor]) -> None:
        self._work, self._buffers = work, buffers
        self._places = [buffer.data_ptr() for buffer in buffers]
        guarded(work)

    def replay(self) -> None:
        if self._places != [buffer.data_ptr() for buffer in self._buffers]:
            raise HostRead("a static buffer moved after the capture: a graph would write to where it was")
        with _Methods():
            self._work()


class CudaCapture:
    """A CUDA graph. Warmed up and captured on `stream`, replayed on the caller's. `memory`: the graphs' own pool."""

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
            finally:  # a capture that fails leaves this thread on its stream, and its warm-ups at work
                torch.cuda.set_stream(caller)
                caller.wait_stream(stream)

    def replay(self) -> None:
        self._graph.replay()


class Captures:
    """What one model has captured, by key. All of it goes when the buffers it works on have moved."""

    def __init__(self, is_eager: bool) -> None:
        self.is_eager = is_eager
        self._memory: Any = None  # shared by the graphs: each leaves nothing there that another reads
        self._stream: Any = None  # one for all captures: libraries keep a workspace for each stream that they meet
        self._made: dict[Hashable, EagerCapture | CudaCapture] = {}
        self._buffers: dict[Hashable, Any] = {}
        self._places: tuple[int, ...] = ()
        self._is_busy = False
        self.count = 0  # captures so far

    def forget_if_moved(self, *tensors: Tensor) -> None:
        """What was captured while these were elsewhere is of no use."""
        places = tuple(tensor.data_ptr() for tensor in tensors)
        if places != self._places:
            if self._stream is not None:
                with _CAPTURING:  # a device that waits while another thread captures there breaks its capture
                    torch.cuda.synchronize(self._stream.device)  # a replay may still be under way in their memory
            self._made.clear()
            self._memory = None  # the allocator takes no pool back whose graphs are all gone
            self._places = places

    def buffers(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Static buffers that are made once, never within what is captured."""
        if key not in self._buffers:
            if self._is_busy:
                raise HostRead(f"static buffers {key} are made within a captured pass")
            self._buffers[key] = make()
        return self._buffers[key]

    def has(self, key: Hashable) -> bool:
        return key in self._made

    def prepare(self, key: Hashable, work: Work, *buffers: Tensor) -> None:
        """Captures `work` where it is not yet; the buffers must hold values that do no harm."""
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

    def replay(self, key: Hashable) -> None:
        self._is_busy = True
        try:
            self._made[key].replay()
        finally:
            self._is_busy = False


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
