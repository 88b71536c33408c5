"""Two benches side by side: files that `--json` wrote, or folders of `--out`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from outpace.bench import report
from outpace.bench.figures import ALL, table_rows
from outpace.bench.store import ANSWERS, ROWS, read_records, read_settings
from outpace.core.errors import UserError

Plain = Mapping[str, Any]
NEEDED: Mapping[str, Any] = {"task": str, "tokens_per_second": (int, float, type(None))}
SAID = ("target", "draft", "inflate", "processor", "commit", "precision")


def read(place: Path) -> list[dict[str, Any]]:
    """The rows of a file or a folder; a bench that was killed has the rows of what it finished."""
    if place.is_dir():
        if (place / ROWS).exists():
            return read(place / ROWS)
        if not (place / ANSWERS).exists():
            raise UserError(f"{place} holds no bench: neither {ROWS} nor {ANSWERS}")
        return report.plain_rows(table_rows(read_records(place)), read_settings(place))
    try:
        found = json.loads(place.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{place} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON ({error})") from error
    if not isinstance(found, list) or not all(_is_row(row) for row in found):
        raise UserError(f"{place} holds no rows of a bench, `outpace bench --json FILE` writes them")
    return found


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("method") or row.get("peer"), str):
        return False
    return all(name in row and isinstance(row[name], kind) for name, kind in NEEDED.items())


def side_by_side(one: Sequence[Plain], other: Sequence[Plain]) -> list[dict[str, Any]]:
    """A record for each task, batch and contender that either has; pairs stand as [one, other], None: not there."""
    first, second = ({_key(row): row for row in each} for each in (one, other))
    met = list(dict.fromkeys([*first, *second]))
    tasks, labels = (list(dict.fromkeys(key[place] for key in met)) for place in (1, 2))
    met.sort(key=lambda key: (key[0], key[1] == ALL, tasks.index(key[1]), labels.index(key[2])))
    made = []
    for key in met:
        pair = [first.get(key), second.get(key)]
        batch, task, label, is_peer = key
        record: dict[str, Any] = {"task": task, "batch": batch, "peer" if is_peer else "method": label}
        for name in ("tokens_per_second", "speedup", "mean_accepted_length", "hit_rate", "equal_text", "prompts"):
            record[name] = [row.get(name) if row else None for row in pair]
        before, after = record["tokens_per_second"]
        record["ratio"] = after / before if before and after else None
        made.append(record)
    return made


def _key(row: Plain) -> tuple[int, str, str, bool]:
    return int(row.get("batch") or 1), row["task"], row.get("method") or row["peer"], row.get("method") is None


def differences(one: Sequence[Plain], other: Sequence[Plain]) -> list[str]:
    """In what the two were not alike: said beside every comparison."""
    lines = []
    for name in SAID:
        pair = [sorted({str(row.get(name)) for row in each if row.get("peer") is None}) for each in (one, other)]
        if pair[0] != pair[1]:
            lines.append(f"{name}: A {', '.join(pair[0])}; B {', '.join(pair[1])}")
    most = [max((row.get("prompts") or 0 for row in each), default=0) for each in (one, other)]
    return lines + ([f"prompts: A {most[0]}; B {most[1]}"] if most[0] != most[1] else [])


def table(found: Sequence[Plain]) -> Table:
    """For people. B over A in the last column."""
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    made.add_column("task")
    made.add_column("method", overflow="fold")
    for name in ("tokens/s\nA", "tokens/s\nB", "B / A", "speedup\nA, B", "accepted length\nA, B", "same text\nA, B"):
        made.add_column(name, justify="right", no_wrap=True)
    last = None
    for record in found:
        task = record["task"] + (f", {record['batch']} at once" if record["batch"] > 1 else "")
        if task != last:
            made.add_section()
        speeds = [_number(value, 1) for value in record["tokens_per_second"]]
        pairs = [", ".join(_number(value, 2) for value in record[name]) for name in ("speedup", "mean_accepted_length")]
        same = ", ".join({True: "yes", False: "no"}.get(value, "-") for value in record["equal_text"])
        label = record.get("method") or record["peer"]
        made.add_row("" if task == last else task, label, *speeds, _ratio(record["ratio"]), *pairs, same)
        last = task
    return made


def _ratio(value: float | None) -> Text:
    return Text("-") if value is None else Text(f"{value:.2f}", style="green" if value >= 1 else "red")


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
