"""Detects whether the Triton kernels run on a device."""

from __future__ import annotations

import importlib.util
from functools import cache

from outpace.core.lazy import torch

TRIED, COUNT = (0x1234567, -0x7654321), 999  # key and vocabulary size of the trial
SUM = 1057283224303  # of the bits of the trial's noise


def unavailable_reason(device: torch.device) -> str | None:
    """Return why the kernels do not run on this device; None if they do.

    They are compiled on first use, for which Triton needs a C compiler.
    """
    if device.type != "cuda":
        return f"kernels are for CUDA, not for {device}"
    return _refusal(torch.cuda.current_device() if device.index is None else device.index)


def slow_path_warning(why: str) -> str:
    """Return the message for users of a model that runs without the kernels."""
    return f"passes take up to two times as long as they could: {why}"


@cache
def _refusal(number: int) -> str | None:
    """Run one kernel whose result is known."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    try:
        from outpace.core import fused_noise

        words = torch.tensor([TRIED], dtype=torch.int32, device=f"cuda:{number}")
        bits = int(fused_noise.noise(words, COUNT, False).view(torch.int32).long().sum())
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a missing compiler or an old device raises many kinds of errors
        return f"{type(error).__name__}: {error}"
    return None if bits == SUM else "a kernel gave other bits than it should"
