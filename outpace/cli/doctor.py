"""`outpace doctor`: report what this machine has, and how fast plain decoding can be. Missing parts are no errors."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from outpace.cli import display, head_report, link_report, process
from outpace.cli.flags import flag, flags
from outpace.cli.options import JSON
from outpace.core.errors import UserError, check_range, install_command
from outpace.models.files.pairs import NO_DRAFT
from outpace.models.options import FILE

if TYPE_CHECKING:
    from outpace.models.files.cache import CacheEntry

SHOWN_ENTRIES = 5  # the largest entries of the cache folder, one a line
NUM_PASSES = 24  # timed
EXTRAS = {  # of pyproject.toml: purpose, and modules
    "torch": ("GPUs, float weights, architectures that the own runtimes do not support", "torch transformers"),
    "hub": ("models by hub id", "huggingface_hub"),
    "grammar": ("answers by a JSON schema, a regex or a grammar", "llguidance"),
    "server": ("outpace serve", "fastapi httptools llguidance prometheus_client pydantic starlette uvicorn"),
    "distill": ("outpace distill, with plots", "matplotlib torch transformers"),
    "timeseries": ("outpace forecast", "matplotlib torch transformers pandas"),
    "remote": ("drafting on other machines", "grpc google.protobuf"),
    "ray": ("replicas and draft workers on a Ray cluster", "ray"),
    "judge": ("outpace judge", "sklearn"),
    "bench": ("plots of outpace bench, and transformers as a peer", "matplotlib torch transformers"),
    "llama-cpp": ("llama.cpp in outpace bench --peers", "llama_cpp"),
}


@flags
def doctor(
    as_json: bool = JSON,
    clean: bool = flag(
        False,
        "Empty the cache folder of what outpace made: converted models and measurements of the planner, which are made"
        " again when needed, and the tables of outpace tune --corpus.",
    ),
    unused_days: float | None = flag(None, "With --clean: remove only what was not used for this number of days."),
    max_gib: float | None = flag(None, "With --clean: remove what was not used for longest, until this size is left."),
    draft: str | None = flag(
        None,
        "Examine a trained head: answer a dozen prompts and report what may be wrong; or the output layer of a draft"
        " model.",
    ),
    link: str | None = flag(
        None, "Time the link to an outpace draft-worker, grpc://HOST:PORT, and simulate which method pays over it."
    ),
    target: str | None = flag(
        None, "The head's target, by default the one that the head names; or the target on this side of --link."
    ),
) -> None:
    """Show what this machine has, what is missing, and an estimate of the limit that memory sets for plain decoding."""
    if draft is None and link is None and target is not None:
        raise UserError("--target names the target of a head or of a link: name one with --draft or --link")
    if link is not None and draft is not None:
        raise UserError("--link and --draft cannot be combined, name one of them")
    for name, value in (("unused-days", unused_days), ("max-gib", max_gib)):
        if value is not None and not clean:
            raise UserError(f"--{name} is for --clean, add it or leave out --{name}")
        check_range(name, value or 0.0, 0.0)
    if link is not None:
        found = link_report.examine(link, target, quiet=as_json)
    elif draft is not None:
        found = head_report.examine(target, draft, quiet=as_json)
    else:
        found = _clean_cache(unused_days, max_gib) if clean else collect(quiet=as_json)
    if as_json:
        display.print_json(found)
    elif link is not None or draft is not None:
        report = head_report if link is None else link_report
        display.stdout().print(_grid(report.rows_of(found)))
    elif clean:
        for entry in found["kept"]:
            display.print_sentence(f"kept {entry['name']}: {entry['reason']}", "yellow")
        display.print_sentence(f"{found['folder']}: entries removed: {found['removed']}, {_megabytes(found['bytes'])}")
    else:
        _print(found)


def collect(quiet: bool = True) -> dict[str, Any]:
    """Return all findings, as `--json` prints them."""
    from outpace import __version__
    from outpace.core import machine
    from outpace.core.arrays import KERNELS_VERSION, kernels

    bandwidth, described, torch = machine.memory_bandwidth(), machine.describe(), None
    if _is_installed("torch"):
        import torch as package

        names = map(package.cuda.get_device_name, range(package.cuda.device_count()))
        gpus = [f"cuda:{number} ({name})" for number, name in enumerate(names)]
        torch = {"version": package.__version__, "gpus": gpus}
    return {
        "outpace": __version__,
        **{name: described[name] for name in ("python", "platform", "threads", "cores", "load")},
        "torch": torch,
        "kernels": {"version": KERNELS_VERSION, "instruction_sets": list(kernels.instruction_sets())},
        "gigabytes_per_second": round(bandwidth / 1e9, 2),
        "model": _model(bandwidth, quiet),
        "cache": _cache_contents(),
        "extras": {name: all(map(_is_installed, modules.split())) for name, (_, modules) in EXTRAS.items()},
    }


def _model(bandwidth: float, quiet: bool) -> dict[str, Any]:
    """Describe the default model: exactness, memory limit and a measured pass; or why it does not run."""
    from outpace.api.llm import load

    try:
        with display.loading_bar(quiet) as bar, load(draft=NO_DRAFT, method="autoregressive", progress=bar) as llm:
            process.check()
            llm.generate(["Once"], max_tokens=4, plain=True)  # the first passes are slower
            process.check()
            figures = llm.generate(["Once upon a time"], max_tokens=NUM_PASSES, plain=True)[0].figures
            target, size = llm.target, llm.target.model.weight_bytes or 0
            return {
                "name": target.name,
                "precision": target.precision,
                "notice": target.notice,
                "instruction_set": target.model.instruction_set,
                "exact": target.model.exact,
                "row_counts": list(target.model.row_counts),
                "weight_bytes": size,
                "floor_seconds": round(size / bandwidth, 5),
                "pass_seconds": round(figures.target_seconds / figures.passes, 5),
            }
    except UserError as error:
        return {"missing": str(error)}
    except Exception as error:
        return {"missing": f"it fails to load or to run ({type(error).__name__}: {error})"}


def _is_installed(name: str) -> bool:
    try:
        return sys.modules.get(name) is not None or importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package that contains it is missing
        return False


def _print(found: dict[str, Any]) -> None:
    """Print the verdict, then a section for each part."""
    console, model = display.stdout(), found["model"]
    if "missing" in model:
        display.print_sentence(f"not ready: {model['missing']}", "yellow")
    else:
        rate = f"the shipped model writes about {1 / model['pass_seconds']:.0f} tokens/s by plain decoding"
        is_busy = (found["load"] or 0.0) >= 0.5 * found["cores"]
        verdict = "ready, but other work slows this machine down" if is_busy else "ready"
        display.print_sentence(f"{verdict}: {rate}", "yellow" if is_busy else "green")
    extras = [(f"{'✓' if found['extras'][name] else '·'} {name}", EXTRAS[name][0]) for name in sorted(EXTRAS)]
    if not all(found["extras"].values()):
        extras.append(("", f"not installed (·): {install_command('NAME')}"))
    sections = {
        "machine": _machine(found),
        "shipped model": _default_model(model),
        "cache": _cache_rows(found["cache"]),
        "extras": extras,
    }
    for title, rows in sections.items():
        console.print(f"\n{title}", style="bold")
        console.print(_grid(rows))


def _grid(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="cyan")
    table.add_column()
    for name, value in rows:
        table.add_row(name, Text(value))
    return table


def _machine(found: dict[str, Any]) -> list[tuple[str, str]]:
    kernels, torch = found["kernels"], found["torch"]
    first, *others = kernels["instruction_sets"]
    also = f" (also possible: {', '.join(others)})" if others else ""
    return [
        ("outpace", f"{found['outpace']}, Python {found['python']}, {found['platform']}"),
        ("devices", ", ".join(["cpu", *(torch["gpus"] if torch else ())])),
        ("native kernels", f"{kernels['version']}, running {first}{also}"),
        ("threads", f"{found['threads']} on {found['cores']} cores, load {found['load'] or 0.0:.1f}"),
        ("torch", torch["version"] if torch else "not installed: models run by the native kernels"),
        ("memory", f"{found['gigabytes_per_second']:.1f} GB/s read by all threads (estimate)"),
    ]


def _default_model(model: dict[str, Any]) -> list[tuple[str, str]]:
    if "missing" in model:
        return [("model", model["missing"])]
    floor, measured = model["floor_seconds"], model["pass_seconds"]
    faster = " (memory is faster than estimated, or caches contain some of the weights)" if measured < floor else ""
    padding = f", rows padded to {model['row_counts']}" if model["row_counts"] else ""
    weights = "the file's own weights" if model["precision"] == FILE else model["precision"]
    runs = f"{weights} by {model['instruction_set'] or 'torch'}"
    rate = f"about {1 / floor:.0f} tokens/s by plain decoding"
    return [
        ("model", f"{model['name']}, {_megabytes(model['weight_bytes'], 0)} of weights read in each pass"),
        ("computed in", "; ".join(filter(None, (runs, model["notice"])))),
        ("exact mode", f"on{padding}" if model["exact"] else "not available on this machine"),
        ("floor of a pass", f"about {1000 * floor:.1f} ms (estimate): {rate}, if memory is the limit"),
        ("measured pass", f"{1000 * measured:.1f} ms, {measured / floor:.2f} times the floor{faster}"),
    ]


def _cache_contents() -> dict[str, Any]:
    """Return the cache folder, its entries and its size; or why there is none."""
    from outpace.models.files import cache

    try:
        folder = cache.cache_folder()
        entries = [_cache_entry(entry, folder) for entry in cache.list_entries(folder)]
    except UserError as error:
        return {"missing": str(error), "folder": None, "bytes": 0, "entries": []}
    return {"folder": str(folder), "bytes": _total(entries), "entries": entries}


def _cache_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return lines of the table: the folder, the largest entries, and the number of others."""
    if found["folder"] is None:
        return [("folder", found["missing"])]
    large, small = found["entries"][:SHOWN_ENTRIES], found["entries"][SHOWN_ENTRIES:]
    lines = [("folder", f"{found['folder']}, {_megabytes(found['bytes'])} (`outpace doctor --clean` empties it)")]
    lines += [("", f"{_megabytes(entry['bytes']):>10}  {entry['name']}") for entry in large]
    return lines + ([("", f"{_megabytes(_total(small)):>10}  {len(small)} more")] if small else [])


