"""Measure drafting between two machines on a wire of a given delay and rate, next to the simulator's speed.

Run: python bench/across_machines.py [--delays 0,5,20,100] [--rate 1] [--pass-ms 100] [--step-ms 10] [--answers 4]
     [--tokens 48] [--runs 3] [--layouts worker,client] [--out FILE.jsonl]
Both sides run here, each in a network namespace of its own (see wire.py). `worker`: the target dials a draft worker;
`client`: a client drafts for a server. The models are the shipped pair; a pass of the target lasts --pass-ms, a forward
of the draft --step-ms, so that other programs on the machine hardly matter. --delays are milliseconds one way; --rate
adds a row with this many MB/s at 5 ms. A row has medians of the runs: speedup over plain decoding, the simulator's
speedup for the measured times, and bytes on the wire per token, up to the target's machine and down from it, headers
included. The exit status is 1 if a text differs from plain decoding's. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from common import append_row, finish, numbers, parse, run, show
from slowed_model import SlowedModel
from wire import ADDRESSES, Side, Wire, join, lines, why_not

import outpace
from outpace.bench.tasks import BUILT_IN, collect
from outpace.card.link import Address
from outpace.card.remote import RemoteWorker
from outpace.card.wire import Identity, identity_of
from outpace.cluster.draft_model import build_card_drafter, load_own_draft
from outpace.cluster.draft_server import DraftServer
from outpace.cluster.remote_target import RemoteTarget
from outpace.core.arrays import set_num_threads
from outpace.core.types import Request
from outpace.decoders.autoregressive import Autoregressive
from outpace.decoders.card import Card
from outpace.engine.engine import Engine, EngineOptions
from outpace.models.load import load_draft, load_model
from outpace.models.options import LoadOptions
from outpace.models.runtimes import Loaded
from outpace.rules.greedy import Greedy
from outpace.server.app import build_app
from outpace.server.options import ServerOptions
from outpace.server.run import listen, make_server
from outpace.server.service import Service
from outpace.simulate import trace
from outpace.simulate.run import simulate
from outpace.simulate.setups import SetupSizes, by_ratio, select_setups

TARGET, DRAFT = ADDRESSES[:2]
DRAFT_PORT, CLIENT_PORT = 8100, 8001
NODES, WIDTH = 32, 16
Say = Callable[[dict[str, Any]], None]  # answers the parent
RATE_DELAY = 5.0  # milliseconds, of the row with a limited rate


def paced_target(seconds: float) -> Loaded:
    """Load the shipped target, with passes of at least `seconds`."""
    target = load_model(None)
    return replace(target, model=SlowedModel(target.model, seconds))  # type: ignore[arg-type]


def paced_draft(seconds: float) -> tuple[Any, Loaded, Identity]:
    """Return the drafter of the shipped draft, with forwards of at least `seconds`; the draft; and its identity."""
    draft = load_own_draft(None, LoadOptions(is_draft=True))
    own = identity_of(draft)
    draft.model.vocab_size = own.num_tokens
    slowed = replace(draft, model=SlowedModel(draft.model, seconds))  # type: ignore[arg-type]
    return build_card_drafter("model", slowed, {"width": WIDTH, "tree_nodes": 2048}), draft, own


def target_side(args: argparse.Namespace, answers: trace.Trace, say: Say) -> None:
    """Serve drafting clients, and answer the prompts through a draft worker whenever a line asks for it."""
    target = paced_target(args.pass_ms / 1e3)
    own = identity_of(target)

    def answer(engine: Engine, decoder: Any) -> dict[str, Any]:
        steps, texts = [], []
        for one in answers.answers:
            run = engine.submit(Request(one.prompt, Greedy(), len(one.tokens)), decoder, decoder.Options())
            while run.finish_reason is None:
                engine.step()
            if run.error is not None:
                raise run.error
            steps += run.history.steps[1:]  # the first round includes the prefill
            texts.append(run.tokens)
        seconds, tokens = sum(one.seconds for one in steps), sum(one.emitted for one in steps)
        return {"seconds_per_token": seconds / tokens, "tokens_per_pass": tokens / len(steps), "texts": texts}

    for line in lines():
        options = EngineOptions(nodes=NODES, reuse=False)
        if line == "plain":
            with Engine(target.model, options=options) as engine:
                say(answer(engine, Autoregressive))
        elif line == "worker":
            worker = RemoteWorker(Address(DRAFT, DRAFT_PORT, False), own, pauses=(0.2,)).start()
            with Engine(target.model, worker=worker, options=options) as engine:
                while not (worker.is_ready and worker.round_trip_seconds):
                    time.sleep(0.05)
                found = answer(engine, Card)
                say(found | {"step_seconds": worker.step_seconds, "link_seconds": worker.round_trip_seconds})
        elif line == "serve":
            with outpace.LLM(target, "none", method="autoregressive", nodes=NODES, reuse=False) as llm:
                serve(llm, say)


def serve(llm: outpace.LLM, say: Say) -> None:
    """Serve drafting clients until the next line."""
    options = ServerOptions(host=TARGET, port=0, insecure=True, draft_port=CLIENT_PORT)
    service = Service(llm, options)
    server = make_server(build_app(service), service)
    with listen(options) as listener:
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.02)
        say({"port": service.draft_port})
        next(lines(), None)
        server.handle_exit(15, None)
        thread.join()
    say({})


def draft_side(args: argparse.Namespace, answers: trace.Trace, say: Say) -> None:
    """Serve a drafter, and let a client answer the prompts whenever a line asks for it."""
    for line in lines():
        drafter, draft, own = paced_draft(args.step_ms / 1e3)
        if line == "serve":
            with DraftServer(drafter, own) as server:
                say({"port": server.listen(DRAFT, DRAFT_PORT)})
                next(lines(), None)
            say({})
        elif line == "client":
            seconds, tokens, texts, passes = 0.0, 0, [], 0
            with RemoteTarget(Address(TARGET, CLIENT_PORT, False), draft, drafter) as target:
                for one in answers.answers:
                    stream = target.stream(list(one.prompt), max_tokens=len(one.tokens), ignore_eos=True)
                    result = stream.finish()
                    later = len(result.tokens) - result.rounds[0].emitted
                    seconds, tokens = seconds + later / result.tokens_per_second, tokens + later
                    passes += len(result.rounds) - 1
                    texts.append(list(result.tokens))
            say({"seconds_per_token": seconds / tokens, "tokens_per_pass": tokens / passes, "texts": texts})


def record(path: Path, args: argparse.Namespace) -> trace.Trace:
    """Record the shipped pair's answers to built-in prompts, of exactly --tokens each."""
    target = load_model(None)
    draft = load_draft("auto", target)
    assert draft is not None
    prompts = [target.tokenizer.encode_prompt(one.text) for one in collect([BUILT_IN], args.answers)]
    recorded = trace.record(target, draft, prompts, trace.RecordOptions(max_tokens=args.tokens))
    whole = [one for one in recorded.answers if len(one.tokens) == args.tokens][: args.answers]
    recorded = replace(recorded, answers=whole)
    recorded.save(path)
    return recorded


