"""Time a target pass by rows in the native runtime and in llama.cpp, with the same model and threads, interleaved.

Run: python bench/pass_times_against_llama_cpp.py [--threads 2] [--rows 1 2 4 8 16] [--rounds 40] [--context 200] ...
A pass reads new tokens after the context with logits for all of them; their keys and values are dropped again, or the
states of recurrent layers restored. Medians and minima are shown, ratios are of medians. The lower bound (floor) is the
bytes of weights (of experts, those that the rows choose), keys, values and states over the bandwidth measured in the
run. --prompt also times a prompt of this many tokens. The last line is JSON.
"""

from __future__ import annotations

import argparse
import ctypes
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

import llama_cpp
import numpy as np
from pass_times import PIECE, session_of
from rich.console import Console
from rich.table import Table

from outpace.bench.peer import PeerSettings
from outpace.bench.peers.llama_cpp import BATCH, open_llama
from outpace.core.arrays import num_cores
from outpace.core.errors import UserError
from outpace.core.machine import memory_bandwidth
from outpace.models.base import chain
from outpace.models.files.find import locate, open_source
from outpace.models.files.gguf.writer import gguf_file
from outpace.models.llama.config.llama_config import from_dict
from outpace.models.llama.native.binding import NativeOptions
from outpace.models.llama.native.runtime import NativeLlama
from outpace.models.options import NATIVE_KV

OURS, THEIRS = "outpace", "llama.cpp"
Scores = np.ndarray  # [rows, vocab] float32


class Ours:
    """The native runtime with a committed context."""

    def __init__(self, args: argparse.Namespace, context: Sequence[int]) -> None:
        options = NativeOptions(threads=args.threads, kv_dtype=args.kv_dtype, weights=args.dtype)
        with open_source(locate(args.model)) as source:
            config = from_dict(source.config)
            config = replace(config, max_positions=max(config.max_positions, len(context) + max(args.rows)))
            self.model = NativeLlama.from_tensors(config, source.weight, options=options)
        self._session = session_of(self.model, len(context), max(args.rows))

    def score(self, tokens: Sequence[int]) -> Scores:
        """Run one pass over these tokens."""
        scores: Scores = self.model.score([chain(self._session, tokens, logit_rows=range(len(tokens)))]).numpy()
        return scores

    def forget(self) -> None:
        """Drop the keys and values of the last pass."""
        self._session.truncate(self._session.length)

    def restore(self) -> None:
        """Do nothing: a prompt has a session of its own."""

    def read(self, tokens: Sequence[int]) -> None:
        """Read a prompt, in the chunks that the engine gives."""
        session, keep = self.model.open(len(tokens), BATCH), range(0)
        for start in range(0, len(tokens), step := min(self.model.chunk or PIECE, BATCH)):
            part = tokens[start : start + step]
            is_last = start + step >= len(tokens)
            self.model.score([chain(session, part, [len(part) - 1] if is_last else [], keep)])
            keep = range(len(part))


class Theirs:
    """llama.cpp through its C interface, with a committed context."""

    def __init__(self, args: argparse.Namespace, context: Sequence[int]) -> None:
        file = gguf_file(args.model, args.kind)
        settings = PeerSettings(None, None, frozenset(), args.threads, len(context) + args.prompt + max(args.rows))
        self._llama = open_llama(THEIRS, file, settings, flash=args.flash)
        self._context, self._length = list(context), len(context)
        self._begin(self._context)
        context_of = self._llama._ctx.ctx
        self._state = (ctypes.c_uint8 * llama_cpp.llama_state_seq_get_size(context_of, 0))()
        llama_cpp.llama_state_seq_get_data(context_of, self._state, len(self._state), 0)

    def score(self, tokens: Sequence[int]) -> Scores:
        """Run one pass. The result is llama.cpp's own memory, valid until the next pass."""
        llama = self._llama
        llama._batch.set_batch(batch=tokens, n_past=self._length, logits_all=True)
        llama._ctx.decode(llama._batch)
        shape = (len(tokens), llama.n_vocab())
        scores: Scores = np.ctypeslib.as_array(llama._ctx.get_logits(), shape=shape)
        return scores

    def forget(self) -> None:
        """Drop the keys and values of the last pass, or restore the states of recurrent layers."""
        if not self._llama._ctx.kv_cache_seq_rm(-1, self._length, -1):
            llama_cpp.llama_state_seq_set_data(self._llama._ctx.ctx, self._state, len(self._state), 0)

    def read(self, tokens: Sequence[int]) -> None:
        """Read a prompt; call `restore` afterwards."""
        self._begin(tokens)

    def restore(self) -> None:
        """Go back to the context."""
        self._begin(self._context)

    def _begin(self, tokens: Sequence[int]) -> None:
        """Begin a text with these tokens."""
        llama = self._llama
        llama._ctx.kv_cache_clear()
        for start in range(0, len(tokens), BATCH):
            llama._batch.set_batch(batch=tokens[start : start + BATCH], n_past=start, logits_all=False)
            llama._ctx.decode(llama._batch)
        llama._ctx.get_logits()  # waits


