"""`outpace doctor`: what this machine has, and how fast plain decoding can be on it. Nothing missing is an error."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from outpace.cli import display, plan, process
from outpace.cli.options import Json, flags
from outpace.core.errors import UserError, install_command
from outpace.models.files.pairs import NO_DRAFT
from outpace.models.options import FILE

if TYPE_CHECKING:
    from outpace.api.llm import LLM
    from outpace.models.files.cache import CacheEntry


SHOWN = 12  # entries in a row each, the largest


def cache_contents() -> dict[str, Any]:
    """The folder, its entries and its size; or why there is none."""
    from outpace.models.files import cache
    from outpace.models.files.cache_place import cache_folder

    try:
        folder = cache_folder()
    except UserError as error:
        return {"missing": str(error), "folder": None, "bytes": 0, "entries": []}
    found = cache.list_entries(folder)
    return {
        "folder": str(folder),
        "bytes": sum(entry.bytes for entry in found),
        "entries": [_cache_entry(entry, folder) for entry in found],
    }


def cache_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Lines of the doctor's table: the folder, the largest entries, and how many others there are."""
    if found["folder"] is None:
        return [("cache", found["missing"])]
    large, small = found["entries"][:SHOWN], found["entries"][SHOWN:]
    lines = [("cache", f"{found['folder']}, {_megabytes(found['bytes'])} (`outpace doctor --clean` empties it)")]
    lines += [("", f"{_megabytes(entry['bytes']):>10}  {entry['name']} ({entry['kind']})") for entry in large]
    if small:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in Counter(entry["kind"] for entry in small).items())
        lines.append(("", f"{_megabytes(sum(entry['bytes'] for entry in small)):>10}  {len(small)} more ({kinds})"))
    return lines


def clean_cache() -> dict[str, Any]:
    """Removes what outpace has made in its cache folder: what went, what stays and why, and what is not ours."""
    from outpace.models.files import cache
    from outpace.models.files.cache_place import cache_folder

    folder = cache_folder()
    removed: list[CacheEntry] = []
    kept: list[dict[str, Any]] = []
    for entry in cache.list_entries(folder):
        reason = cache.remove_entry(entry)
        if reason is None:
            removed.append(entry)
        else:
            kept.append(_cache_entry(entry, folder) | {"reason": reason})
    cache.remove_empty_folders(folder)
    return {
        "folder": str(folder),
        "bytes": sum(entry.bytes for entry in removed),
        "removed": [_cache_entry(entry, folder) for entry in removed],
        "kept": kept,
        "others": [path.name for path in cache.list_foreign(folder)],
    }


def clean_report(found: dict[str, Any]) -> list[str]:
    """What `clean` did, in sentences."""
    lines = [
        f"removed {_megabytes(each['bytes'])}: {each['name']} ({each['kind']}){_again(each)}"
        for each in found["removed"]
    ]
    lines += [f"kept {each['name']} ({each['kind']}): {each['reason']}" for each in found["kept"]]
    if found["others"]:
        lines.append(f"left alone, not made by outpace: {_listed(found['others'])}")
    count = len(found["removed"])
    freed = f"{count} {'entry' if count == 1 else 'entries'} removed, {_megabytes(found['bytes'])}"
    return [*lines, f"{found['folder']}: {freed if count else 'there was nothing to remove'}"]


def _again(entry: dict[str, Any]) -> str:
    """How to have it again, where outpace does not make it by itself."""
    from outpace.models.files.cache import TABLES

    if entry["kind"] != TABLES:
        return ""
    drafter = Path(entry["name"]).name.rpartition("-")[0]
    return f"; `outpace tune --drafter {drafter} --corpus FILE` makes them again"


def _cache_entry(entry: CacheEntry, folder: Path) -> dict[str, Any]:
    name = str(entry.path.relative_to(folder))
    return {"name": name, "kind": entry.kind, "bytes": entry.bytes, "used": round(entry.used)}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


