"""torch, which is an extra, and hashlib, imported on first use: text generation by the native runtime needs neither."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.core.errors import require

if TYPE_CHECKING:
    from hashlib import _Hash

    import torch as torch


_ENVIRONMENT = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # from which torch takes its number of threads
_SIBLINGS = "devices/system/cpu/cpu{number}/topology/thread_siblings_list"
_thread_counts: list[int] = []  # number of threads set before torch was imported


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


def lazy_sha256(data: bytes = b"") -> _Hash:
    """Return hashlib's SHA-256; hashlib loads OpenSSL, which takes 4 MB of memory."""
    import hashlib

    return hashlib.sha256(data)
