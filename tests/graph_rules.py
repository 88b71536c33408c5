"""The rules of a CUDA graph, enforced on any device: the host reads no device values, nor makes tensors of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outpace.models.llama.cuda.captures import EagerCapture, HostRead, Work

# Operations that wait for the device or take values from the host.
HOST_OPERATIONS = {
    "_local_scalar_dense", "equal", "is_nonzero", "item", "lift_fresh", "lift_fresh_copy", "masked_select", "nonzero",
    "pin_memory", "_pin_memory", "resize_", "set_", "unique_consecutive", "_unique2",
}  # fmt: skip
HOST_METHODS = {"__bool__", "__float__", "__index__", "__int__", "cpu", "item", "numpy", "tolist"}


class _Operations(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here, and excluding each operation from compilation costs time."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_masked = name in ("index", "index_put", "index_put_") and any(
            tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors[1:]
        )
        target = kwargs.get("device")
        crosses = len({tensor.device.type for tensor in tensors if tensor.dim() or name == "copy_"}) > 1 or (
            name == "_to_copy" and target is not None and torch.device(target).type != tensors[0].device.type
        )
        if crosses and name == "copy_" and (kwargs.get("non_blocking") or args[2:] == (True,)):
            crosses = not tensors[1].is_pinned()  # a graph fetches pinned memory anew at each replay
        if name in HOST_OPERATIONS or is_masked or crosses:
            raise HostRead(f"{func} within a captured pass: a graph cannot wait for the host")
        return func(*args, **kwargs)


class _Methods(TorchFunctionMode):
    """Detects reads of a CPU tensor, which no dispatched operation shows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in HOST_METHODS:
            raise HostRead(f"Tensor.{func.__name__} within a captured pass: a graph cannot wait for the host")
        return func(*args, **(kwargs or {}))


class CheckedCapture(EagerCapture):
    """Checks operations when a pass is captured. A replay could have others only after a read by the host, and for
    these every replay is checked too."""

    def __init__(self, work: Work, buffers: Sequence[Tensor]) -> None:
        with _Methods(), _Operations():
            super().__init__(work, buffers)

    def replay(self) -> None:
        with _Methods():
            super().replay()
