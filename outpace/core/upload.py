"""Numbers of the host as a tensor on a device, without waiting for what the device still does.

`torch.tensor(..., device="cuda")` copies from memory that is not pinned: the host then waits until everything before
the copy is done, a whole pass for instance. From pinned memory it goes on at once, and torch keeps that memory until
the copy is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from outpace.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def uploaded(values: Any, dtype: Any, device: torch.device | str) -> Tensor:
    """`values`, a list or an array, as numpy's `dtype` on the device."""
    host = torch.from_numpy(np.ascontiguousarray(values, dtype=dtype))
    if torch.device(device).type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
