"""Shared by the benchmarks: options, prompts, the shipped pair of models, tables, and lines of JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from outpace.core.errors import UserError
from outpace.models.files.pairs import shipped_draft
from outpace.models.load import Loaded, load_draft, load_model

TASKS = ("mt_bench", "gsm8k", "humaneval", "spec_bench")
Row = dict[str, Any]


def parse(
    doc: str | None,
    positional: Mapping[str, Any] | None = None,
    choices: Mapping[str, Any] | None = None,
    given: Sequence[str] | None = None,
    **options: Any,
) -> argparse.Namespace:
    """Parse the command line, or `given`. The value of an option is its default, or its type: then the default is None.
    False makes a switch; a list takes several values. `...` as the default of a path makes it required."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, kind in (positional or {}).items():
        own = {"type": kind[0], "nargs": "+"} if isinstance(kind, list) else {"type": kind}
        parser.add_argument(name, choices=(choices or {}).get(name), **own)
    for name, default in options.items():
        if default is False:
            more: Row = {"action": "store_true"}
        else:
            more = {"choices": (choices or {}).get(name)} | _typed(default)
        parser.add_argument(f"--{name.replace('_', '-')}", **more)
    return parser.parse_args(given)


def _typed(default: Any) -> Row:
    """Return the arguments of an option with this default."""
    if default is ...:
        return {"type": Path, "required": True}
    if isinstance(default, type):
        return {"type": default}
    if isinstance(default, list):
        return {"nargs": "+", "default": default, "type": type(default[0])}
    return {"type": type(default), "default": default}


def refuse(message: str) -> NoReturn:
    """Exit with the status of a wrong command line."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def run(main: Callable[[], object]) -> NoReturn:
    """Run a script's main function; exit with the status that it returns, or with the sentence of a UserError."""
    try:
        sys.exit(main())  # type: ignore[arg-type]
    except UserError as error:
        sys.exit(f"error: {error}")


def numbers(text: str) -> list[float]:
    """Return the numbers of a list that is joined by commas."""
    return [float(part) for part in text.split(",")]


def read_prompts(folder: Path, tasks: Sequence[str], per_task: int, spread: bool = True) -> list[dict[str, str]]:
    """Return for each task the first user messages of `per_task` prompts by id, spread over its file or the first."""
    found = []
    for task in tasks:
        file = folder / f"{task}.jsonl"
        if not file.is_file():
            raise UserError(f"no prompt file {file}, --data must name a folder with {', '.join(tasks)} (.jsonl)")
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        chosen = rows[:: max(1, len(rows) // per_task) if spread else 1][:per_task]
        found.append({str(row["id"]): row["turns"][0] for row in chosen})
    return found


def shipped_pair() -> tuple[Loaded, Loaded]:
    """Load the shipped model and its draft model."""
    target = load_model(None)
    return target, load_draft(shipped_draft(target.name), target)


def chat_tokens(target: Loaded, text: str) -> Any:
    """Encode a user's first message by the chat template."""
    return target.tokenizer.chat([{"role": "user", "content": text}])


def read_rows(path: Path | None) -> list[Row]:
    """Return the lines of JSON of a file, if there is one."""
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path and path.exists() else []
    )


def append_row(path: Path | None, row: Row) -> Row:
    """Append a line of JSON to a file, if one is named; return the row."""
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    return row


def show(rows: Sequence[Row], title: str | None = None, columns: Sequence[str] = (), width: int = 180) -> None:
    """Print rows as a table with these columns, or with all that a row has."""
    columns, table = columns or list(dict.fromkeys(name for row in rows for name in row)), Table(title=title)
    for column in columns:
        table.add_column(column)
    for row in rows:
        values = (row.get(name, "") for name in columns)
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in values))
    Console(width=width).print(table)


def finish(row: Row, is_wrong: object) -> int:
    """Print the JSON line; return the exit status, 1 if something is wrong."""
    print(json.dumps(row))
    return 1 if is_wrong else 0