PASSES = 24
COMPILERS = ("c++", "g++", "clang++")
EXTRAS = {  # of pyproject.toml: what each is for, and the modules that it brings; `native` has a line of its own
    "hub": ("models by hub id", ("huggingface_hub",)),
    "grammar": ("answers by a JSON schema, a regex or a grammar", ("llguidance",)),
    "server": (
        "outpace serve",
        ("fastapi", "httptools", "llguidance", "prometheus_client", "pydantic", "starlette", "uvicorn"),
    ),
    "transformers": ("architectures that our own runtime does not know", ("transformers",)),
    "torchao": ("weights in 8 bits by torch", ("torchao",)),
    "distill": ("plots of outpace distill", ("matplotlib",)),
    "search": ("outpace tune --drafter layer_skip", ("optuna",)),
    "bench": ("plots of outpace bench, and transformers beside it", ("matplotlib", "transformers")),
    "llama-cpp": ("llama.cpp in outpace bench --peers", ("llama_cpp",)),
}
NOT_MADE = (
    "not measured: it is not converted yet, which takes hundreds of megabytes in the cache folder;"
    " `outpace generate` converts it"
)


Clean = Annotated[
    bool,
    typer.Option(
        "--clean",
        help="Empty the cache folder: converted models, unpacked drafts and what the planner learnt, which are made"
        " again when they are needed, and the tables that outpace tune --corpus made. Files that outpace did not make"
        " are kept.",
    ),
]


@flags
def doctor(asked: plan.Planning, as_json: Json = False, clean: Clean = False) -> None:
    """Show what this machine has, what is missing, and an estimate of the limit that memory sets for plain decoding."""
    if asked.plan:
        planned = plan.collect(asked)
        if not as_json:
            display.stdout().print(plan.report(planned))
        display.print_json(planned)
        return
    if asked != plan.Planning():
        raise UserError("models and devices are options of --plan: add it, or leave them out")
    found = clean_cache() if clean else collect(quiet=as_json)
    if as_json:
        display.print_json(found)
    elif clean:
        for line in clean_report(found):
            display.stdout().print(line, soft_wrap=True)
    else:
        display.stdout().print(_table(found))


def collect(quiet: bool = True) -> dict[str, Any]:
    """All findings, as `--json` prints them."""
    import torch

    from outpace import __version__
    from outpace.core import machine

    devices = ["cpu"] + [f"cuda:{n} ({torch.cuda.get_device_name(n)})" for n in range(torch.cuda.device_count())]
    bandwidth = machine.memory_bandwidth()
    return {
        "outpace": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cores": machine.num_cores(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "devices": devices,
        "kernels": _kernels(),
        "packed_product": torch.backends.mkldnn.is_available(),
        "gigabytes_per_second": round(bandwidth / 1e9, 2),
        "model": _model(bandwidth, quiet),
        "cache": cache_contents(),
        "extras": {name: all(map(_is_there, modules)) for name, (_, modules) in EXTRAS.items()},
    }


def _kernels() -> dict[str, Any]:
    """The native kernels: what this machine runs them with, the fastest first; or why they are not there."""
    from outpace.models.llama.native.binding import load_kernels
    from outpace.models.runtimes import missing_kernels

    missing = missing_kernels()
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    return {
        "missing": missing,
        "instruction_sets": [] if missing else list(load_kernels().instruction_sets()),
        "compiler": compiler,
    }


def _model(bandwidth: float, quiet: bool) -> dict[str, Any]:
    """The default model: whether it runs, whether exactly, its floor and a measured pass; or why it does not."""
    try:
        from outpace.api.llm import load

        with process.at_safe_points(), display.LoadingBar(quiet) as bar:
            progress = partial(_told_on, bar)
            with load(draft=NO_DRAFT, method="autoregressive", progress=progress) as llm:
                return _measured(llm, bandwidth)
    except UserError as error:
        return {"missing": str(error)}
    except Exception as error:
        return {"missing": f"it fails to load or to run ({type(error).__name__}: {error})"}


