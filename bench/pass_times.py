"""Milliseconds of a whole pass by rows and threads, with the floors beside them.

Run: python bench/pass_times.py [--threads 1 2] [--rows 1 2 ...] [--context 128] [--kv-dtype float16] ...
Row counts and threads are interleaved, round after round; minimum and median are shown, for other jobs make single
figures mean little. The floor: bytes of weights, keys and values over --gigabytes a second. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import defaultdict

from outpace.models.base import chain
from outpace.models.files.checkpoint import Checkpoint
from outpace.models.files.find import resolve
from outpace.models.llama.config import from_dict
from outpace.models.llama.native_kernels import Options, usable_cores
from outpace.models.llama.native_runtime import NativeLlama, NativeSession

ROWS = [1, 2, 3, 4, 6, 8, 12, 16, 32, 64]


def open_model(args: argparse.Namespace, threads: int) -> NativeLlama:
    """The model, on so many threads."""
    options = Options(threads=threads, kv_dtype=args.kv_dtype, instruction_set=args.set)
    with Checkpoint.open(resolve(args.model)) as checkpoint:
        return NativeLlama.from_tensors(from_dict(checkpoint.config), checkpoint.tensor, options=options)


def session_of(model: NativeLlama, context: int) -> NativeSession:
    """A session with `context` committed tokens."""
    session = model.open(context, max(ROWS))
    model.score([chain(session, [index * 37 % model.vocab_size for index in range(context)])])
    session.keep(range(context))
    return session


def time_pass(model: NativeLlama, session: NativeSession, rows: int) -> float:
    """Milliseconds of one pass over a chain of so many rows, all wanted."""
    part = chain(session, [index * 31 % model.vocab_size for index in range(rows)], wanted=range(rows))
    start = time.perf_counter()
    model.score([part])
    seconds = time.perf_counter() - start
    session.truncate(session.length)
    return 1e3 * seconds


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--threads", type=int, nargs="+", default=[*range(1, usable_cores() + 1)])
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--kv-dtype", default="float32")
    parser.add_argument("--set", default="", help="instruction set, the fastest by default")
    parser.add_argument("--gigabytes", type=float, default=35.0, help="what the memory gives a second")
    args = parser.parse_args()
    models = {threads: open_model(args, threads) for threads in args.threads}
    sessions = {threads: session_of(model, args.context) for threads, model in models.items()}
    times: dict[tuple[int, int], list[float]] = defaultdict(list)
    for _ in range(args.rounds):
        for threads, model in models.items():
            for rows in args.rows:
                times[threads, rows].append(time_pass(model, sessions[threads], rows))
    report(args, next(iter(models.values())), times)


def report(args: argparse.Namespace, model: NativeLlama, times: dict[tuple[int, int], list[float]]) -> None:
    """The table, and the line for machines."""
    weights = model.weight_bytes
    floor = 1e-6 * (weights + args.context * model.token_bytes) / args.gigabytes
    print(
        f"{model.instruction_set}, {args.context} tokens of context, {weights / 1e6:.0f} MB of weights; load", end=" "
    )
    print(" ".join(f"{load:.1f}" for load in os.getloadavg()), f"; floor {floor:.1f} ms at {args.gigabytes:g} GB/s")
    print("threads  rows  minimum ms  median ms  rows/s at the minimum")
    found = []
    for (threads, rows), values in sorted(times.items()):
        low, middle = min(values), statistics.median(values)
        print(f"{threads:7} {rows:5} {low:11.2f} {middle:10.2f} {1e3 * rows / low:12.0f}")
        found.append({"threads": threads, "rows": rows, "minimum_ms": round(low, 3), "median_ms": round(middle, 3)})
    print(json.dumps({"instruction_set": model.instruction_set, "context": args.context, "passes": found}))


if __name__ == "__main__":
    main()
