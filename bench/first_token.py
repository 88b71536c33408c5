"""Seconds from the start of a process to the first byte that it writes, for several commands in turn.

Run: python bench/first_token.py [--rounds 7] NAME=COMMAND ..., as in
    python bench/first_token.py "now=python -m outpace generate --max-tokens 8 Hello"
Each runs once before, so that files lie in the page cache. Prints medians and the processor time that each took.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import time
from typing import NamedTuple


class Start(NamedTuple):
    """One process: seconds to its first byte, and of processor time until its end, in the program and in the system."""

    first: float
    user: float
    system: float


def started(command: str) -> Start:
    """One run; a command that begins with `cd FOLDER;` runs there."""
    folder, _, rest = command.removeprefix("cd ").partition(";") if command.startswith("cd ") else ("", "", command)
    before, begin = os.times(), time.perf_counter()
    with subprocess.Popen(
        shlex.split(rest), cwd=folder.strip() or None, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        is_told = process.stdout.read(1)
        first = time.perf_counter() - begin
        process.stdout.read()
    if process.returncode or not is_told:
        raise SystemExit(f"{rest.strip()!r} ended with {process.returncode}")
    after = os.times()
    return Start(first, after.children_user - before.children_user, after.children_system - before.children_system)


def main() -> None:
    """Takes the commands in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commands", nargs="+", metavar="NAME=COMMAND")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    commands = dict(text.split("=", 1) for text in args.commands)
    for command in commands.values():
        started(command)
    runs: dict[str, list[Start]] = {name: [] for name in commands}
    for _ in range(args.rounds):
        for name, command in commands.items():
            runs[name].append(started(command))
    table = {
        name: {field: round(statistics.median(getattr(run, field) for run in some), 2) for field in Start._fields}
        | {"best": round(min(run.first for run in some), 2)}
        for name, some in runs.items()
    }
    for name, row in table.items():
        print(name, *(f"{field} {value}" for field, value in row.items()), sep="  ")
    print(json.dumps({"rounds": args.rounds, "seconds": table}))


if __name__ == "__main__":
    main()