def _told_on(bar: display.LoadingBar, stage: str, fraction: float) -> None:
    """Shows how far loading is; UserError where files would have to be made first: to look fills no disk."""
    if stage != "loading":
        raise UserError(NOT_MADE)
    bar(stage, fraction)


def _measured(llm: LLM, bandwidth: float) -> dict[str, Any]:
    model = llm.target.model
    size = model.weight_bytes or 0
    process.check()
    llm.generate(["Once"], max_tokens=4, plain=True)  # the first passes are slower
    process.check()
    figures = llm.generate(["Once upon a time"], max_tokens=PASSES, plain=True)[0].figures
    return {
        "name": llm.target.name,
        "precision": llm.target.precision,
        "notice": llm.target.notice,
        "instruction_set": model.instruction_set,
        "exact": model.exact,
        "row_counts": list(model.row_counts),
        "weight_bytes": size,
        "floor_seconds": round(size / bandwidth, 5),
        "pass_seconds": round(figures.target_seconds / figures.passes, 5),
    }


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
    packed = (
        "available in torch"
        if found["packed_product"]
        else "missing in this torch, whose passes take longer without it"
    )
    return [
        ("outpace", f"{found['outpace']}, Python {found['python']}, {found['platform']}"),
        ("torch", f"{found['torch']}, {found['threads']} threads on {found['cores']} cores"),
        ("devices", ", ".join(found["devices"])),
        ("native kernels", _kernels_line(found["kernels"])),
        ("oneDNN", packed),
        ("memory", f"{found['gigabytes_per_second']:.1f} GB/s read by all threads (estimate)"),
        *_busy(found),
    ]


def _kernels_line(kernels: dict[str, Any]) -> str:
    if kernels["missing"] is None:
        first, *others = kernels["instruction_sets"]
        return f"installed, running {first}" + (f" (possible too: {', '.join(others)})" if others else "")
    compiler = f"there is {kernels['compiler']}" if kernels["compiler"] else "none was found"
    return (
        f"missing: {kernels['missing']} ({compiler}); until then models run in float32 by torch,"
        " whose passes take several times as long"
    )


def _busy(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Others' work makes what is measured here slower, so it is said."""
    if (found["load"] or 0) < 0.5 * found["cores"]:
        return []
    return [
        ("busy", f"load {found['load']:.1f} on {found['cores']} cores: an idle machine is faster than is shown here")
    ]


def _default_model(model: dict[str, Any]) -> list[tuple[str, str]]:
    if "missing" in model:
        return [("default model", model["missing"])]
    floor, measured = model["floor_seconds"], model["pass_seconds"]
    faster = " (memory is read faster than it seemed, or caches hold some of the weights)" if measured < floor else ""
    padding = f", rows padded to {model['row_counts']}" if model["row_counts"] else ""
    exact = f"on{padding}" if model["exact"] else "not available on this machine"
    held = "the file's own weights" if model["precision"] == FILE else model["precision"]
    rate = f"about {1 / floor:.0f} tokens/s by plain decoding"
    runs = f"{held} by {model['instruction_set'] or 'torch'}"
    return [
        ("default model", f"{model['name']}, {model['weight_bytes'] / 1e6:.0f} MB of weights read in each pass"),
        ("computed in", "; ".join(filter(None, (runs, model["notice"])))),
        ("exact mode", exact),
        ("floor of a pass", f"about {1000 * floor:.1f} ms (estimate): {rate}, if memory is the limit"),
        ("measured pass", f"{1000 * measured:.1f} ms, {measured / floor:.2f} times the floor{faster}"),
    ]


def _around(found: dict[str, Any]) -> list[tuple[str, str]]:
    rows = cache_rows(found["cache"])
    for name, (gives, _) in EXTRAS.items():
        there = "installed" if found["extras"][name] else f"not installed; {install_command(name)}"
        rows.append((f"extra {name}", f"{there} ({gives})"))
    return rows
