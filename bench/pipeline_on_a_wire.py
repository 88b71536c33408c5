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
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from wire import ADDRESSES, NAME, Wire, enter, why_not

PORT = 29500
LENGTH, NODES = 6, 16  # of a tree
LOSSLESS, LOSSY = "rejection", "adaptive"


def run_rank(args: argparse.Namespace) -> None:
    """Run one rank's process."""
    rank, ranks = args.rank, len(args.plan.split(","))
    with socket.socket(fileno=args.socket) as parent:
        socket.send_fds(parent, [b"device"], [enter(ADDRESSES[rank])])
    Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle").write_text("0")  # for trees of 76 kB; this namespace only
    values = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": PORT, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
    values |= {"GLOO_SOCKET_IFNAME": NAME.decode(), "OMP_NUM_THREADS": 1, "OUTPACE_NUM_THREADS": 1}
    os.environ.update({name: str(value) for name, value in values.items()})

    import outpace  # not before: it reads the environment
    from outpace.bench.tasks import BUILT_IN, collect

    given: dict[str, Any] = {"method": "speculative", "draft_length": LENGTH, "nodes": NODES, "reuse": False}
    given |= {"pp_plan": args.plan, "rules": (LOSSLESS, LOSSY)}
    with outpace.load(None, **given) as llm:
        prompts = [[{"role": "user", "content": one.text}] for one in collect([BUILT_IN], args.prompts)]
        kinds: dict[str, dict[str, Any]] = {"plain": {"plain": True}, "tree": {}}
        kinds |= {rule: {"rule": rule, "temperature": 1.0} for rule in (LOSSLESS, LOSSY)}
        for line in itertools.chain(["warm-up"], sys.stdin):
            kind, is_first = kinds.get(line.strip(), {}), line == "warm-up"
            seconds, tokens, passes, texts = 0.0, 0, 0, []
            for prompt in prompts[:1] if is_first else prompts:
                options = {"temperature": 0.0, "max_tokens": args.tokens, "seed": 1, "ignore_eos": True} | kind
                result = llm.stream(prompt, **options).finish()
                later = result.rounds[1:]  # the first includes the prefill
                seconds += sum(one.seconds for one in later)
                tokens, passes = tokens + sum(one.emitted for one in later), passes + len(later)
                texts.append(list(result.tokens))
            found = {"seconds": seconds, "tokens": tokens, "passes": passes, "texts": texts}
            print(json.dumps(found), flush=True)


class Ranks:
    """The processes of a pipeline, each in a namespace of its own."""

    def __init__(self, count: int, arguments: list[str]) -> None:
        self.devices, self._processes = list[int](), list[subprocess.Popen[str]]()
        for rank in range(count):
            ours, theirs = socket.socketpair()
            command = [sys.executable, __file__, "--rank", str(rank), "--socket", str(theirs.fileno()), *arguments]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._processes.append(subprocess.Popen(command, text=True, pass_fds=[theirs.fileno()], **pipes))
            theirs.close()
            self.devices += socket.recv_fds(ours, 1, 1)[1]
            ours.close()

    def ask(self, line: str = "") -> dict[str, Any]:
        """Send rank 0 a line, if any; return its next answer."""
        first = self._processes[0]
        assert first.stdin is not None
        assert first.stdout is not None
        if line:
            first.stdin.write(line + "\n")
            first.stdin.flush()
        found: dict[str, Any] = json.loads(first.stdout.readline())
        return found

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delays", default="0,5,20,50")
    parser.add_argument("--plan", default="8,8,7,7")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--lossy", type=float, default=20.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--socket", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        run_rank(args)
        return
    if reason := why_not():
        raise SystemExit(f"{reason}; nothing was measured")
    from outpace.core.theory import pipeline_speedup

    count = len(args.plan.split(","))
    arguments = ["--plan", args.plan, "--prompts", str(args.prompts), "--tokens", str(args.tokens)]
    rows: list[dict[str, Any]] = []
    first: dict[str, Any] = {}
    equal = True
    with ExitStack() as stack:
        ranks = Ranks(count, arguments)
        stack.callback(ranks.close)
        wire = stack.enter_context(Wire(ranks.devices))
        ranks.ask()

        def measure(kind: str) -> dict[str, Any]:
            before = list(wire.num_bytes)
            found = ranks.ask(kind)
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
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
            if args.out is not None:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")

        for delay in map(float, args.delays.split(",")):
            wire.delay = delay / 1e3
            add(delay, "plain", "tree")
            if delay == args.lossy:
                add(delay, LOSSLESS, LOSSY)
    print(json.dumps({"rows": rows, "equal": equal}))
    sys.exit(0 if equal else 1)


if __name__ == "__main__":
    main()
