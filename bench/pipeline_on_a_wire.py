"""Measure the shipped pair with the target in a pipeline with a given delay between its stages, next to the formula.

Run: python bench/pipeline_on_a_wire.py [--delays 0,5,20,50] [--plan 8,8,7,7] [--prompts 3] [--tokens 32] [--lossy 20]
     [--out FILE.jsonl]
Each rank runs here, in a network namespace of its own (see wire.py). --delays are milliseconds of a hop, from each rank
to the next and from the last to the first; --prompts is the number of built-in prompts of each of four kinds. A row
has the milliseconds per token of plain decoding and of a tree, their ratio, that of `theory.pipeline_speedup` for the
times measured at the first delay, tokens per pass, and bytes per token that a rank sends, headers included. At --lossy
a further row compares the rules adaptive and rejection at temperature 1. The exit status is 1 if a text of the tree
differs from plain decoding's. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common import append_row, finish, numbers, parse, run
from wire import ADDRESSES, NAME, Side, Wire, join, lines, why_not

import outpace
from outpace.bench.tasks import BUILT_IN, collect
from outpace.core.theory import pipeline_speedup

PORT = 29500
LENGTH, NODES = 6, 16  # of a tree
LOSSLESS, LOSSY = "rejection", "adaptive"


def run_rank(args: argparse.Namespace) -> None:
    """Run one rank's process."""
    say = join(args)
    Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle").write_text("0")  # for trees of 76 kB; this namespace only
    given: dict[str, Any] = {"method": "speculative", "draft_length": LENGTH, "nodes": NODES, "reuse": False}
    given |= {"pp_plan": args.plan, "rules": (LOSSLESS, LOSSY)}
    with outpace.load(None, **given) as llm:
        prompts = [[{"role": "user", "content": one.text}] for one in collect([BUILT_IN], args.prompts)]
        kinds: dict[str, dict[str, Any]] = {"plain": {"plain": True}, "tree": {}}
        kinds |= {rule: {"rule": rule, "temperature": 1.0} for rule in (LOSSLESS, LOSSY)}
        for kind in itertools.chain(["warm-up"], lines()):
            seconds, tokens, passes, texts = 0.0, 0, 0, []
            for prompt in prompts[:1] if kind == "warm-up" else prompts:
                options = {"temperature": 0.0, "max_tokens": args.tokens, "seed": 1, "ignore_eos": True}
                result = llm.stream(prompt, **options | kinds.get(kind, {})).finish()
                later = result.rounds[1:]  # the first includes the prefill
                seconds += sum(one.seconds for one in later)
                tokens, passes = tokens + sum(one.emitted for one in later), passes + len(later)
                texts.append(list(result.tokens))
            say({"seconds": seconds, "tokens": tokens, "passes": passes, "texts": texts})


def environment(rank: int, ranks: int) -> dict[str, str]:
    """Return the environment variables of a rank."""
    values = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": PORT, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
    values |= {"GLOO_SOCKET_IFNAME": NAME.decode(), "OMP_NUM_THREADS": 1, "OUTPACE_NUM_THREADS": 1}
    return {name: str(value) for name, value in values.items()}


def main() -> int:
    """Run the command."""
    options: dict[str, Any] = {"delays": "0,5,20,50", "plan": "8,8,7,7", "prompts": 3, "tokens": 32, "lossy": 20.0}
    args = parse(__doc__, **options, out=Path, side=str, address=str, socket=int)
    if args.side:
        run_rank(args)
        return 0
    if reason := why_not():
        raise SystemExit(f"{reason}; nothing was measured")
    count = len(args.plan.split(","))
    arguments = ["--plan", args.plan, "--prompts", str(args.prompts), "--tokens", str(args.tokens)]
    rows: list[dict[str, Any]] = []
    first: dict[str, Any] = {}
    equal = True
    with ExitStack() as stack:
        ranks = [Side(str(n), arguments, ADDRESSES[n], env=environment(n, count)) for n in range(count)]
        for rank in ranks:
            stack.callback(rank.close)
        wire = stack.enter_context(Wire([rank.device for rank in ranks]))
        ranks[0].ask()

        def measure(kind: str) -> dict[str, Any]:
            before = list(wire.num_bytes)
            found = ranks[0].ask(kind)
            sent = [now - then for now, then in zip(wire.num_bytes, before, strict=True)]
            found["bytes"] = [round(one / found["tokens"]) for one in sent]
            found["ms"], found["round_ms"] = (1e3 * found["seconds"] / found[by] for by in ("tokens", "passes"))
            return found | {"per_pass": found["tokens"] / found["passes"]}

        def add(delay: float, base: str, other: str) -> None:
            nonlocal equal
            one, two = measure(base), measure(other)
            hop = delay - rows[0]["delay_ms"] if rows else 0.0
            first.setdefault(base, one["ms"])
            first.setdefault(other, two["round_ms"])
            formula = pipeline_speedup(two["per_pass"], 0, 0.0, count, hop / first[base], first[other] / first[base])
            row = {"delay_ms": delay, "kinds": f"{other} to {base}", "ratio": one["ms"] / two["ms"]}
            row |= {"formula": formula if base == "plain" else None, "tokens_per_pass": two["per_pass"]}
            row |= {"ms_per_token": [one["ms"], two["ms"]], "bytes": [one["bytes"], two["bytes"]]}
            row |= {"round_ms": two["round_ms"], "base_tokens_per_pass": one["per_pass"]}
            if base == "plain":
                equal &= one["texts"] == two["texts"]
            rows.append(append_row(args.out, row))
            print(json.dumps(row), file=sys.stderr, flush=True)

        for delay in numbers(args.delays):
            wire.delay = delay / 1e3
            add(delay, "plain", "tree")
            if delay == args.lossy:
                add(delay, LOSSLESS, LOSSY)
    return finish({"rows": rows, "equal": equal}, not equal)


if __name__ == "__main__":
    run(main)
