"""This machine: processor, memory that is still available, memory bandwidth, and versions of packages."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from outpace.core.arrays import num_cores, num_threads, torch

BUFFER = 2**26  # float32 values read to measure the bandwidth: 256 MiB, more than a processor caches
READS = 5
GIT_SECONDS = 5.0
PACKAGES = ("outpace", "outpace-kernels", "torch", "transformers", "llama-cpp-python")


def memory_bandwidth() -> float:
    """Measure the bytes per second that all threads together read from memory: the best of a few searches."""
    buffer, threads, best = np.ones(BUFFER, np.float32), num_threads(), float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(READS):
            start = time.perf_counter()
            list(pool.map(np.max, np.array_split(buffer, threads)))
            best = min(best, time.perf_counter() - start)
    return buffer.nbytes / best


def describe(device: str = "cpu") -> dict[str, Any]:
    """Return hardware, load and versions, as reports print them."""
    found = {
        "processor": processor(),
        "cores": num_cores(),
        "threads": num_threads(),
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
    """Return the version of a package by its name in the index; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """Return the commit of the checkout that this code runs from, with a + if files differ; None without a checkout."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    found = _git(root, "rev-parse", "--short", "HEAD")
    return found and found + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, or not readable
        return None
    return done.stdout.strip()


def processor() -> str:
    """Return the processor's name, if the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name") and ":" in line)
    return next(named, platform.processor() or platform.machine())


UNKNOWN = 4 << 30  # if the system does not report it
LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))  # of cgroups v2 and v1
FILE_PAGES = ("inactive_file", "active_file", "total_inactive_file", "total_active_file")  # freed on demand


def free_bytes(device: Any) -> int:
    """Return the free memory of a device; on a GPU, memory that torch holds unused counts too."""
    if not str(device).startswith("cuda"):
        return available_bytes()
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of memory still available: the least of the machine's, the containers' and the process's limits.

    Pages that only cache files count as available, because the system frees them on demand.
    """
    return max(0, min([_of_machine(root), *_of_containers(root), *_of_process(root)]))


def _of_machine(root: Path) -> int:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else UNKNOWN


def _of_containers(root: Path) -> Iterator[int]:
    """Yield what each control group of this process still allows."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path, *_ = [*line.split(":", 2), "", ""]
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        place = top / path.strip("/")
        while place.is_relative_to(top):
            yield from _of_group(place)
            place = place.parent


def _of_group(folder: Path) -> Iterator[int]:
    for limit_name, used_name in LIMITS:
        limit, used = _lines(folder / limit_name), _lines(folder / used_name)
        if limit and used and limit[0].isdigit():
            files = [line.split() for line in _lines(folder / "memory.stat")]
            pages = {name: int(count) for name, count in files if name in FILE_PAGES}
            whole = [pages[name] for name in pages if name.startswith("total_")] or pages.values()
            yield int(limit[0]) - int(used[0]) + sum(whole)


def _of_process(root: Path) -> Iterator[int]:
    """Yield what the process's own limits (ulimit -v and -d) still allow."""
    try:
        import resource
    except ImportError:  # Windows
        return
    sizes = dict(line.split(":", 1) for line in _lines(root / "proc/self/status") if ":" in line)
    for limit, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        limit = resource.getrlimit(limit)[0]
        if limit != resource.RLIM_INFINITY and name in sizes:
            yield limit - 1024 * int(sizes[name].split()[0])


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def trim_heap() -> None:
    """Return the memory that all threads have freed to the system, in whole pages; glibc only."""
    if not sys.platform.startswith("linux"):
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
