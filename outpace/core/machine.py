"""What this machine is, what runs on it, and the floor that its memory sets for a pass over a model's weights."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from outpace.core.lazy import core_numbers, threads, torch

BUFFER = 2**26  # float32 values read to find the bandwidth: 256 MiB, more than a processor keeps
READS = 5
GIT_SECONDS = 5.0
PACKAGES = ("outpace", "outpace-kernels", "torch", "transformers", "llama-cpp-python")


def bandwidth() -> float:
    """Bytes a second that all threads together read from memory: the best of a few sums and products."""
    buffer = torch.ones(BUFFER)
    rows, vector = buffer.view(-1, 8192), torch.ones(8192)
    best = float("inf")
    for _ in range(READS):
        for read in (buffer.sum, lambda: rows @ vector):
            start = time.perf_counter()
            read()
            best = min(best, time.perf_counter() - start)
    return buffer.nbytes / best


def cores() -> int:
    """The cores that this process may use."""
    return len(core_numbers())


def describe(device: str = "cpu") -> dict[str, Any]:
    """Hardware, load and versions, as reports print them."""
    found = {
        "processor": processor(),
        "cores": cores(),
        "threads": threads(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "platform": platform.platform(terse=True),
        "python": platform.python_version(),
        "versions": {name: at for name in PACKAGES if (at := installed(name)) is not None},
        "commit": commit(),
    }
    if device.startswith("cuda"):
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def installed(package: str) -> str | None:
    """The version of a package by its name in the index; None where it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of the checkout that this code runs from, with a + where files differ from it; None outside of one."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    found = _git(root, "rev-parse", "--short", "HEAD")
    return found and found + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, or not ours to read
        return None
    return done.stdout.strip()


def processor() -> str:
    """The processor's name where the system tells one."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name") and ":" in line)
    return next(named, platform.processor() or platform.machine())
