"""Many requests that may all write long answers, within few GiB of keys and values, each held against its single run.

Run: python bench/crowd_in_little_memory.py [--requests 200] [--max-tokens 4096] [--kv-memory 1] [--method auto]
[--batch 16] [--alone 200]. Counts the answers that differ from plain decoding alone, and how often one paused for want
of memory; shows the most that keys and values took. Prints a table and one JSON line last; exit 1 where an answer
differs or is not whole.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from rich.console import Console
from rich.table import Table

from outpace.api.llm import LLM
from outpace.api.params import SamplingParams
from outpace.core.errors import UserError
from outpace.engine.request import Running
from outpace.models.load import Loaded

THINGS = ("a lamp", "bread", "the moon", "a bridge", "salt", "a clock", "rain", "a wheel", "glass", "a seed")
ASKS = (
    "What is {}? One sentence.",
    "Write one line of verse about {}.",
    "Name three things that go with {}.",
    "Explain {} to a child in two sentences.",
    "Tell a story about {}.",
)
GIB = 1 << 30


def make_prompts(count: int) -> list[list[dict[str, str]]]:
    """Conversations; most answers to them are short, one in five is not."""
    texts = [ask.format(thing) for ask in ASKS for thing in THINGS]
    return [
        [{"role": "user", "content": f"{texts[number % len(texts)]} (Version {number // len(texts) + 1}.)"}]
        for number in range(count)
    ]


def answer(llm: LLM, prompts: Sequence[Any], params: SamplingParams) -> tuple[list[Running], dict[str, Any]]:
    """All at once: the requests when they are over, and what it took."""
    start, peak, running = time.perf_counter(), 0, 0
    asked = [llm.prepare(prompt, params) for prompt in prompts]
    runs = [llm.engine.submit(one.request, one.decoder, one.options, one.text.watch) for one in asked]
    while any(run.finish_reason is None for run in runs):
        llm.engine.step()
        peak, running = max(peak, llm.engine.memory.used), max(running, len(llm.engine.running))
    return runs, {
        "seconds": round(time.perf_counter() - start, 1),
        "peak_gib": round(peak / GIB, 3),
        "most_running": running,
        "tokens": sum(len(run.tokens) for run in runs),
        "longest": max(len(run.tokens) for run in runs),
        "pauses": sum(run.history.pauses for run in runs),
        "ends": dict(Counter(run.finish_reason for run in runs)),
    }


def count_different(target: Loaded, prompts: Sequence[Any], params: SamplingParams, runs: Sequence[Running]) -> int:
    """Answers that are not those of plain decoding, one request after the other and nothing reused."""
    with closing(LLM(target, method="autoregressive", reuse=False, batch=1)) as llm:
        alone = [answer(llm, [prompt], params)[0][0] for prompt in prompts]
    return sum(run.tokens != other.tokens for run, other in zip(runs, alone, strict=False))


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--kv-memory", type=float, default=1.0, help="GiB")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--alone", type=int, help="how many are held against their single runs; all by default")
    args = parser.parse_args()
    prompts, params = make_prompts(args.requests), SamplingParams(max_tokens=args.max_tokens)
    some = prompts[: args.requests if args.alone is None else args.alone]
    with closing(LLM(method=args.method, batch=args.batch, kv_memory=args.kv_memory, profile=False)) as llm:
        runs, row = answer(llm, prompts, params)
        row |= {"compared": len(some), "differ": count_different(llm.target, some, params, runs)}
    row["peak_rss_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB, 3)
    title = f"{args.requests} requests of {args.max_tokens} tokens, {args.kv_memory:g} GiB, {args.method}"
    table = Table("what", "figure", title=title)
    for name, value in row.items():
        table.add_row(name.replace("_", " "), str(value))
    Console(width=100).print(table)
    print(json.dumps({**vars(args), **row}))
    is_whole = set(row["ends"]) <= {"stop", "length"}
    return 0 if is_whole and not row["differ"] else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
