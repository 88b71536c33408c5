"""Reads the energy that the processors and a GPU use, from the counters of RAPL and NVML."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from outpace.core.arrays import torch

POWERCAP = Path("/sys/class/powercap")
_UNBOUNDED = 1 << 63


class _Counter(NamedTuple):
    """An energy counter: its name, the function that reads it, its unit in joules, and the value at which it wraps."""

    name: str
    read: Callable[[], int]
    unit: float
    wraps_at: int = _UNBOUNDED


class EnergyMeter:
    """Measures the energy used by all processors and, for a CUDA device, by that GPU.

    `description` names the counters, or says why there is none.
    """

    def __init__(self, device: str) -> None:
        self._counters = list(_counters_of_processors())
        missing = [] if self._counters else [f"no RAPL counter in {POWERCAP} can be read"]
        if device.startswith("cuda"):
            try:
                self._counters.append(_counter_of_gpu(device))
            except Exception as error:  # no package, no driver, or a MIG slice, which has no counter
                missing.append(f"NVML does not work ({type(error).__name__}: {error})")
        names = ", ".join(counter.name for counter in self._counters)
        self.description = "; ".join(filter(None, [names, *missing]))
        self._last = self._read()

    def spent(self) -> float | None:
        """Return the joules used since the last call, or since the meter was made; None without a counter."""
        before, self._last = self._last, self._read()
        if not self._counters:
            return None
        both = zip(self._counters, before, self._last, strict=True)
        return sum(counter.unit * ((after - first) % counter.wraps_at) for counter, first, after in both)

    def _read(self) -> list[int]:
        return [counter.read() for counter in self._counters]


def _counters_of_processors() -> Iterator[_Counter]:
    for zone in sorted(POWERCAP.glob("*rapl:*")):
        read = partial(_read_number, zone / "energy_uj")
        try:
            name = (zone / "name").read_text(encoding="ascii").strip()
            if name.startswith("package"):  # other zones are parts of a package, or hold all packages
                read()
                yield _Counter(f"RAPL {name}", read, 1e-6, 1 + _read_number(zone / "max_energy_range_uj"))
        except OSError:  # often readable by root only
            continue


def _read_number(file: Path) -> int:
    return int(file.read_text(encoding="ascii"))


def _counter_of_gpu(device: str) -> _Counter:
    import pynvml

    pynvml.nvmlInit()
    uuid = str(torch.cuda.get_device_properties(device).uuid)  # NVML also numbers hidden GPUs
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
    read = partial(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle)
    read()
    return _Counter(f"NVML {device}", read, 1e-3)
