"""Time a target pass by rows in the native runtime and in llama.cpp, with the same model and threads, interleaved.

Run: python bench/pass_times_against_llama_cpp.py [--threads 2] [--rows 1 2 4 8 16] [--rounds 40] [--context 200] ...
A pass reads new tokens after the context with logits for all of them; their keys and values are dropped again. Medians
and minima are shown, ratios are of medians. The lower bound (floor) is the bytes of weights, keys and values over the
bandwidth measured in the run. The last line is JSON.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from common import finish, parse, run, show
from pass_times import PIECE, open_model, session_of

from outpace.bench.peer import PeerSettings
from outpace.bench.peers.llama_cpp import open_llama
from outpace.core.arrays import num_cores
from outpace.core.errors import UserError
from outpace.core.machine import memory_bandwidth
from outpace.models.base import chain
from outpace.models.files.gguf.writer import gguf_file
from outpace.models.llama.native.runtime import NativeLlama
from outpace.models.options import NATIVE_KV

OURS, THEIRS = "outpace", "llama.cpp"
Scores = np.ndarray  # [rows, vocab] float32


class Ours:
    """The native runtime with a committed context."""

    def __init__(self, args: argparse.Namespace, context: Sequence[int]) -> None:
        self.model = open_model(args, "", args.dtype, args.threads)
        self._session = session_of(self.model, len(context), max(args.rows))

    def score(self, tokens: Sequence[int]) -> Scores:
        """Run one pass over these tokens."""
        scores: Scores = self.model.score([chain(self._session, tokens, logit_rows=range(len(tokens)))]).numpy()
        return scores

    def forget(self) -> None:
        """Drop the keys and values of the last pass."""
        self._session.truncate(self._session.length)


class Theirs:
    """llama.cpp through its C interface, with a committed context."""

    def __init__(self, args: argparse.Namespace, context: Sequence[int]) -> None:
        file = gguf_file(args.model, args.kind)
        settings = PeerSettings(None, None, frozenset(), args.threads, len(context) + max(args.rows))
        self._llama = open_llama(THEIRS, file, settings, flash=args.flash)
        self._llama.eval(context)
        self._length = len(context)

    def score(self, tokens: Sequence[int]) -> Scores:
        """Run one pass. The result is llama.cpp's own memory, valid until the next pass."""
        llama = self._llama
        llama._batch.set_batch(batch=tokens, n_past=self._length, logits_all=True)
        llama._ctx.decode(llama._batch)
        shape = (len(tokens), llama.n_vocab())
        scores: Scores = np.ctypeslib.as_array(llama._ctx.get_logits(), shape=shape)
        return scores

    def forget(self) -> None:
        """Drop the keys and values of the last pass."""
        self._llama._ctx.kv_cache_seq_rm(-1, self._length, -1)


SETTLE = 0.05  # seconds in which the spinning threads of the other engine go to sleep
PASSES = 5  # consecutive passes of one engine; the first, which wakes its threads, is not counted


def milliseconds(engine: Any, tokens: Sequence[int]) -> float:
    """Time one pass."""
    start = time.perf_counter()
    engine.score(tokens)
    seconds = time.perf_counter() - start
    engine.forget()
    return 1e3 * seconds


def main() -> int:
    """Run the command."""
    options = {"model": str, "kind": "Q8_0", "threads": num_cores(), "rows": [1, 2, 4, 8, 16], "rounds": 10}
    options |= {"context": 200, "kv_dtype": NATIVE_KV, "dtype": "int8", "flash": False, "gigabytes": float}
    choices = {"kind": ("Q8_0", "Q4_0", "Q4_1", "Q4_K"), "dtype": ("int8", "file")}
    args = parse(__doc__, choices=choices | {"kv_dtype": ("float32", "float16", "int8")}, **options)
    if min(args.rounds, args.context, *args.rows) < 1:
        raise UserError("rows, rounds and context must be at least 1")
    context = [index % PIECE * 37 % 1000 + 5 for index in range(args.context)]  # as session_of repeats it
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
    return report(args, ours.model, times, alike)


def agreement(passes: dict[str, Callable[[], Scores]]) -> float:
    """Return the correlation of both engines' logits, to check that they computed the same."""
    first, second = (np.array(score()).ravel() for score in passes.values())
    return float(np.corrcoef(first, second)[0, 1])


def report(
    args: argparse.Namespace, model: NativeLlama, times: dict[tuple[str, int], list[float]], alike: float
) -> int:
    """Print the table and the JSON line."""
    floor = 1e-6 * (model.weight_bytes + args.context * model.token_bytes) / args.gigabytes
    middle, shown, found = {key: statistics.median(values) for key, values in times.items()}, [], []
    for rows in args.rows:
        cells: dict[str, Any] = {"rows": rows}
        for name in (OURS, THEIRS):
            own = middle[name, rows]
            cells |= {name: own, f"{name}, least": min(times[name, rows])}
            cells[f"{name}, of one row"] = own / middle[name, args.rows[0]]
        shown.append(cells | {"ratio": middle[OURS, rows] / middle[THEIRS, rows], "floor": floor})
        row = {"rows": rows, "outpace_ms": middle[OURS, rows], "llama_cpp_ms": middle[THEIRS, rows]}
        found.append({name: round(value, 3) for name, value in (row | {"ratio": shown[-1]["ratio"]}).items()})
    title = f"a whole pass, ms, {args.context} tokens of context, {args.threads} threads, {model.instruction_set}"
    show(shown, f"{title}; llama.cpp {args.kind}", width=140)
    line = {name: getattr(args, name) for name in ("model", "dtype", "threads", "context", "kind")}
    line |= {"gigabytes": round(args.gigabytes, 1), "floor_ms": round(floor, 2), "load": os.getloadavg()[0]}
    return finish(line | {"correlation": round(alike, 5), "passes": found}, False)


if __name__ == "__main__":
    run(main)
