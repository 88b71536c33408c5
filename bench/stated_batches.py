"""Compare `auto` with every fixed setting for 1, 8 and 32 requests at once, on a clock with an H100's pass times.

Run: python bench/stated_batches.py --trace GOOD.trace,SHIPPED.trace [--requests 1,8,32] [--targets 8B] [--answers 4]
`outpace bench --trace` records traces; exchanging the rows of the first makes a third pair, whose draft is useless. The
engine and the planner are real, the models are replayed, prompts and host work take no time. A queue keeps the batch
full; the rate is that of all tokens until the queue is empty. The planner starts without a profile. The fixed settings
are plain decoding and sequential drafting of chains and trees of several lengths. The last line is JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import numpy as np
from common import finish, parse, refuse, run, show
from rich.console import Console
from rich.progress import track

from outpace.card.inline import ClockedDrafter, SimulatedClock
from outpace.card.worker import ObservedModel
from outpace.core import registry
from outpace.core.drafting import BuildContext
from outpace.core.types import Request
from outpace.drafters import build_drafter
from outpace.engine.engine import Engine, EngineOptions
from outpace.models.base import Part
from outpace.simulate.models import IndexedTrace, RecordedGreedy, ReplayDraft, ReplayTarget, index_trace
from outpace.simulate.setups import PassCosts, measured
from outpace.simulate.trace import Trace, load

# Milliseconds by rows. Measured on an H100: 1 and 32 rows of the 8B, 1 row of the 32B, a step that expands one node.
TARGETS = {
    "8B": "1:6.6,8:6.8,32:7.8,64:9,128:12,256:19,512:34",
    "32B": "1:25.5,8:26,32:29,64:33,128:44,256:72,512:130",
}
DRAFTS = {"GPU": "1:0.6,16:0.65,64:0.8,256:1.6", "CPU": "1:0.3,4:0.35,16:0.6,64:1.6,256:5.6"}
LENGTHS = {1: (1, 2, 3, 4, 6, 8), 4: (2, 4, 6)}  # by width
NODES, ROWS = 16, 1024


class ClockedTarget(ObservedModel):
    """A target whose passes move the clock by their verified rows; rows of prompts take no time."""

    def _reported(self, forest: Sequence[Part], output: Any) -> Any:
        if rows := sum(len(part.logit_rows) for part in forest):
            self._report(rows)
        return output


def useless(trace: Trace) -> Trace:
    """Return the trace with a draft model that is as confident as before, but about another place of the text."""
    shifted = [replace(one, draft_tokens=np.roll(one.draft_tokens, 7, axis=0)) for one in trace.answers]
    return replace(trace, answers=tuple(shifted))


def measure(indexed: IndexedTrace, costs: PassCosts, requests: int, answers: int, method: str, **options: int) -> float:
    """Return tokens per millisecond with `requests` concurrent requests and `answers` queued answers for each."""
    draft, decoder = ReplayDraft(indexed, costs.draft), registry.find("decoders", method)
    clock = SimulatedClock(draft.seconds, costs.target)
    values: Mapping[str, int] = {"tree_nodes": 64, **options}
    target = ClockedTarget(ReplayTarget(indexed), clock.run_target)
    drafter = ClockedDrafter(build_drafter("model", BuildContext(draft), values), clock) if decoder.drafting else None
    limits = EngineOptions(NODES, ROWS, chunk=1 << 16, batch=requests, reuse=False)
    with Engine(target, drafter, options=limits, clock=lambda: clock.now) as engine:
        for answer in islice(cycle(indexed.answers), requests * (answers + 1)):
            request = Request(answer.prompt, RecordedGreedy(), len(answer.tokens))
            engine.submit(request, decoder, registry.build_options(decoder, dict(options)))
        runs = list(engine.waiting)
        while engine.waiting:
            engine.step()
        return sum(len(run.tokens) for run in runs) / clock.now


def compare(indexed: IndexedTrace, costs: PassCosts, requests: int, answers: int) -> dict[str, Any]:
    """Return the best fixed setting and the speedups of it and of `auto` over plain decoding."""
    plain = measure(indexed, costs, requests, answers, "autoregressive")
    best, fixed = "plain", 1.0
    for width, lengths in LENGTHS.items():
        last = 0.0
        for length in lengths:
            rate = measure(indexed, costs, requests, answers, "speculative", width=width, draft_length=length)
            if rate / plain > fixed:
                best, fixed = f"{'tree' if width > 1 else 'chain'} of {length}", rate / plain
            if rate < 0.97 * last:
                break  # longer drafts only get worse
            last = rate
    auto = measure(indexed, costs, requests, answers, "auto", width=max(LENGTHS)) / plain
    return {"best": best, "fixed": round(fixed, 3), "auto": round(auto, 3)}


def main() -> int:
    """Run the command."""
    args = parse(__doc__, trace=str, requests="1,8,32", targets="8B,32B", answers=4)
    counts, targets = [int(count) for count in args.requests.split(",")], args.targets.split(",")
    if args.answers < 1:
        refuse(f"--answers is {args.answers}, it must be at least 1")
    if min(counts) < 1:
        refuse(f"--requests is {args.requests!r}, its numbers must be at least 1")
    if not TARGETS.keys() >= {*targets}:
        refuse(f"--targets is {args.targets!r}, it must name some of {', '.join(TARGETS)}")
    traces = {Path(file).stem: load(Path(file)) for file in args.trace.split(",")}
    traces["useless"] = useless(next(iter(traces.values())))
    rows = []
    for cell in track([*product(traces, targets, DRAFTS, counts)], console=Console(stderr=True)):
        name, target, device, requests = cell
        costs = measured(TARGETS[target], DRAFTS[device])
        row = compare(index_trace(traces[name]), costs, requests, args.answers)
        cells = {"draft": name, "target": target, "draft_on": device, "requests": requests}
        rows.append(cells | row | {"auto over best": row["auto"] / row["fixed"]})
    show(rows)
    return finish({"rows": rows}, False)


if __name__ == "__main__":
    run(main)
