"""Many requests that may all write long answers, within few GiB of keys and values, each held against its single run.

Run: python bench/crowd_in_little_memory.py [--requests 200] [--max-tokens 4096] [--kv-memory 1] [--method auto]
[--batch 16] [--alone 200] [--alone-method autoregressive] [--state FOLDER] [--part crowd|alone|all] [--seconds 100].
Counts the answers that differ from those of single runs, and how often one paused for want of memory; shows the most
that keys and values took, and of that what was set aside for the draft and what it held. With a folder for what is
known so far its two parts can be run apart, and the single runs in pieces: after so many seconds no other one begins,
and the same command goes on (exit 3 until all is known). Prints a table and one JSON line last; exit 1 where an answer
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
from pathlib import Path
from typing import Any

from known import Known
from rich.console import Console
from rich.table import Table

from outpace.api.llm import LLM
from outpace.api.params import SamplingParams
from outpace.core.errors import UserError
from outpace.engine.sequence import Running

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


def draft_bytes(llm: LLM) -> int:
    """What the draft model's sessions of the requests that run take."""
    states = [run.draft.state for run in llm.engine.running]
    sessions = [getattr(part, "session", None) for state in states for part in getattr(state, "parts", [state])]
    return sum(llm.draft.model.session_bytes(session.slots) for session in sessions if llm.draft and session)


def answer(llm: LLM, prompts: Sequence[Any], params: SamplingParams) -> tuple[list[Running], dict[str, Any]]:
    """All at once: the requests when they are over, and what it took."""
    start, peak, aside, drafts, running = time.perf_counter(), 0, 0, 0, 0
    asked = [llm.prepare(prompt, params) for prompt in prompts]
    runs = [llm.engine.submit(one.request, one.decoder, one.options, one.text.watch) for one in asked]
    while any(run.finish_reason is None for run in runs):
        llm.engine.step()
        peak, running = max(peak, llm.engine.memory.used), max(running, len(llm.engine.running))
        texts = [(run, run.storage.session.slots) for run in llm.engine.running]
        aside, drafts = max(aside, llm.engine.drafting.stored_bytes(texts)), max(drafts, draft_bytes(llm))
    return runs, {
        "seconds": round(time.perf_counter() - start, 1),
        "peak_gib": round(peak / GIB, 3),
        "peak_set_aside_for_drafts_gib": round(aside / GIB, 3),
        "peak_draft_gib": round(drafts / GIB, 3),
        "most_running": running,
        "tokens": sum(len(run.tokens) for run in runs),
        "longest": max(len(run.tokens) for run in runs),
        "pauses": sum(run.history.pauses for run in runs),
        "ends": dict(Counter(run.finish_reason for run in runs)),
    }


def answer_crowd(known: Known, prompts: Sequence[Any], params: SamplingParams, args: argparse.Namespace) -> None:
    """All requests at once, in one run."""
    with closing(LLM(method=args.method, batch=args.batch, kv_memory=args.kv_memory, profile=False)) as llm:
        runs, row = answer(llm, prompts, params)
    row["peak_rss_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB, 3)
    known.found = {"row": row, "texts": [run.tokens for run in runs]}
    known.save()


def answer_alone(known: Known, prompts: Sequence[Any], params: SamplingParams, method: str, until: float) -> None:
    """One request after the other and nothing reused, for prompts that have no single run yet."""
    with closing(LLM(method=method, reuse=False, batch=1, profile=False)) as llm:
        for prompt in prompts[len(known.found["texts"]) :]:
            if time.perf_counter() > until:
                return
            known.found["texts"].append(answer(llm, [prompt], params)[0][0].tokens)
            known.save()


def report(crowd: Known, alone: Known, asked: dict[str, Any]) -> int:
    """The table for people, the line for machines; the exit code."""
    pairs = list(zip(alone.found["texts"], crowd.found["texts"], strict=False))
    differ = sum(single != text for single, text in pairs)
    counts = {"compared": len(pairs), "compared_tokens": sum(len(text) for _, text in pairs), "differ": differ}
    row = crowd.found["row"] | counts
    table = Table("what", "figure", title="{requests} requests of {max_tokens} tokens, {method}".format(**asked))
    for name, value in row.items():
        table.add_row(name.replace("_", " "), str(value))
    Console(width=100).print(table)
    print(json.dumps({**asked, **row}))
    is_whole = set(row["ends"]) <= {"stop", "length"}
    return 0 if is_whole and not differ else 1


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--kv-memory", type=float, default=1.0, help="GiB")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--alone", type=int, help="how many are held against their single runs; all by default")
    parser.add_argument("--alone-method", default="autoregressive", help="of the single runs")
    parser.add_argument("--state", type=Path, help="a folder for what is known so far")
    parser.add_argument("--part", choices=("crowd", "alone", "all"), default="all")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no single run begins")
    args = parser.parse_args()
    until = time.perf_counter() + args.seconds
    asked = {name: getattr(args, name) for name in ("requests", "max_tokens")}
    prompts, params = make_prompts(args.requests), SamplingParams(max_tokens=args.max_tokens)
    some = prompts[: args.requests if args.alone is None else args.alone]
    alone = Known(args.state / "alone.json" if args.state else None, asked, row={}, texts=[])
    asked = asked | {name: getattr(args, name) for name in ("kv_memory", "method", "batch")}
    crowd = Known(args.state / "crowd.json" if args.state else None, asked, row={}, texts=[])
    if not crowd.found["row"] and args.part != "alone":
        answer_crowd(crowd, prompts, params, args)
    if len(alone.found["texts"]) < len(some) and args.part != "crowd":
        answer_alone(alone, some, params, args.alone_method, until)
    made = len(alone.found["texts"])
    if not crowd.found["row"] or made < len(some):
        print(f"the crowd is {'over' if crowd.found['row'] else 'to come'}, {made} of {len(some)} single runs are made")
        return 3
    return report(crowd, alone, asked)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
