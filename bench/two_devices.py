"""Emulate two devices on a CPU: target and drafter in separate processes, each on one core, with stated pass times.

Run: python bench/two_devices.py --trace FILE [--ratio 2.3,7,20] [--pass-ms 70] [--methods card,planned] [--answers 9]
     [--nodes 32] [--width 16] [--out FILE.jsonl] [--draft DRAFT --target TARGET --tasks A.jsonl,B.jsonl --prompts 3]
A target pass lasts --pass-ms and a forward of the draft model --pass-ms divided by the ratio, for any number of rows:
the processes sleep for the rest of that time, so they share only caches and memory. Messages, waits, planning and all
other host work are real. By default the models replay the trace (see docs/simulate.md). With --draft the real models
run, whose forwards must fit into these times on one core; if the trace does not exist, they record it from --tasks.

Methods are named as in `outpace simulate`, which also gives their best draft lengths and the predicted speedups.
Sequential methods draft in the process of the target. Plain decoding is timed on the first two answers, since all its
passes take the stated time. Each row is appended to --out at once; rows that it has for the same sizes are not measured
again. Needs Linux and two cores. The exit status is 1 if a text differs from the recorded one. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from common import append_row, finish, numbers, parse, read_rows, run, show
from slowed_model import SlowedModel, loaded_draft, replayed_draft, slowed_drafter

from outpace.bench.tasks import collect
from outpace.card.process import ProcessWorker
from outpace.core import registry
from outpace.core.types import Request, Sampling
from outpace.engine.engine import Engine, EngineOptions
from outpace.models.base import Model
from outpace.models.load import load_draft, load_model
from outpace.rules.greedy import Greedy
from outpace.simulate import trace
from outpace.simulate.models import RecordedGreedy, ReplayTarget, index_trace
from outpace.simulate.run import Outcome, simulate
from outpace.simulate.setups import PLAIN, Setup, SetupSizes, by_ratio, select_setups
from outpace.simulate.trace import limit_trace

TARGET_CORE, DRAFT_CORE = 0, 1
STARTING = 60.0  # seconds allowed for the start of the drafter process
PLAIN_ANSWERS = 2  # answers by which plain decoding is timed


class Pair(NamedTuple):
    """Target, a function that loads the draft in any process, and the requests with their texts."""

    target: Any
    load_draft: Callable[[], Model]
    requests: Sequence[Request]
    texts: Sequence[tuple[int, ...]]


class Measured(NamedTuple):
    """Results of one method: seconds per token, median round and draft step, tokens per pass, and the texts."""

    seconds: float
    round: float
    step: float
    length: float
    texts: list[tuple[int, ...]]


def replayed_pair(path: Path, answers: int | None) -> Pair:
    """Return models that replay a trace."""
    indexed = index_trace(limit_trace(trace.load(path), answers))
    rule = RecordedGreedy()
    requests = [Request(one.prompt, rule, len(one.tokens), Sampling(one.temperature)) for one in indexed.answers]
    texts = [one.tokens for one in indexed.answers]
    return Pair(ReplayTarget(indexed), partial(replayed_draft, path, answers), requests, texts)


def real_pair(args: argparse.Namespace) -> Pair:
    """Load the models, and record their trace if it does not exist."""
    target = load_model(args.target)
    draft = load_draft(args.draft, target)
    assert draft is not None
    if not args.trace.exists():
        prompts = [target.tokenizer.encode_prompt(one.text) for one in collect(args.tasks.split(","), args.prompts)]
        trace.record(target, draft, prompts, trace.RecordOptions(max_tokens=args.tokens)).save(args.trace)
    answers, stops = limit_trace(trace.load(args.trace), args.answers).answers, frozenset(target.tokenizer.stop_ids)
    requests = [Request(one.prompt, Greedy(), len(one.tokens), stop_ids=stops) for one in answers]
    again = partial(loaded_draft, draft.again, draft.model.vocab_size)
    return Pair(target.model, again, requests, [one.tokens for one in answers])


def measure(setup: Setup, pair: Pair, target_seconds: float, draft_seconds: float) -> Measured:
    """Answer all requests sequentially in one engine. Prefill is not timed."""
    decoder, drafter, worker = setup.decoder, None, None
    recipe = partial(slowed_drafter, pair.load_draft, dict(setup.options), draft_seconds)
    if decoder.drafting == "parallel":
        worker = ProcessWorker(partial(recipe, DRAFT_CORE)).start()
        until_ready(worker)
    elif decoder.drafting == "sequential":
        drafter = recipe(None)
    rounds, texts = [], []
    target: Any = SlowedModel(pair.target, target_seconds)
    with Engine(target, drafter, worker, EngineOptions(nodes=setup.nodes, reuse=False)) as engine:
        for request in pair.requests[:PLAIN_ANSWERS] if setup.method == PLAIN else pair.requests:
            run = engine.submit(request, decoder, registry.build_options(decoder, setup.options))
            while run.finish_reason is None:
                engine.step()
            if run.error is not None:
                raise run.error
            rounds += run.history.steps[1:]  # the first round includes the prefill
            texts.append(tuple(run.tokens))
        step = worker.step_seconds if worker else draft_seconds
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


def predict(recorded: trace.Trace, setup: Setup, ratio: float) -> Outcome:
    """Simulate a method; return its outcome, with the speedup and, if it has one, the best draft length."""
    *_, outcome = simulate(recorded, [Setup(PLAIN, "plain", PLAIN, 1), setup], [by_ratio(ratio)])
    return outcome


def row_of(setup: Setup, pair: Pair, recorded: trace.Trace, times: tuple[float, float], plain: Any) -> dict[str, Any]:
    """Measure a method; `times`: seconds of a target pass and a draft step; `plain`: plain decoding's row, if any."""
    if setup.lengths:
        best = predict(recorded, setup, times[0] / times[1]).draft_length
        setup = replace(setup, options={**setup.options, "draft_length": best}, lengths=())
    result = measure(setup, pair, *times)
    plain = plain or {"seconds_per_token": result.seconds, "round_s": result.round}
    predicted = predict(recorded, setup, plain["round_s"] / result.step)
    return {
        "speedup": round(plain["seconds_per_token"] / result.seconds, 3),
        "predicted": round(predicted.speedup, 3),
        "tokens_per_pass": round(result.length, 3),
        "predicted_tokens_per_pass": round(predicted.figures.mean_accepted_length, 3),
        "draft_length": setup.options.get("draft_length"),
        "seconds_per_token": result.seconds,
        "round_s": result.round,
        "step_ms": round(result.step * 1e3, 2),
        "equal": all(text == expected for text, expected in zip(result.texts, pair.texts, strict=False)),
    }


