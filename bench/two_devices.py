"""Emulate two devices on a CPU: target and drafter in separate processes, each on one core, with stated pass times.

Run: python bench/two_devices.py --trace FILE --tasks A.jsonl,B.jsonl [--ratio 7] [--prompts 2] [--tokens 64]
     [--pass-ms 40] [--methods card,planned,pearl,ssd,in-turn,auto] [--nodes 16] [--width 8] [--out FILE.jsonl]
A target pass lasts --pass-ms and a forward of the draft model --pass-ms / --ratio, for any number of rows: both sleep
for the rest of that time, so they share only caches and memory. Messages, waits, planning and all other host work are
real. The table also has the speedup that the simulator predicts from the measured times and the trace, which is
recorded from the tasks if the file does not exist. Sequential methods draft in the process of the target. Plain
decoding is timed on the first two answers, since all its passes take the stated time.

Each row is appended to --out at once; methods whose rows it has for the same sizes are not measured again, so the same
command continues a run that stopped. Needs Linux and two cores. The exit status is 1 if a text differs from that of
plain decoding. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from slowed_model import SlowedModel, slowed_drafter

from outpace.bench.tasks import collect
from outpace.card.process import ProcessWorker
from outpace.core import registry
from outpace.core.types import Request
from outpace.engine.engine import Engine, EngineOptions
from outpace.models.load import Loaded, load_draft, load_model
from outpace.rules.greedy import Greedy
from outpace.simulate import costs, trace
from outpace.simulate.run import simulate
from outpace.simulate.setups import LENGTHS, PLAIN, Setup

TARGET_CORE, DRAFT_CORE = 0, 1
STARTING = 60.0  # seconds allowed for the start of the drafter process
PLAIN_ANSWERS = 2


class Measured(NamedTuple):
    """Results of one method: seconds per token, per round and per draft step, tokens per pass, and the texts."""

    seconds: float
    round: float
    step: float
    length: float
    texts: list[tuple[int, ...]]


def setups(args: argparse.Namespace) -> list[Setup]:
    """Return the measured methods, plain decoding first. PEARL and SSD draft as many tokens as fit into a pass."""
    tree = {"width": args.width, "tree_nodes": 1024}
    gamma = max(1, round(args.ratio))
    found = {
        "card": Setup("card", "CARD", "card", args.nodes, tree),
        "planned": Setup("planned", "planned", "planned", args.nodes, tree),
        "pearl": Setup("pearl", "PEARL", "pearl", args.nodes, tree | {"draft_length": min(gamma, args.nodes)}),
        "ssd": Setup("ssd", "SSD", "ssd", args.nodes, tree | {"draft_length": max(1, min(gamma - 1, 6))}),
        "in-turn": Setup("in-turn", "sequential, tree", "speculative", args.nodes, tree, LENGTHS),
        "auto": Setup("auto", "auto", "auto", args.nodes, tree),
    }
    return [Setup(PLAIN, "plain", PLAIN, 1), *(found[name] for name in args.methods.split(","))]


def measure(setup: Setup, target: Any, draft: Loaded, requests: Sequence[Request], seconds: float) -> Measured:
    """Answer all requests sequentially in one engine. Prefill is not timed."""
    decoder, drafter, worker = setup.decoder, None, None
    recipe = partial(slowed_drafter, draft.again, draft.model.vocab_size, dict(setup.options), seconds)
    if decoder.drafting == "parallel":
        worker = ProcessWorker(partial(recipe, DRAFT_CORE))
        until_ready(worker)
    elif decoder.drafting == "sequential":
        drafter = recipe(None)
    rounds, texts = [], []
    with Engine(target, drafter, worker, EngineOptions(nodes=setup.nodes, reuse=False)) as engine:
        for request in requests:
            run = engine.submit(request, decoder, registry.build_options(decoder, setup.options))
            while run.finish_reason is None:
                engine.step()
            if run.error is not None:
                raise run.error
            rounds += run.history.steps[1:]  # the first round includes the prefill
            texts.append(tuple(run.tokens))
        step = worker.step_seconds if worker else seconds
    tokens = sum(one.emitted for one in rounds)
    spent = sum(one.seconds for one in rounds) / tokens
    return Measured(spent, median(one.seconds for one in rounds), step, tokens / len(rounds), texts)


def until_ready(worker: ProcessWorker) -> None:
    """Wait until the drafter process is ready. Raise RuntimeError if it does not start."""
    end = time.monotonic() + STARTING
    while not worker.is_ready:
        if worker.failure is not None or time.monotonic() > end:
            raise RuntimeError("the drafter process did not start") from worker.failure
        time.sleep(0.05)


def with_length(setup: Setup, recorded: Any, times: costs.PassCosts) -> Setup:
    """Choose the draft length that the simulator finds best, if the method has one."""
    if not setup.lengths:
        return setup
    *_, best = simulate(recorded, [Setup(PLAIN, "plain", PLAIN, 1), setup], [times])
    return replace(setup, options={**setup.options, "draft_length": best.draft_length}, lengths=())


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--tasks", required=True)
    parser.add_argument("--ratio", type=float, default=7.0)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pass-ms", type=float, default=40.0)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--methods", default="card,planned,pearl,ssd,in-turn,auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.sched_setaffinity(0, {TARGET_CORE})
    target = load_model(args.target)
    draft = load_draft(args.draft, target)
    assert draft is not None
    if not args.trace.exists():
        prompts = [target.tokenizer.encode_prompt(one.text) for one in collect(args.tasks.split(","), args.prompts)]
        trace.record(target, draft, prompts, trace.RecordOptions(max_tokens=args.tokens)).save(args.trace)
    recorded = trace.load(args.trace)
    stops = frozenset(target.tokenizer.stop_ids)
    requests = [Request(one.prompt, Greedy(), len(one.tokens), stop_ids=stops) for one in recorded.answers]
    seconds, found = args.pass_ms / 1e3, []
    sizes = {name: getattr(args, name) for name in ("ratio", "pass_ms", "nodes", "width")}
    known = args.out.read_text(encoding="utf-8").splitlines() if args.out is not None and args.out.exists() else []
    for setup in setups(args):
        key = sizes | {"method": setup.name, "answers": len(requests)}
        rows = [row for row in map(json.loads, known) if key.items() <= row.items()]
        row = rows[0] if rows else None
        if row is None:
            asked = requests[:PLAIN_ANSWERS] if setup.method == PLAIN else requests
            chosen = with_length(setup, recorded, costs.by_ratio(args.ratio))
            result = measure(chosen, SlowedModel(target.model, seconds), draft, asked, seconds / args.ratio)
            plain = found[0] if found else {"seconds_per_token": result.seconds, "round_s": result.round}
            times = costs.by_ratio(plain["round_s"] / result.step)
            *_, predicted = simulate(recorded, [Setup(PLAIN, "plain", PLAIN, 1), chosen], [times])
            row = key | {
                "speedup": round(plain["seconds_per_token"] / result.seconds, 3),
                "predicted": round(predicted.speedup, 3),
                "tokens_a_pass": round(result.length, 3),
                "predicted_tokens_a_pass": round(predicted.figures.mean_accepted_length, 3),
                "seconds_per_token": result.seconds,
                "round_s": result.round,
                "step_ms": round(result.step * 1e3, 2),
                "equal": all(text == one.tokens for text, one in zip(result.texts, recorded.answers, strict=False)),
            }
            if args.out is not None:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
        found.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    table = Table(title=f"ratio {args.ratio:g}, passes of {args.pass_ms:g} ms, over plain decoding")
    for column in (shown := [name for name in found[0] if name not in sizes]):
        table.add_column(column)
    for row in found:
        table.add_row(*(f"{row[name]:.4g}" if isinstance(row[name], float) else str(row[name]) for name in shown))
    Console(width=150).print(table)
    print(json.dumps({"pass_ms": args.pass_ms, "answers": len(requests), "rows": found}))
    sys.exit(0 if all(row["equal"] for row in found) else 1)


if __name__ == "__main__":
    main()
