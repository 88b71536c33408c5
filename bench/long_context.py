"""Milliseconds of a pass behind long texts, by how keys and values are held, and what these take.

Run: python bench/long_context.py [--model M.gguf] [--context 2048 8192 32768] [--rows 1 8] [--rounds 7] [--dtype file]
Ways, contexts and rows are interleaved; medians. The floor is weights, keys and values over the bandwidth measured in
the same run. What the slots hold is one short text over and over: that costs what any text does. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from dataclasses import replace

from pass_times import time_pass

from outpace.core.machine import memory_bandwidth
from outpace.models.base import chain
from outpace.models.files.find import locate
from outpace.models.files.source import open_source
from outpace.models.llama.config.footprint import ENTRY_BYTES
from outpace.models.llama.config.llama_config import from_dict
from outpace.models.llama.native.binding import NativeOptions, usable_cores
from outpace.models.llama.native.runtime import NativeLlama, NativeSession

PIECE = 256  # tokens that are read, and then copied


def filled(model: NativeLlama, context: int, rows: int) -> NativeSession:
    """A session that holds so many tokens."""
    session = model.open(context, rows)
    model.score([chain(session, [number * 37 % 1000 + 5 for number in range(PIECE)])])
    session.keep(range(PIECE))
    session.reserve(context + rows)
    for start in range(PIECE, context, PIECE):
        session.store.move(list(range(min(PIECE, context - start))), start)
    session.length = context
    return session


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="int8", choices=("int8", "file"))
    parser.add_argument("--context", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--kv", nargs="+", default=list(ENTRY_BYTES), choices=list(ENTRY_BYTES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=usable_cores())
    asked = parser.parse_args()
    models = {}
    with open_source(locate(asked.model)) as source:
        config = replace(from_dict(source.config), max_positions=2 * max(asked.context))
        for kv in asked.kv:
            options = NativeOptions(asked.threads, kv, weights=asked.dtype)
            models[kv] = NativeLlama.from_tensors(config, source.weight, options=options)
    sessions = {(kv, n): filled(model, n, max(asked.rows)) for kv, model in models.items() for n in asked.context}
    times: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for _ in range(asked.rounds):
        for (kv, context), session in sessions.items():
            for rows in asked.rows:
                times[kv, context, rows].append(time_pass(models[kv], session, rows))
    report(asked, models, sessions, {key: statistics.median(some) for key, some in times.items()})


def report(
    asked: argparse.Namespace,
    models: dict[str, NativeLlama],
    sessions: dict[tuple[str, int], NativeSession],
    middle: dict[tuple[str, int, int], float],
) -> None:
    """The table, and the line for machines."""
    speed, table = memory_bandwidth(), []
    print(f"{speed / 1e9:.1f} GB/s are read by all threads together")
    for (kv, context), session in sessions.items():
        model = models[kv]
        floor = 1e3 * (model.weight_bytes + context * model.token_bytes) / speed
        row = {"kv_dtype": kv, "context": context, "mb": round(model.session_bytes(session.slots) / 1e6, 1)}
        row |= {f"ms_{rows}": round(middle[kv, context, rows], 2) for rows in asked.rows} | {"floor": round(floor, 2)}
        table.append(row)
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    print(json.dumps({"dtype": asked.dtype, "threads": asked.threads, "gigabytes": speed / 1e9, "passes": table}))


if __name__ == "__main__":
    main()
