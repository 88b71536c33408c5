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
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from slowed_model import SlowedModel
from wire import ADDRESSES, Wire, enter, why_not

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


def target_side(args: argparse.Namespace, answers: trace.Trace) -> None:
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

    for line in commands():
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
                serve(llm)


def serve(llm: outpace.LLM) -> None:
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
        next(commands(), None)
        server.handle_exit(15, None)
        thread.join()
    say({})


def draft_side(args: argparse.Namespace, answers: trace.Trace) -> None:
    """Serve a drafter, and let a client answer the prompts whenever a line asks for it."""
    for line in commands():
        drafter, draft, own = paced_draft(args.step_ms / 1e3)
        if line == "serve":
            with DraftServer(drafter, own) as server:
                say({"port": server.listen(DRAFT, DRAFT_PORT)})
                next(commands(), None)
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


def commands() -> Any:
    """Yield the lines that the parent sends."""
    while line := sys.stdin.readline().strip():
        yield line


def say(value: dict[str, Any]) -> None:
    """Send the parent a line."""
    REPLIES.write(json.dumps(value) + "\n")
    REPLIES.flush()


REPLIES = sys.stdout


class Side:
    """A process in a namespace of its own."""

    def __init__(self, name: str, arguments: list[str]) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, __file__, "--side", name, "--socket", str(theirs.fileno()), *arguments]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[theirs.fileno()]
        )
        theirs.close()
        [self.device] = socket.recv_fds(ours, 1, 1)[1]
        ours.close()

    def ask(self, line: str) -> dict[str, Any]:
        """Send a line; return the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"a side ended at {line!r}")
        found: dict[str, Any] = json.loads(answer)
        return found

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()


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


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delays", default="0,5,20,100")
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--pass-ms", type=float, default=100.0)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--answers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--layouts", default="worker,client")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--side", choices=("target", "draft"), help=argparse.SUPPRESS)
    parser.add_argument("--socket", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        run_side(args)
        return
    if reason := why_not():
        raise SystemExit(f"{reason}; nothing was measured")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = args.trace or Path(folder, "pair.trace")
        recorded = trace.load(path) if path.exists() else record(path, args)
        arguments = ["--trace", str(path), "--pass-ms", str(args.pass_ms), "--step-ms", str(args.step_ms)]
        sides = Side("target", arguments), Side("draft", arguments)
        for side in sides:
            stack.callback(side.close)
        wire = stack.enter_context(Wire([side.device for side in sides]))
        plain = sides[0].ask("plain")
        texts = [list(one.tokens) for one in recorded.answers]
        rows, equal = [], plain["texts"] == texts
        ways = [(float(delay), math.inf) for delay in args.delays.split(",")]
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
                rows.append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
                if args.out is not None:
                    with args.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
    table = Table(title=f"{len(texts)} answers, passes of {args.pass_ms:g} ms, forwards of {args.step_ms:g} ms")
    for column in rows[0]:
        table.add_column(column)
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=180).print(table)
    print(json.dumps({"rows": rows, "equal": equal}))
    sys.exit(0 if equal else 1)


def run_side(args: argparse.Namespace) -> None:
    """Run one side's process."""
    global REPLIES  # the server's log goes to stdout
    side = ("target", "draft").index(args.side)
    with socket.socket(fileno=args.socket) as parent:
        socket.send_fds(parent, [b"device"], [enter(ADDRESSES[side])])
    REPLIES = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    set_num_threads(1)
    (target_side, draft_side)[side](args, trace.load(args.trace))


if __name__ == "__main__":
    main()
