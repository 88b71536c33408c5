"""Time a target pass by instruction set, precision, rows and threads, also by llama.cpp, and compare it with what the
machine could do.

Run: python bench/pass_times.py [--dtype int8 file] [--threads 1 2] [--rows 1 2 ...] [--context 128] [--llama-cpp Q4_1]
A pass reads new tokens after the context, with logits for all of them; their keys and values are dropped again, or the
states of recurrent layers restored. All settings are interleaved, round after round, because other jobs on the machine
disturb single measurements. The lower bound (floor) is the bytes of weights (of experts, those that the rows choose),
keys, values and states over the memory bandwidth, which each round measures. `of bandwidth` and `of multiply rate` are
the fractions, at the least time, of this bandwidth and of the rate at which as many threads multiply bytes in
registers. --llama-cpp KIND: weights of this kind (Q8_0, Q4_0, Q4_1, Q4_K, MXFP4) in llama.cpp, whose keys and values
are float16, with --flash for its flash attention; `ratio` is to its median with as many rows. --prompt also times a
prompt of this many tokens. A context above 256 tokens repeats one text of 256 tokens. The last line is JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import outpace_kernels
from common import finish, parse, refuse, run, show

from outpace.bench.peer import PeerSettings
from outpace.bench.peers.llama_cpp import BATCH, open_llama
from outpace.core.arrays import num_cores
from outpace.core.machine import memory_bandwidth
from outpace.models.base import chain
from outpace.models.files.find import locate, open_source
from outpace.models.files.gguf.writer import gguf_file
from outpace.models.llama.config.llama_config import LlamaConfig, from_dict, tensor_shapes
from outpace.models.llama.native.binding import WEIGHTS, NativeOptions
from outpace.models.llama.native.runtime import NativeLlama
from outpace.models.options import NATIVE_KV

ROWS = [1, 2, 3, 4, 6, 8, 12, 16, 32, 64]
PIECE = 256  # tokens that are read; longer contexts copy them
SETTLE = 0.05  # seconds in which the spinning threads of the other engine go to sleep
PASSES = 5  # consecutive passes of one engine; the first, which wakes its threads, is not counted
LLAMA_CPP = "llama.cpp"


def context_of(count: int) -> list[int]:
    """Return the tokens before a pass."""
    return [number % PIECE * 37 % 1000 + 5 for number in range(count)]


class Ours:
    """The native runtime with a committed context."""

    def __init__(self, args: argparse.Namespace, name: str, dtype: str, threads: int) -> None:
        options = NativeOptions(threads=threads, kv_dtype=args.kv_dtype, instruction_set=name, weights=dtype)
        context, rows = args.context, max(args.rows)
        with open_source(locate(args.model)) as source:
            config = from_dict(source.config)
            config = replace(config, max_positions=max(config.max_positions, context + rows))
            self.model = NativeLlama.from_tensors(config, source.weight, options=options)
        self.label, self.threads = f"{self.model.instruction_set}, {dtype}", threads
        self._session = session = self.model.open(context, rows)
        self.model.score([chain(session, context_of(min(context, PIECE)))])
        session.keep(range(min(context, PIECE)))
        session.reserve(context + rows)
        for start in range(PIECE, context, PIECE):
            session.store.move(list(range(min(PIECE, context - start))), start)
        session.length = context
        self.rate = outpace_kernels.multiply_rate(self.model.instruction_set, threads)
        self.read_bytes = dict[int, int]()  # by rows: what a pass reads at least

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        """Run one pass over these tokens; return the scores, float32 [rows, vocab]."""
        scores = np.asarray(self.model.score([chain(self._session, tokens, logit_rows=range(len(tokens)))]))
        held = self._session.length * self.model.token_bytes + self.model.state_bytes
        self.read_bytes[len(tokens)] = self.model.last_weight_bytes + held
        return scores

    def forget(self) -> None:
        """Drop the keys and values of the last pass."""
        self._session.truncate(self._session.length)

    def read(self, tokens: Sequence[int]) -> None:
        """Read a prompt by a session of its own, in the chunks that the engine gives."""
        session, keep = self.model.open(len(tokens), BATCH), range(0)
        for start in range(0, len(tokens), step := min(self.model.chunk or PIECE, BATCH)):
            part = tokens[start : start + step]
            is_last = start + step >= len(tokens)
            self.model.score([chain(session, part, [len(part) - 1] if is_last else [], keep)])
            keep = range(len(part))

    def restore(self) -> None:
        """Do nothing: the context is as it was."""


class Theirs:
    """llama.cpp through its C interface, with a committed context."""

    rate = None

    def __init__(self, args: argparse.Namespace, threads: int) -> None:
        import llama_cpp

        file, self.label, self.threads = gguf_file(args.model, args.llama_cpp), LLAMA_CPP, threads
        settings = PeerSettings(None, None, frozenset(), threads, args.context + args.prompt + max(args.rows))
        self._llama, self._context = open_llama(LLAMA_CPP, file, settings, flash=args.flash), context_of(args.context)
        self.restore()
        whole, self._set_state = self._llama._ctx.ctx, llama_cpp.llama_state_seq_set_data
        self._state = (ctypes.c_uint8 * llama_cpp.llama_state_seq_get_size(whole, 0))()
        llama_cpp.llama_state_seq_get_data(whole, self._state, len(self._state), 0)

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        """Run one pass. The result is llama.cpp's own memory, valid until the next pass."""
        llama = self._llama
        llama._batch.set_batch(batch=tokens, n_past=len(self._context), logits_all=True)
        llama._ctx.decode(llama._batch)
        return np.ctypeslib.as_array(llama._ctx.get_logits(), shape=(len(tokens), llama.n_vocab()))

    def forget(self) -> None:
        """Drop the keys and values of the last pass, or restore the states of recurrent layers."""
        if not self._llama._ctx.kv_cache_seq_rm(-1, len(self._context), -1):
            self._set_state(self._llama._ctx.ctx, self._state, len(self._state), 0)

    def read(self, tokens: Sequence[int]) -> None:
        """Read a prompt in the place of the context, which `restore` reads again."""
        llama = self._llama
        llama._ctx.kv_cache_clear()
        for start in range(0, len(tokens), BATCH):
            llama._batch.set_batch(batch=tokens[start : start + BATCH], n_past=start, logits_all=False)
            llama._ctx.decode(llama._batch)
        llama._ctx.get_logits()  # waits

    def restore(self) -> None:
        """Go back to the context."""
        self.read(self._context)


