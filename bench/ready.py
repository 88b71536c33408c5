"""Measure the time until a model is ready, its peak memory over its file size, and the bytes written to the cache.

Run: python bench/ready.py MODEL ... [--dtype file] [--rounds 3] Each start is a new process with an empty cache
folder, after one start that brings the file into the page cache. `ready` is the time from the first line of the
process to the first token. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import finish, parse, run

CHILD = """
import json, sys, time
start = time.perf_counter()
import outpace
loading = time.perf_counter()
llm = outpace.load(sys.argv[1], dtype=sys.argv[2], method="autoregressive")
loaded = time.perf_counter()
tokens = llm.generate(["ab"], max_tokens=1)[0].tokens
ready = time.perf_counter()
peak = [int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")][0]
found = {"load": loaded - loading, "ready": ready - start, "peak": 1024 * peak}
print(json.dumps({**found, "torch": "torch" in sys.modules}))
"""


def started(file: Path, dtype: str) -> dict[str, Any]:
    """Run one process and return its figures. It runs in its cache folder, because `python -c` imports packages from
    the current folder before installed ones."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "OUTPACE_CACHE": cache}
        command = [sys.executable, "-c", CHILD, str(file.absolute()), dtype]
        begin = time.perf_counter()
        done = subprocess.run(command, cwd=cache, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        whole = time.perf_counter() - begin
        cached = sum(part.stat().st_size for part in Path(cache).rglob("*") if part.is_file())
    return {**json.loads(done.stdout), "process": whole, "cached": cached}


def main() -> int:
    """Run the command."""
    asked = parse(__doc__, {"files": [Path]}, {"dtype": ("file", "int8")}, dtype="file", rounds=3)
    table = []
    for file in asked.files:
        started(file, asked.dtype)
        runs = [started(file, asked.dtype) for _ in range(asked.rounds)]
        row = {name: round(statistics.median(run[name] for run in runs), 2) for name in ("load", "ready", "process")}
        size = sum(part.stat().st_size for part in (file.glob("*.safetensors") if file.is_dir() else [file]))
        row |= {"peak_over_file": round(max(run["peak"] for run in runs) / size, 3), "cached": runs[-1]["cached"]}
        table.append({"file": file.name, "mb": round(size / 1e6), **row, "torch": runs[-1]["torch"]})
        print("  ".join(f"{name} {value}" for name, value in table[-1].items()), flush=True)
    return finish({"dtype": asked.dtype, "rounds": asked.rounds, "starts": table}, False)


if __name__ == "__main__":
    run(main)