SETTLE = 0.05  # seconds in which the spinning threads of the other engine go to sleep
PASSES = 5  # consecutive passes of one engine; the first, which wakes its threads, is not counted


def milliseconds(engine: Any, tokens: Sequence[int]) -> float:
    """Time one pass."""
    start = time.perf_counter()
    engine.score(tokens)
    seconds = time.perf_counter() - start
    engine.forget()
    return 1e3 * seconds


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or .gguf file (default: the shipped model)")
    parser.add_argument(
        "--kind",
        default="Q8_0",
        choices=("Q8_0", "Q4_0", "Q4_1", "Q4_K", "MXFP4"),
        help="weights in llama.cpp; Q4_K needs a file with them",
    )
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--prompt", type=int, default=0, help="time a prompt of this many tokens too")
    parser.add_argument(
        "--kv-dtype",
        default=NATIVE_KV,
        choices=("float32", "float16", "int8"),
        help="llama.cpp uses float16",
    )
    parser.add_argument("--dtype", default="int8", choices=("int8", "file"), help="weights of outpace")
    parser.add_argument("--flash", action="store_true", help="use flash attention in llama.cpp")
    parser.add_argument("--gigabytes", type=float, help="memory bandwidth in GB/s (default: measured in each round)")
    args = parser.parse_args()
    if min(args.rounds, args.context, *args.rows) < 1:
        raise UserError("rows, rounds and context must be at least 1")
    return args


def main() -> None:
    """Run the command."""
    args = arguments()
    context = [index % PIECE * 37 % 1000 + 5 for index in range(args.context)]  # as session_of repeats it
    ours = Ours(args, context)
    engines = {OURS: ours, THEIRS: Theirs(args, context)}
    tokens = [index * 31 % 1000 + 5 for index in range(max(args.rows))]
    alike = agreement({name: partial(engine.score, tokens) for name, engine in engines.items()})
    for engine in engines.values():
        engine.forget()
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    prompts: dict[str, list[float]] = defaultdict(list)
    speeds, read = [args.gigabytes] if args.gigabytes else [], dict[int, int]()
    for turn in range(args.rounds + 2):
        if not args.gigabytes:
            speeds.append(memory_bandwidth() / 1e9)
        for rows in args.rows:
            for name, engine in engines.items():
                time.sleep(SETTLE)
                spent = [milliseconds(engine, tokens[:rows]) for _ in range(PASSES)]
                read[rows] = ours.model.last_weight_bytes
                if turn >= 2:  # the first passes are slower
                    times[name, rows] += spent[1:]
        for name, engine in engines.items() if args.prompt and turn % 4 == 3 else ():
            time.sleep(SETTLE)
            start = time.perf_counter()
            engine.read([index * 41 % 1000 + 5 for index in range(args.prompt)])
            prompts[name].append(time.perf_counter() - start)
            engine.restore()
    if args.prompt:
        rates = {name: round(args.prompt / statistics.median(spent)) for name, spent in prompts.items()}
        print(f"a prompt of {args.prompt} tokens, tokens/s: {rates}")
    args.gigabytes = statistics.median(speeds)
    report(args, ours.model, times, alike, read)


def agreement(passes: dict[str, Callable[[], Scores]]) -> float:
    """Return the correlation of both engines' logits, to check that they computed the same."""
    first, second = (np.array(score()).ravel() for score in passes.values())
    return float(np.corrcoef(first, second)[0, 1])


def report(
    args: argparse.Namespace,
    model: NativeLlama,
    times: dict[tuple[str, int], list[float]],
    alike: float,
    read: dict[int, int],
) -> None:
    """Print the table and the JSON line. `read`: bytes of weights by rows."""
    more = args.context * model.token_bytes + model.state_bytes
    floors = {rows: 1e-6 * (size + more) / args.gigabytes for rows, size in read.items()}
    title = f"a whole pass, ms, {args.context} tokens of context, {args.threads} threads, {model.instruction_set}"
    table = Table(title=f"{title}; llama.cpp {args.kind}")
    for column in ("rows", OURS, "least", "of one row", THEIRS, "least", "of one row", "ratio", "floor"):
        table.add_column(column, justify="right")
    found = []
    middle = {key: statistics.median(values) for key, values in times.items()}
    for rows in args.rows:
        cells = [str(rows)]
        for name in (OURS, THEIRS):
            own = middle[name, rows]
            cells += [f"{own:.2f}", f"{min(times[name, rows]):.2f}", f"{own / middle[name, args.rows[0]]:.2f}"]
        ratio = middle[OURS, rows] / middle[THEIRS, rows]
        table.add_row(*cells, f"{ratio:.2f}", f"{floors[rows]:.1f}")
        row = {
            "rows": rows,
            "floor_ms": floors[rows],
            "outpace_ms": middle[OURS, rows],
            "llama_cpp_ms": middle[THEIRS, rows],
            "ratio": ratio,
        }
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
    }
    print(json.dumps(line | {"correlation": round(alike, 5), "load": os.getloadavg()[0], "passes": found}))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
