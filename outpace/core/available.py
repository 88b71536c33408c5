"""How much memory this process may still take: the machine's, its container's and its own limits, the least of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

UNKNOWN = 4 << 30  # where no system tells
LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))  # of cgroups 2 and 1
GIVEN_BACK = ("inactive_file", "active_file", "total_inactive_file", "total_active_file")  # pages of files, when asked


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory; pages that only keep files at hand count as free, for the system gives them back."""
    return max(0, min([_of_machine(root), *_of_containers(root), *_of_process(root)]))


def _of_machine(root: Path) -> int:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else UNKNOWN


def _of_containers(root: Path) -> Iterator[int]:
    """What each control group that this process is in still allows."""
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
            kept = {name: int(count) for name, count in files if name in GIVEN_BACK}
            whole = [kept[name] for name in kept if name.startswith("total_")] or list(kept.values())
            yield int(limit[0]) - int(used[0]) + sum(whole)


def _of_process(root: Path) -> Iterator[int]:
    """What its own limits (ulimit -v and -d) still allow."""
    try:
        import resource
    except ImportError:  # Windows
        return
    sizes = dict(line.split(":", 1) for line in _lines(root / "proc/self/status") if ":" in line)
    for limit, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY and name in sizes:
            yield most - 1024 * int(sizes[name].split()[0])


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
