"""Whether kernels that Triton compiles run on a device."""

from __future__ import annotations

import importlib.util
from functools import cache

from outpace.core.lazy import torch

TRIED, COUNT = (0x1234567, -0x7654321), 999  # the key and the tokens of the noise that is tried
SUM = 1057283224303  # of its bits


def unavailable_reason(device: torch.device) -> str | None:
    """Why they do not run there; None where they do. They are compiled when they are first used, for which Triton needs
    a C compiler."""
    if device.type != "cuda":
        return f"kernels are for CUDA, not for {device}"
    return _refusal(torch.cuda.current_device() if device.index is None else device.index)


def slow_path_warning(why: str) -> str:
    """What users are to know of a model that runs without the kernels."""
    return f"passes take up to two times as long as they could: {why}"


@cache
def _refusal(number: int) -> str | None:
    """Tries one kernel, whose bits are known."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    try:
        from outpace.core import fused_noise

        words = torch.tensor([TRIED], dtype=torch.int32, device=f"cuda:{number}")
        bits = int(fused_noise.noise(words, COUNT, False).view(torch.int32).long().sum())
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler that is not there, a device that is too old: of many kinds
        return f"{type(error).__name__}: {error}"
    return None if bits == SUM else "a kernel gave other bits than it should"