def _clean_cache(unused_days: float | None, max_gib: float | None) -> dict[str, Any]:
    """Remove what outpace has made in its cache folder, or only what was not used for some days or exceeds a size;
    return how much was removed, and what was kept and why."""
    from outpace.models.files import cache

    folder = cache.cache_folder()
    entries = sorted(cache.list_entries(folder), key=lambda entry: entry.used)  # the least recently used first
    left, removed, kept = sum(entry.bytes for entry in entries), list[int](), list[dict[str, Any]]()
    for entry in entries:
        is_old = unused_days is not None and time.time() - entry.used > unused_days * 86400
        is_too_much = max_gib is not None and left > max_gib * 2**30
        if is_old or is_too_much or (unused_days is None and max_gib is None):
            left -= entry.bytes
            if (reason := cache.remove_entry(entry)) is None:
                removed.append(entry.bytes)
            else:
                kept.append(_cache_entry(entry, folder) | {"reason": reason})
    return {"folder": str(folder), "bytes": sum(removed), "removed": len(removed), "kept": kept}


def _cache_entry(entry: CacheEntry, folder: Path) -> dict[str, Any]:
    name = str(entry.path.relative_to(folder))
    return {"name": name, "bytes": entry.bytes, "used": round(entry.used)}


def _total(entries: Iterable[dict[str, Any]]) -> int:
    return sum(entry["bytes"] for entry in entries)


def _megabytes(count: int, digits: int = 1) -> str:
    return f"{count / 1e6:.{digits}f} MB"
