"""The cache folder as `outpace doctor` shows it, and as `--clean` empties it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.core.errors import UserError

if TYPE_CHECKING:
    from outpace.models.files.cache import Entry

SHOWN = 12  # entries in a row each, the largest


def collect() -> dict[str, Any]:
    """The folder, its entries and its size; or why there is none."""
    from outpace.models.files import cache
    from outpace.models.files.cache_folder import cache_folder

    try:
        folder = cache_folder()
    except UserError as error:
        return {"missing": str(error), "folder": None, "bytes": 0, "entries": []}
    found = cache.entries(folder)
    return {
        "folder": str(folder),
        "bytes": sum(entry.bytes for entry in found),
        "entries": [_record(entry, folder) for entry in found],
    }


def rows(found: dict[str, Any]) -> list[tuple[str, str]]:
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


def clean() -> dict[str, Any]:
    """Removes what outpace has made in its cache folder: what went, what stays and why, and what is not ours."""
    from outpace.models.files import cache
    from outpace.models.files.cache_folder import cache_folder

    folder = cache_folder()
    removed: list[Entry] = []
    kept: list[dict[str, Any]] = []
    for entry in cache.entries(folder):
        reason = cache.remove(entry)
        if reason is None:
            removed.append(entry)
        else:
            kept.append(_record(entry, folder) | {"reason": reason})
    cache.remove_empty(folder)
    return {
        "folder": str(folder),
        "bytes": sum(entry.bytes for entry in removed),
        "removed": [_record(entry, folder) for entry in removed],
        "kept": kept,
        "others": [path.name for path in cache.others(folder)],
    }


def report(found: dict[str, Any]) -> list[str]:
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


def _record(entry: Entry, folder: Path) -> dict[str, Any]:
    name = str(entry.path.relative_to(folder))
    return {"name": name, "kind": entry.kind, "bytes": entry.bytes, "used": round(entry.used)}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
