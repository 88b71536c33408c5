"""torch, imported at its first use: that takes a second, and text by the native runtime needs none of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hashlib import _Hash

    import torch as torch


_ENVIRONMENT = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # that torch begins with, the first that is a number
_SIBLINGS = "devices/system/cpu/cpu{number}/topology/thread_siblings_list"
_asked: list[int] = []  # threads that were asked for before torch was there


class _Torch:
    """Stands for the module, and keeps what it was asked for: the second use of a name is as fast as the module's."""

    def __getattr__(self, name: str) -> Any:
        module = import_module("torch")
        for count in _asked:
            module.set_num_threads(count)
        _asked.clear()
        found = getattr(module, name)
        setattr(self, name, found)
        return found


if not TYPE_CHECKING:
    torch = _Torch()


def is_torch_loaded() -> bool:
    """Whether anybody has imported torch."""
    return "torch" in sys.modules


def num_threads() -> int:
    """CPU threads that one computation takes: torch's number, without importing it."""
    if is_torch_loaded():
        return torch.get_num_threads()
    given = [os.environ.get(name, "") for name in _ENVIRONMENT]
    numbers = [int(text) for text in given if text.isdecimal() and int(text)]
    return _asked[0] if _asked else (numbers or [_whole_cores()])[0]


def set_num_threads(count: int) -> None:
    """Sets that number, torch's too once it is there."""
    if is_torch_loaded():
        torch.set_num_threads(count)
    else:
        _asked[:] = [count]


def cpu_ids() -> Collection[int]:
    """The numbers of the cores that this process may use; a core that runs two threads has two."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def _whole_cores(root: Path = Path("/sys")) -> int:
    """The cores that this process may use, those that run two threads counted once where the system tells."""
    numbers = cpu_ids()
    try:
        return len({(root / _SIBLINGS.format(number=number)).read_text() for number in numbers})
    except OSError:
        return len(numbers)


def lazy_sha256(data: bytes = b"") -> _Hash:
    """As hashlib's."""
    import hashlib

    return hashlib.sha256(data)
