"""`outpace doctor`: what this machine has, and how fast plain decoding can be on it. Nothing missing is an error."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
import time
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from outpace.cli import display
from outpace.cli.options import Json
from outpace.core.errors import UserError

if TYPE_CHECKING:
    from outpace.library import LLM

BUFFER = 2**26  # float32 values read to find the memory's bandwidth: 256 MiB, more than a processor keeps
READS = 6
PASSES = 24
EXTRAS = {
    "huggingface_hub": ("outpace[hub]", "models by hub id"),
    "transformers": ("outpace[transformers]", "architectures that our own runtime does not know"),
    "pytest": ("outpace[dev]", "the tests"),
}


def doctor(as_json: Json = False) -> None:
    """Check this machine: what is there, what is missing, and the floor that memory sets for plain decoding."""
    found = collect(quiet=as_json)
    if as_json:
        display.print_json(found)
    else:
        display.stdout().print(_table(found))


def collect(quiet: bool = True) -> dict[str, Any]:
    """All findings, as `--json` prints them."""
    import torch

    from outpace import __version__

    devices = ["cpu"] + [f"cuda:{n} ({torch.cuda.get_device_name(n)})" for n in range(torch.cuda.device_count())]
    bandwidth = _bandwidth()
    return {
        "outpace": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "devices": devices,
        "packed_product": torch.backends.mkldnn.is_available(),
        "gigabytes_per_second": round(bandwidth / 1e9, 2),
        "model": _model(bandwidth, quiet),
        "cache": _cache(),
        "extras": {name: _is_there(name) for name in EXTRAS},
    }


def _bandwidth() -> float:
    """Bytes a second that all threads together read from memory: the best of a few sums over a large buffer."""
    import torch

    buffer = torch.ones(BUFFER)
    times = []
    for _ in range(READS):
        start = time.perf_counter()
        buffer.sum()
        times.append(time.perf_counter() - start)
    return buffer.nbytes / min(times)


def _model(bandwidth: float, quiet: bool) -> dict[str, Any]:
    """The default model: whether it runs, whether exactly, its floor and a measured pass; or why it does not."""
    try:
        from outpace.loading import load

        with display.LoadingBar(quiet) as progress, load(progress=progress) as llm:
            return _measured(llm, bandwidth)
    except UserError as error:
        return {"missing": str(error)}
    except Exception as error:
        return {"missing": f"it fails to load or to run ({type(error).__name__}: {error})"}


def _measured(llm: LLM, bandwidth: float) -> dict[str, Any]:
    from outpace.models.config import tensor_shapes

    model = llm.target.model
    shapes = tensor_shapes(model.config)
    if not model.config.tie_embeddings:
        del shapes["model.embed_tokens.weight"]  # one row of it is read, not all
    size = sum(prod(shape) for shape in shapes.values()) * model.dtype.itemsize
    llm.generate(["Once"], max_tokens=4, plain=True)  # the first passes are slower
    figures = llm.generate(["Once upon a time"], max_tokens=PASSES, plain=True)[0].figures
    return {
        "name": llm.target.name,
        "exact": model.exact,
        "row_counts": list(model.row_counts),
        "weight_bytes": size,
        "floor_seconds": round(size / bandwidth, 5),
        "pass_seconds": round(figures.target_seconds / figures.passes, 5),
    }


def _cache() -> dict[str, Any]:
    from outpace.models.find import cache_folder

    folder = cache_folder()
    return {"folder": str(folder), "bytes": sum(_size(file) for file in folder.rglob("*"))}


def _size(file: Path) -> int:
    try:
        return file.stat().st_size if file.is_file() else 0
    except OSError:  # it went while we looked
        return 0


def _is_there(name: str) -> bool:
    return name in sys.modules or importlib.util.find_spec(name) is not None


def _table(found: dict[str, Any]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="cyan")
    table.add_column()
    for name, value in [*_machine(found), *_default_model(found["model"]), *_around(found)]:
        table.add_row(name, Text(value))
    return table


def _machine(found: dict[str, Any]) -> list[tuple[str, str]]:
    packed = "to be had" if found["packed_product"] else "missing: this torch has no oneDNN, passes take longer"
    return [
        ("outpace", f"{found['outpace']}, Python {found['python']}, {found['platform']}"),
        ("torch", f"{found['torch']}, {found['threads']} threads on {found['cores']} cores"),
        ("devices", ", ".join(found["devices"])),
        ("packed product", packed),
        ("memory", f"{found['gigabytes_per_second']:.1f} GB/s read by all threads (estimate)"),
        *_busy(found),
    ]


def _busy(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Others' work makes what is measured here slower, so it is said."""
    if (found["load"] or 0) < 0.5 * found["cores"]:
        return []
    return [("busy", f"load {found['load']:.1f} on {found['cores']} cores: what is measured here comes out too slow")]


def _default_model(model: dict[str, Any]) -> list[tuple[str, str]]:
    if "missing" in model:
        return [("default model", model["missing"])]
    floor, measured = model["floor_seconds"], model["pass_seconds"]
    exact = f"on, rows padded to {model['row_counts']}" if model["exact"] else "not to be had on this machine"
    return [
        ("default model", f"{model['name']}, {model['weight_bytes'] / 1e6:.0f} MB of weights read a pass"),
        ("exact mode", exact),
        ("floor of a pass", f"{1000 * floor:.1f} ms: at most {1 / floor:.0f} tokens/s by plain decoding"),
        ("measured pass", f"{1000 * measured:.1f} ms, {measured / floor:.2f} times the floor"),
    ]


def _around(found: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("model cache", f"{found['cache']['folder']}, {found['cache']['bytes'] / 1e6:.0f} MB")]
    for name, (install, gives) in EXTRAS.items():
        there = "installed" if found["extras"][name] else f"not installed; pip install '{install}'"
        rows.append((name, f"{there} ({gives})"))
    return rows
