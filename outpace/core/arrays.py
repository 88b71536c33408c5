"""Conversions between Python numbers, numpy arrays and tensors on a device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from outpace.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def to_python(value: Any) -> Any:
    """Convert a scalar or an array of numpy or torch to Python numbers; return anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") and hasattr(value, "ndim") else value


def as_whole(value: Any) -> Any:
    """Convert a float without a fraction, such as 3.0, to an integer; return anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def join_rows(parts: Sequence[Any], axis: int = 0) -> Any:
    """Concatenate numpy arrays or torch tensors along an axis."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts, axis) if isinstance(parts[0], np.ndarray) else torch.cat([*parts], axis)


def next_power_of_two(count: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least `count` and at least `least`."""
    return max(least, 1 << max(count - 1, 0).bit_length())


def to_device(values: Any, dtype: Any, device: torch.device | str) -> Tensor:
    """Copy a list or an array, as numpy's `dtype`, to a device without waiting for the device.

    `torch.tensor(..., device="cuda")` copies from pageable memory, so the host waits until all earlier work of the
    device is done. From pinned memory it continues at once, and torch keeps that memory until the copy is done.
    """
    host = torch.from_numpy(np.ascontiguousarray(values, dtype=dtype))
    if torch.device(device).type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def device_guard(x: Tensor) -> AbstractContextManager[object]:
    """Make the GPU of `x` the current device, on which Triton launches its kernels."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