def milliseconds(engine: Ours | Theirs, tokens: Sequence[int]) -> float:
    """Time one pass."""
    start = time.perf_counter()
    engine.score(tokens)
    seconds = time.perf_counter() - start
    engine.forget()
    return 1e3 * seconds


def correlation(engines: Sequence[Ours | Theirs], tokens: Sequence[int]) -> float:
    """Return the correlation of the first and last engine's logits, to check that they computed the same."""
    first, last = (np.array(engine.score(tokens)).ravel() for engine in (engines[0], engines[-1]))
    for engine in (engines[0], engines[-1]):
        engine.forget()
    return float(np.corrcoef(first, last)[0, 1])


def operations(config: LlamaConfig) -> int:
    """Return the multiplications and additions of weights in one row of a pass, attention not included."""
    shapes = tensor_shapes(config)
    if not config.tie_embeddings:
        del shapes["model.embed_tokens.weight"]  # looked up
    return 2 * sum(math.prod(shape) for shape in shapes.values() if len(shape) > 1)


def main() -> int:
    """Run the command."""
    options = {"model": str, "dtype": [WEIGHTS[0]], "threads": [*range(1, num_cores() + 1)], "rows": ROWS, "rounds": 30}
    options |= {"context": 128, "kv_dtype": NATIVE_KV, "set": [""], "llama_cpp": str, "flash": False}
    choices = {"dtype": WEIGHTS, "llama_cpp": ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "MXFP4")}
    args = parse(__doc__, choices=choices, **options, prompt=0, gigabytes=float)
    if min(args.rounds, args.context, *args.rows) < 1:
        refuse("rows, rounds and context must be at least 1")
    engines: list[Any] = [
        Ours(args, *one) for one in ((s, d, t) for s in args.set for d in args.dtype for t in args.threads)
    ]
    engines += [Theirs(args, threads) for threads in args.threads if args.llama_cpp]
    tokens = [number * 31 % 1000 + 5 for number in range(max(args.rows))]
    alike, passes = correlation(engines, tokens), PASSES if args.llama_cpp else 1
    times: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    prompts, speeds = defaultdict[str, list[float]](list), [1e9 * args.gigabytes] if args.gigabytes else []
    for turn in range(args.rounds + 1):
        speeds += [] if args.gigabytes else [memory_bandwidth()]
        for rows in args.rows:
            for engine in engines:
                time.sleep(SETTLE if args.llama_cpp else 0.0)
                spent = [milliseconds(engine, tokens[:rows]) for _ in range(passes)]
                times[engine.label, engine.threads, rows] += spent[min(passes - 1, 1) :]
        for engine in engines if args.prompt and turn % 4 == 3 else ():
            time.sleep(SETTLE)
            start = time.perf_counter()
            engine.read([number * 41 % 1000 + 5 for number in range(args.prompt)])
            prompts[f"{engine.label}, {engine.threads} threads"].append(time.perf_counter() - start)
            engine.restore()
    times = {key: spent[len(spent) // (args.rounds + 1) :] for key, spent in times.items()}  # the first are slower
    for name, spent in prompts.items():
        print(f"{name}: a prompt of {args.prompt} tokens at {args.prompt / median(spent):.0f} tokens/s")
    return report(args, engines, times, median(speeds), alike)


def report(args: argparse.Namespace, engines: Sequence[Any], times: Any, bandwidth: float, alike: float) -> int:
    """Print the table and the JSON line."""
    found = []
    for engine in engines:
        for rows in args.rows:
            own, at = times[engine.label, engine.threads, rows], (engine.threads, rows)
            row = {"engine": engine.label, "threads": engine.threads, "rows": rows, "median_ms": median(own)}
            row |= {
                "least_ms": min(own),
                "of_one_row": median(own) / median(times[(engine.label, *at[:1], args.rows[0])]),
            }
            if engine.rate is not None:
                model, least = engine.model, 1e-3 * min(own)
                size = engine.read_bytes[rows]
                row |= {"floor_ms": 1e3 * size / bandwidth, "of_bandwidth": size / least / bandwidth}
                row |= {"of_multiply_rate": operations(model.config) * rows / least / engine.rate}
            if args.llama_cpp:
                row |= {"ratio": median(own) / median(times[(LLAMA_CPP, *at)])}
            found.append({name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()})
    title = f"a whole pass after {args.context} tokens; floors at {bandwidth / 1e9:.1f} GB/s"
    show(found, f"{title}; scores correlate by {alike:.4f}", width=140)
    line = {name: getattr(args, name) for name in ("model", "context", "llama_cpp")}
    line |= {"gigabytes": round(bandwidth / 1e9, 1), "load": os.getloadavg()[0], "correlation": round(alike, 5)}
    return finish(line | {"passes": found}, False)


if __name__ == "__main__":
    run(main)
