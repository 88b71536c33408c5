"""Time a target pass by instruction set, precision, rows and threads, and compare it with what the machine could do.

Run: python bench/pass_times.py [--dtype int8 file] [--threads 1 2] [--rows 1 2 ...] [--context 128] ...
All settings are interleaved, round after round, because other jobs on the machine disturb single measurements; minimum
and median are shown. The lower bound (floor) is the bytes of weights, keys, values and states over the memory's
bandwidth. The last columns are the fractions, at the minimum, of this bandwidth and of the rate at which as many
threads multiply bytes in registers, both measured in the run. A context above 256 tokens repeats one text of 256
tokens, copied in the KV cache. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections import defaultdict
from dataclasses import replace

import outpace_kernels

from outpace.core.arrays import num_cores
from outpace.core.machine import memory_bandwidth
from outpace.models.base import chain
from outpace.models.files.find import locate, open_source
from outpace.models.llama.config.llama_config import LlamaConfig, from_dict, tensor_shapes
from outpace.models.llama.native.binding import WEIGHTS, NativeOptions
from outpace.models.llama.native.runtime import NativeLlama, NativeSession
from outpace.models.options import NATIVE_KV

ROWS = [1, 2, 3, 4, 6, 8, 12, 16, 32, 64]
PIECE = 256  # tokens that are read; longer contexts copy them


def open_model(args: argparse.Namespace, name: str, dtype: str, threads: int) -> NativeLlama:
    """Load the model for one instruction set, precision and number of threads."""
    options = NativeOptions(threads=threads, kv_dtype=args.kv_dtype, instruction_set=name, weights=dtype)
    with open_source(locate(args.model)) as source:
        config = from_dict(source.config)
        config = replace(config, max_positions=max(config.max_positions, args.context + max(args.rows)))
        return NativeLlama.from_tensors(config, source.weight, options=options)


def session_of(model: NativeLlama, context: int, rows: int) -> NativeSession:
    """Open a session with `context` committed tokens and space for `rows` more."""
    session = model.open(context, rows)
    read = min(context, PIECE)
    model.score([chain(session, [number * 37 % 1000 + 5 for number in range(read)])])
    session.keep(range(read))
    session.reserve(context + rows)
    for start in range(PIECE, context, PIECE):
        session.store.move(list(range(min(PIECE, context - start))), start)
    session.length = context
    return session


def time_pass(model: NativeLlama, session: NativeSession, rows: int) -> float:
    """Return the milliseconds of one pass over a chain of `rows` tokens with logits for all of them."""
    part = chain(session, [index * 31 % model.vocab_size for index in range(rows)], logit_rows=range(rows))
    start = time.perf_counter()
    model.score([part])
    seconds = time.perf_counter() - start
    session.truncate(session.length)
    return 1e3 * seconds


def operations(config: LlamaConfig) -> int:
    """Return the multiplications and additions of weights in one row of a pass, attention not included."""
    shapes = tensor_shapes(config)
    if not config.tie_embeddings:
        del shapes["model.embed_tokens.weight"]  # looked up
    return 2 * sum(math.prod(shape) for shape in shapes.values() if len(shape) > 1)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--dtype", nargs="+", choices=WEIGHTS, default=WEIGHTS[:1])
    parser.add_argument("--threads", type=int, nargs="+", default=[*range(1, num_cores() + 1)])
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--kv-dtype", default=NATIVE_KV)
    parser.add_argument("--set", nargs="+", default=[""], help="instruction sets (default: the fastest)")
    parser.add_argument("--gigabytes", type=float, help="memory bandwidth in GB/s (default: measured)")
    args = parser.parse_args()
    args.gigabytes = args.gigabytes or memory_bandwidth() / 1e9
    settings = [(name, dtype, threads) for name in args.set for dtype in args.dtype for threads in args.threads]
    models = {setting: open_model(args, *setting) for setting in settings}
    sessions = {setting: session_of(model, args.context, max(args.rows)) for setting, model in models.items()}
    times: dict[tuple[str, str, int, int], list[float]] = defaultdict(list)
    for _ in range(args.rounds):
        for rows in args.rows:
            for setting, model in models.items():
                times[(*setting, rows)].append(time_pass(model, sessions[setting], rows))
    report(args, {setting[:2]: model for setting, model in models.items()}, times)


def pass_bytes(args: argparse.Namespace, model: NativeLlama) -> int:
    """Return the bytes that a pass reads at least."""
    return model.weight_bytes + args.context * model.token_bytes + model.state_bytes


def report(
    args: argparse.Namespace,
    models: dict[tuple[str, str], NativeLlama],
    times: dict[tuple[str, str, int, int], list[float]],
) -> None:
    """Print the table and the JSON line."""
    for (_, dtype), model in models.items():
        weights, floor = model.weight_bytes, 1e3 * pass_bytes(args, model) / args.gigabytes / 1e9
        held = f"{model.instruction_set}, {dtype}"
        print(f"{held}: {weights / 1e6:.0f} MB of weights, floor {floor:.1f} ms at {args.gigabytes:.0f} GB/s")
    print(f"{args.context} tokens of context; load", *(f"{x:.1f}" for x in os.getloadavg()))
    print("set          dtype  threads  rows  minimum ms  median ms  rows/s  of bandwidth  of multiply rate")
    found, rates = [], dict[tuple[str, int], float]()
    for (asked, dtype, threads, rows), values in sorted(times.items()):
        model = models[asked, dtype]
        name, low, middle = model.instruction_set, min(values), statistics.median(values)
        if (name, threads) not in rates:
            rates[name, threads] = outpace_kernels.multiply_rate(name, threads)
        of_bandwidth = pass_bytes(args, model) / (1e-3 * low) / (1e9 * args.gigabytes)
        of_rate = operations(model.config) * rows / (1e-3 * low) / rates[name, threads]
        print(
            f"{name:12} {dtype:5} {threads:8} {rows:5} {low:11.2f} {middle:10.2f} {1e3 * rows / low:7.0f}"
            f" {of_bandwidth:13.2f} {of_rate:17.2f}"
        )
        measured = {"minimum_ms": round(low, 3), "median_ms": round(middle, 3)}
        measured |= {"of_bandwidth": round(of_bandwidth, 3), "of_multiply_rate": round(of_rate, 3)}
        found.append({"instruction_set": name, "dtype": dtype, "threads": threads, "rows": rows, **measured})
    for (name, threads), rate in rates.items():
        print(f"{name}, {threads} threads: {rate / 1e12:.2f} TOP/s in registers")
    print(json.dumps({"context": args.context, "passes": found}))


if __name__ == "__main__":
    main()
