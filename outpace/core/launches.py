"""Where kernels in Triton are launched."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from outpace.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def on(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which is to be the one that holds x."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
