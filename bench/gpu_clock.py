"""The clock of bench/gpu.py: it waits for the device, reads memory's rate and energy, and writes each part down."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from outpace.core import machine

Row = dict[str, Any]


class Bench:
    """The arguments, the clock, and what was found."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, args.device
        self.is_cuda = torch.device(args.device).type == "cuda"
        self.dtype = torch.bfloat16 if self.is_cuda else torch.float32
        self.ends = time.monotonic() + 60 * args.minutes
        self.rows: dict[str, list[Row]] = {}

    @property
    def has_time(self) -> bool:
        """Whether the minutes that were given are not over."""
        return time.monotonic() < self.ends

    def wait(self) -> None:
        """Until the device has done all."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    @property
    def free_gib(self) -> float:
        """What nobody holds of a GPU's memory: captured passes take more than models and sessions do."""
        return round(float(torch.cuda.mem_get_info(self.device)[0]) / (1 << 30), 2)

    def seconds(self, work: Callable[[], object], times: int) -> float:
        """The median of so many runs, after two that do not count."""
        found = []
        for number in range(times + 2):
            self.wait()
            start = time.perf_counter()
            work()
            self.wait()
            if number >= 2:
                found.append(time.perf_counter() - start)
        return statistics.median(found)

    def part(self, name: str, rows: Callable[[], Iterator[Row] | Sequence[Row]]) -> None:
        """Runs a part while there is time; an error is a row and ends this part alone."""
        found = self.rows.setdefault(name, [])
        start = time.monotonic()
        try:
            for row in rows() if self.has_time else ():
                found.append(row)
                if not self.has_time:
                    found.append({"note": "the time was over"})
                    break
        except Exception as error:  # what the other parts give is still wanted
            found.append({"error": f"{type(error).__name__}: {error}", "passed": False})
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()
        show(name, found, time.monotonic() - start)
        with self.args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"part": name, "rows": found}) + "\n")


def show(name: str, rows: Sequence[Row], seconds: float) -> None:
    """One part's rows, a line each."""
    print(f"\n{name} ({seconds:.0f} s)")
    for row in rows:
        cells = (f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
        print("  " + ", ".join(cells), flush=True)


def joules(bench: Bench) -> float | None:
    """Energy that the bench's GPU has taken (NVML), or on a CPU the processor (RAPL); None where it cannot be read."""
    if bench.is_cuda:
        try:
            import pynvml

            pynvml.nvmlInit()
            uuid = str(torch.cuda.get_device_properties(bench.device).uuid)  # NVML counts those that are hidden, too
            known = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
            return pynvml.nvmlDeviceGetTotalEnergyConsumption(pynvml.nvmlDeviceGetHandleByUUID(known)) / 1e3
        except Exception:  # the package is not there, the driver is not, or a slice (MIG) has no counter of its own
            return None
    try:
        return int(Path("/sys/class/powercap/intel-rapl:0/energy_uj").read_text(encoding="ascii")) / 1e6
    except OSError:
        return None


def bandwidth(bench: Bench) -> float:
    """Bytes a second that reading memory reaches on the device."""
    if not bench.is_cuda:
        return machine.memory_bandwidth()
    buffer = torch.ones(1 << 29, dtype=torch.bfloat16, device=bench.device)
    return buffer.nbytes / bench.seconds(buffer.sum, 10)
