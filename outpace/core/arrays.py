"""Numbers of numpy and torch as Python's own, where a user may hand over either; and powers of two."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from outpace.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def to_python(value: Any) -> Any:
    """A scalar or an array of numpy or torch as a number or a list of Python's; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") and hasattr(value, "ndim") else value


def next_power_of_two(count: int, least: int = 1) -> int:
    """The smallest power of two that is neither below `count` nor below `least`."""
    return max(least, 1 << max(count - 1, 0).bit_length())


def to_device(values: Any, dtype: Any, device: torch.device | str) -> Tensor:
    """`values`, a list or an array, as numpy's `dtype` on the device."""
    host = torch.from_numpy(np.ascontiguousarray(values, dtype=dtype))
    if torch.device(device).type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def device_guard(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which is to be the one that holds x."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
