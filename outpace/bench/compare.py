"""Compares two benches: files written by `--json`, or folders of `--out`."""

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

Row = Mapping[str, Any]
CONDITIONS = ("target", "draft", "inflate", "processor", "commit", "precision")


def read(place: Path) -> list[dict[str, Any]]:
    """Read the rows of a file or folder; an interrupted bench has the rows of its finished answers."""
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
    has_names = isinstance(row, dict) and all(isinstance(name, str) for name in (row.get("task"), _label(row)))
    return has_names and isinstance(row.get("tokens_per_second", ""), int | float | None)


def _label(row: Row) -> Any:
    return row.get("method") or row.get("peer")


def side_by_side(one: Sequence[Row], other: Sequence[Row]) -> list[dict[str, Any]]:
    """Build a record for each task, batch and contender of either bench; values are pairs [one, other] or None."""
    first, second = ({_key(row): row for row in rows} for rows in (one, other))
    keys = list(dict.fromkeys([*first, *second]))
    tasks, labels = (list(dict.fromkeys(key[place] for key in keys)) for place in (1, 2))
    keys.sort(key=lambda key: (key[0], key[1] == ALL, tasks.index(key[1]), labels.index(key[2])))
    records = []
    for key in keys:
        pair = [first.get(key), second.get(key)]
        batch, task, label, is_peer = key
        record: dict[str, Any] = {"task": task, "batch": batch, "peer" if is_peer else "method": label}
        for name in ("tokens_per_second", "speedup", "mean_accepted_length", "hit_rate", "equal_text", "prompts"):
            record[name] = [row.get(name) if row else None for row in pair]
        before, after = record["tokens_per_second"]
        record["ratio"] = after / before if before and after else None
        records.append(record)
    return records


def _key(row: Row) -> tuple[int, str, str, bool]:
    return int(row.get("batch") or 1), row["task"], _label(row), row.get("method") is None


def differences(one: Sequence[Row], other: Sequence[Row]) -> list[str]:
    """Describe how the conditions of the two benches differ."""
    lines = []
    for name in CONDITIONS:
        pair = [sorted({str(row.get(name)) for row in rows if row.get("peer") is None}) for rows in (one, other)]
        if pair[0] != pair[1]:
            lines.append(f"{name}: A {', '.join(pair[0])}; B {', '.join(pair[1])}")
    most = [max((row.get("prompts") or 0 for row in rows), default=0) for rows in (one, other)]
    return lines + ([f"prompts: A {most[0]}; B {most[1]}"] if most[0] != most[1] else [])


def table(records: Sequence[Row]) -> Table:
    """Build the comparison's table, with the ratio of B's speed to A's."""
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    made.add_column("task")
    made.add_column("method", overflow="fold")
    for name in ("tokens/s\nA", "tokens/s\nB", "B / A", "speedup\nA, B", "accepted length\nA, B", "same text\nA, B"):
        made.add_column(name, justify="right", no_wrap=True)
    last = None
    for record in records:
        task = record["task"] + (f", {record['batch']} at once" if record["batch"] > 1 else "")
        if task != last:
            made.add_section()
        speeds = [report.number(value, 1) for value in record["tokens_per_second"]]
        pairs = [
            ", ".join(report.number(value, 2) for value in record[name]) for name in ("speedup", "mean_accepted_length")
        ]
        same = ", ".join({True: "yes", False: "no"}.get(value, "-") for value in record["equal_text"])
        style = "" if record["ratio"] is None else "green" if record["ratio"] >= 1 else "red"
        ratio = Text(report.number(record["ratio"], 2), style=style)
        made.add_row("" if task == last else task, _label(record), *speeds, ratio, *pairs, same)
        last = task
    return made