def main() -> int:
    """Run the command."""
    options: dict[str, Any] = {"trace": ..., "ratio": "7", "pass_ms": 70.0, "answers": int, "nodes": 32, "width": 16}
    options |= {"methods": "speculative-tree,auto,pearl,ssd,card,planned", "out": Path, "target": str, "draft": str}
    args = parse(__doc__, **options, tasks=str, prompts=3, tokens=64)
    os.sched_setaffinity(0, {TARGET_CORE})
    pair = real_pair(args) if args.draft else replayed_pair(args.trace, args.answers)
    recorded = limit_trace(trace.load(args.trace), args.answers)
    known = read_rows(args.out)
    chosen = select_setups(SetupSizes(args.nodes, args.width), args.methods.split(","))
    sizes = {"trace": args.trace.name, "real": bool(args.draft), "answers": len(pair.requests)}
    sizes |= {name: getattr(args, name) for name in ("pass_ms", "nodes", "width")}
    rows: list[dict[str, Any]] = []
    for ratio in numbers(args.ratio):
        plain, times = None, (args.pass_ms / 1e3, args.pass_ms / 1e3 / ratio)
        for setup in chosen:
            key = sizes | {"ratio": ratio, "method": setup.name}
            row = next((row for row in known if key.items() <= row.items()), None)
            if row is None:
                row = append_row(args.out, key | row_of(setup, pair, recorded, times, plain))
            plain = plain or row
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    shown = [name for name in rows[0] if name not in sizes]
    show(rows, f"passes of {args.pass_ms:g} ms, {len(pair.requests)} answers, over plain decoding", shown)
    return finish({"rows": rows}, not all(row["equal"] for row in rows))


if __name__ == "__main__":
    run(main)
