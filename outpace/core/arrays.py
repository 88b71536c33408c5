"""What computes: numpy, the native kernels, and torch, an extra that is imported on first use.

Also conversions between their arrays, and the number of CPU threads that they use.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from outpace.core.errors import UserError, require

if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor

KERNELS_VERSION = "0.2.0"  # required exactly, because the interface of the kernels changes with every release
INSTALL_KERNELS = (
    "run `pip install ./kernels` in a checkout of outpace, with a C++20 compiler, or"
    " `pip install --find-links FOLDER outpace-kernels` where FOLDER holds a wheel of them"
)
_ENVIRONMENT = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # from which torch takes its number of threads
_SIBLINGS = "devices/system/cpu/cpu{number}/topology/thread_siblings_list"
_thread_counts: list[int] = []  # number of threads set before torch was imported

try:
    import outpace_kernels as kernels  # noqa: F401 (imported from here, after its version is checked)
except ImportError as error:
    raise UserError(f"outpace needs its native kernels ({error}): {INSTALL_KERNELS}") from error


def check_kernels() -> None:
    """Raise UserError if the installed kernels have another version."""
    try:
        found = version("outpace-kernels")
    except PackageNotFoundError:  # importable, but not installed as a package
        found = "unknown"
    if found != KERNELS_VERSION:
        raise UserError(
            f"the native kernels are of version {found}, this release needs {KERNELS_VERSION}: {INSTALL_KERNELS}"
        )


check_kernels()


class _Torch:
    """Replaces the module and caches its attributes, so that later uses are as fast as the module itself."""

    def __getattr__(self, name: str) -> Any:
        require("a computation by torch", "torch")
        module = import_module("torch")
        for count in _thread_counts:
            module.set_num_threads(count)
        _thread_counts.clear()
        found = getattr(module, name)
        setattr(self, name, found)
        return found


if not TYPE_CHECKING:
    torch = _Torch()


def is_torch_loaded() -> bool:
    """Return whether torch has been imported."""
    return sys.modules.get("torch") is not None


def num_threads() -> int:
    """Return the number of CPU threads for one computation: torch's number, without importing it."""
    if is_torch_loaded():
        return torch.get_num_threads()
    given = [os.environ.get(name, "") for name in _ENVIRONMENT]
    numbers = [int(text) for text in given if text.isdecimal() and int(text)]
    return _thread_counts[0] if _thread_counts else (numbers or [_whole_cores()])[0]


def set_num_threads(count: int) -> None:
    """Set that number; torch's too, now or when it is imported."""
    if is_torch_loaded():
        torch.set_num_threads(count)
    else:
        _thread_counts[:] = [count]


def cpu_ids() -> Collection[int]:
    """Return the ids of the logical CPUs that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def num_cores() -> int:
    """Return the number of logical CPUs that this process may use."""
    return len(cpu_ids())


def _whole_cores(root: Path = Path("/sys")) -> int:
    """Return the number of physical cores that this process may use, as far as the system reports them."""
    numbers = cpu_ids()
    try:
        return len({(root / _SIBLINGS.format(number=number)).read_text() for number in numbers})
    except OSError:
        return len(numbers)


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


def next_power_of_two(count: int, minimum: int = 1) -> int:
    """Return the smallest power of two that is at least `count` and at least `minimum`."""
    return max(minimum, 1 << max(count - 1, 0).bit_length())


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
