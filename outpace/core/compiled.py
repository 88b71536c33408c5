"""Whether kernels that Triton compiles run on a device, and where they are launched."""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING

from outpace.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def refusal(device: torch.device) -> str | None:
    """Why they do not run there; None where they do. They are compiled when they are first used, for which Triton needs
    a C compiler."""
    if device.type != "cuda":
        return f"kernels are for CUDA, not for {device}"
    return _refusal(torch.cuda.current_device() if device.index is None else device.index)


def on(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which is to be the one that holds x."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


@cache
def _refusal(number: int) -> str | None:
    """Tries one kernel, whose bits are known."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    from outpace.core import noise

    words = torch.tensor([[0x1234567, -0x7654321]], dtype=torch.int32)
    try:
        from outpace.core import fused_noise

        made = fused_noise.noise(words.to(f"cuda:{number}"), 999, False).cpu()
    except Exception as error:  # a compiler that is not there, a device that is too old: of many kinds
        return f"{type(error).__name__}: {error}"
    return None if torch.equal(made, noise.exponential_of(words, 999)) else "a kernel gave other bits than it should"