def measure(layout: str, sides: tuple[Side, Side], wire: Wire, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one layout at the wire's delay and rate; return medians of the runs."""
    target, draft = sides
    server, asked = (draft, target) if layout == "worker" else (target, draft)
    runs = []
    for _ in range(args.runs):
        server.ask("serve")
        before = tuple(wire.num_bytes)
        found = asked.ask(layout)
        count = sum(map(len, found["texts"]))
        down, up = ((now - then) / count for now, then in zip(wire.num_bytes, before, strict=True))
        runs.append(found | {"up": up, "down": down})
        server.ask("stop")
    texts = [one.pop("texts") for one in runs]
    return {name: median(one[name] for one in runs) for name in runs[0]} | {
        "spread": max(one["seconds_per_token"] for one in runs) / min(one["seconds_per_token"] for one in runs),
        "texts": texts,
    }


def predict(recorded: trace.Trace, pass_seconds: float, step_seconds: float, delay: float) -> float:
    """Return CARD's simulated speedup over plain decoding."""
    setups = select_setups(SetupSizes(NODES, WIDTH), ["card"])
    *_, outcome = simulate(recorded, setups, [by_ratio(pass_seconds / step_seconds)], delays=[delay / pass_seconds])
    return float(outcome.speedup)


def main() -> int:
    """Run the command."""
    options: dict[str, Any] = {"delays": "0,5,20,100", "rate": 1.0, "pass_ms": 100.0, "step_ms": 10.0, "answers": 4}
    options |= {"tokens": 48, "runs": 3, "layouts": "worker,client", "out": Path, "trace": Path}
    args = parse(__doc__, **options, side=str, address=str, socket=int)
    if args.side:
        say = join(args)
        set_num_threads(1)
        (target_side if args.side == "target" else draft_side)(args, trace.load(args.trace), say)
        return 0
    if reason := why_not():
        raise SystemExit(f"{reason}; nothing was measured")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = args.trace or Path(folder, "pair.trace")
        recorded = trace.load(path) if path.exists() else record(path, args)
        arguments = ["--trace", str(path), "--pass-ms", str(args.pass_ms), "--step-ms", str(args.step_ms)]
        sides = Side("target", arguments, TARGET), Side("draft", arguments, DRAFT)
        for side in sides:
            stack.callback(side.close)
        wire = stack.enter_context(Wire([side.device for side in sides]))
        plain = sides[0].ask("plain")
        texts = [list(one.tokens) for one in recorded.answers]
        rows, equal = [], plain["texts"] == texts
        ways = [(delay, math.inf) for delay in numbers(args.delays)]
        ways += [(RATE_DELAY, args.rate * 1e6)] if args.rate else []
        for delay, rate in ways:
            wire.delay, wire.rate = delay / 1e3, rate
            for layout in args.layouts.split(","):
                found = measure(layout, sides, wire, args)
                equal &= all(one == texts for one in found.pop("texts"))
                step = found.get("step_seconds", args.step_ms / 1e3)
                row = {"layout": layout, "delay_ms": delay, "mb_per_s": None if math.isinf(rate) else args.rate}
                row |= {"speedup": plain["seconds_per_token"] / found["seconds_per_token"]}
                row |= {"simulated": predict(recorded, plain["seconds_per_token"], step, wire.delay)}
                row |= found | {"pass_seconds": plain["seconds_per_token"]}
                rows.append(append_row(args.out, row))
                print(json.dumps(row), file=sys.stderr, flush=True)
    show(rows, f"{len(texts)} answers, passes of {args.pass_ms:g} ms, forwards of {args.step_ms:g} ms")
    return finish({"rows": rows, "equal": equal}, not equal)


if __name__ == "__main__":
    run(main)
