"""Milliseconds of a whole pass by rows: the native runtime against llama.cpp, same model, same threads, in turn.

Run: python bench/pass_times_against_llama_cpp.py [--threads 2] [--rows 1 2 4 8 16] [--rounds 40] [--context 200] ...
A pass: so many new tokens behind the context, scores asked for all of them, keys and values dropped again. Row counts
and engines are interleaved, round after round; medians and minima are shown, ratios are of medians. The floor is the
weights, keys and values that a pass reads, over what the memory gives a second, the median of all rounds. A context
above 256 tokens is one text of so many over and over, copied in both engines: that costs what any text does.
One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from llama_state import lengthen
from long_context import PIECE, filled
from rich.console import Console
from rich.table import Table

from outpace.bench.peer import PeerSettings
from outpace.bench.peers._gguf import gguf_file
from outpace.bench.peers.llama_cpp import open_llama
from outpace.core.errors import UserError
from outpace.core.machine import memory_bandwidth
from outpace.models.base import chain
from outpace.models.files.find import locate
from outpace.models.files.source import open_source
from outpace.models.llama.config.llama_config import from_dict
from outpace.models.llama.native.binding import NativeOptions, usable_cores
from outpace.models.llama.native.runtime import NativeLlama
from outpace.models.options import NATIVE_KV

OURS, THEIRS = "outpace", "llama.cpp"
Scores = np.ndarray  # [rows, vocab] float32


class Ours:
    """The native runtime with a context that stands."""

    def __init__(self, args: argparse.Namespace, context: Sequence[int]) -> None:
        options = NativeOptions(threads=args.threads, kv_dtype=args.kv_dtype, weights=args.dtype)
        with open_source(locate(args.model)) as source:
            config = from_dict(source.config)
            config = replace(config, max_positions=max(config.max_positions, len(context) + max(args.rows)))
            self.model = NativeLlama.from_tensors(config, source.weight, options=options)
        if len(context) > PIECE:
            self._session = filled(self.model, len(context), max(args.rows))
            return
        self._session = self.model.open(len(context), max(args.rows))
        self.model.score([chain(self._session, context)])
        self._session.keep(range(len(context)))

    def score(self, tokens: Sequence[int]) -> Scores:
        """One pass over these tokens."""
        scores: Scores = self.model.score([chain(self._session, tokens, wanted=range(len(tokens)))]).numpy()
        return scores

    def forget(self) -> None:
        """Drops the keys and values of the last pass."""
        self._session.truncate(self._session.length)


class Theirs:
    """llama.cpp through the functions of its own interface, with a context that stands."""

    def __init__(self, args: argparse.Namespace, context: Sequence[int]) -> None:
        file = gguf_file(args.model, args.kind)
        settings = PeerSettings(None, None, frozenset(), args.threads, len(context) + max(args.rows))
        self._llama = open_llama(THEIRS, file, settings, flash=args.flash)
        self._llama.eval(context[:PIECE])
        self._length = len(context)
        if self._length > PIECE:
            lengthen(self._llama._ctx.ctx, self._length)

    def score(self, tokens: Sequence[int]) -> Scores:
        """One pass over these tokens; the scores are llama.cpp's own memory, until the next pass."""
        llama = self._llama
        llama._batch.set_batch(batch=tokens, n_past=self._length, logits_all=True)
        llama._ctx.decode(llama._batch)
        shape = (len(tokens), llama.n_vocab())
        scores: Scores = np.ctypeslib.as_array(llama._ctx.get_logits(), shape=shape)
        return scores

    def forget(self) -> None:
        """Drops the keys and values of the last pass."""
        self._llama._ctx.kv_cache_seq_rm(-1, self._length, -1)


SETTLE = 0.05  # seconds: threads of the engine before spin on for some milliseconds, and would take the cores
PASSES = 5  # in a row by one engine, as it decodes; the first finds its threads asleep and does not count


def milliseconds(engine: Any, tokens: Sequence[int]) -> float:
    """Of one pass."""
    start = time.perf_counter()
    engine.score(tokens)
    seconds = time.perf_counter() - start
    engine.forget()
    return 1e3 * seconds


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or .gguf file, the shipped model by default")
    parser.add_argument(
        "--kind",
        default="Q8_0",
        choices=("Q8_0", "Q4_0", "Q4_1", "Q4_K"),
        help="llama.cpp's weights; Q4_K: of a file that has them",
    )
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument(
        "--kv-dtype", default=NATIVE_KV, choices=("float32", "float16", "int8"), help="ours; theirs is float16"
    )
    parser.add_argument("--dtype", default="int8", choices=("int8", "file"), help="our weights; file: the .gguf file's")
    parser.add_argument("--flash", action="store_true", help="llama.cpp's flash attention")
    parser.add_argument("--gigabytes", type=float, help="the memory's speed; measured in each round by default")
    args = parser.parse_args()
    if min(args.rounds, args.context, *args.rows) < 1:
        raise UserError("rows, rounds and context must be at least 1")
    return args


def main() -> None:
    """The command."""
    args = arguments()
    context = [index * 37 % 1000 + 5 for index in range(args.context)]
    ours = Ours(args, context)
    engines = {OURS: ours, THEIRS: Theirs(args, context)}
    tokens = [index * 31 % 1000 + 5 for index in range(max(args.rows))]
    alike = agreement({name: partial(engine.score, tokens) for name, engine in engines.items()})
    for engine in engines.values():
        engine.forget()
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    speeds = [args.gigabytes] if args.gigabytes else []
    for turn in range(args.rounds + 2):
        if not args.gigabytes:
            speeds.append(memory_bandwidth() / 1e9)
        for rows in args.rows:
            for name, engine in engines.items():
                time.sleep(SETTLE)
                spent = [milliseconds(engine, tokens[:rows]) for _ in range(PASSES)]
                if turn >= 2:  # the first passes are slower
                    times[name, rows] += spent[1:]
    args.gigabytes = statistics.median(speeds)
    report(args, ours.model, times, alike)


def agreement(passes: dict[str, Callable[[], Scores]]) -> float:
    """The correlation of both engines' scores: that they computed the same."""
    first, second = (np.array(score()).ravel() for score in passes.values())
    return float(np.corrcoef(first, second)[0, 1])


def report(
    args: argparse.Namespace, model: NativeLlama, times: dict[tuple[str, int], list[float]], alike: float
) -> None:
    """The table, and the line for machines."""
    floor = 1e-6 * (model.weight_bytes + args.context * model.token_bytes) / args.gigabytes
    title = f"a whole pass, ms, {args.context} tokens of context, {args.threads} threads, {model.instruction_set}"
    table = Table(title=f"{title}; llama.cpp {args.kind}")
    for column in ("rows", OURS, "least", "of one row", THEIRS, "least", "of one row", "ours / theirs", "floor"):
        table.add_column(column, justify="right")
    found = []
    middle = {key: statistics.median(values) for key, values in times.items()}
    for rows in args.rows:
        cells = [str(rows)]
        for name in (OURS, THEIRS):
            own = middle[name, rows]
            cells += [f"{own:.2f}", f"{min(times[name, rows]):.2f}", f"{own / middle[name, args.rows[0]]:.2f}"]
        ratio = middle[OURS, rows] / middle[THEIRS, rows]
        table.add_row(*cells, f"{ratio:.2f}", f"{floor:.1f}")
        row = {"rows": rows, "outpace_ms": middle[OURS, rows], "llama_cpp_ms": middle[THEIRS, rows], "ratio": ratio}
        found.append({name: round(value, 3) for name, value in row.items()})
    console = Console(width=120)
    console.print(table)
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    console.print(f"scores correlate by {alike:.4f}; load {load}; floor at {args.gigabytes:.1f} GB/s")
    line = {
        "model": args.model,
        "dtype": args.dtype,
        "gigabytes": round(args.gigabytes, 1),
        "threads": args.threads,
        "context": args.context,
        "kind": args.kind,
        "floor_ms": round(floor, 2),
    }
    print(json.dumps(line | {"correlation": round(alike, 5), "load": os.getloadavg()[0], "passes": found}))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
