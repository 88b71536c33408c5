"""`auto` over answers that are kept, on a stated clock: what the planner and its drafters would give, without noise.

Run: python bench/replay_auto.py --answers FILE.jsonl [--draft D] [--drafters model+prediction+ngram,...]
     [--tasks edit,refactor] [--tokens 160] [--pass-times 1:9.85,4:11.3,...] [--step 1.5] [--host 0.5] [--json FILE]
FILE is what bench/tokens_a_pass.py --answers wrote. The real engine runs one request after the other, each knowing
nothing of those before it but what its drafters kept; a target stands in that says what the answer says, in
--pass-times (ms; straight lines between, and on behind the last). The draft model is the real one and takes --step; the
host takes --host between two rounds, where no planner sees it, and for copies what COPIES says. Time counts from the
first token on. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from torch import Tensor, device

from outpace.api.llm import PLANNED_NODES
from outpace.core import registry
from outpace.core.drafting import BuildContext
from outpace.core.logits import SparseLogits, tensor_of
from outpace.core.tree import TokenTree
from outpace.core.types import Drafter, Observation, Request
from outpace.drafters._composite import SharedTree
from outpace.engine.build import build_drafter
from outpace.engine.engine import Engine, EngineOptions
from outpace.models.base import Model, Part
from outpace.models.load import load_draft, load_model
from outpace.models.toy import ToySession
from outpace.rules.greedy import Greedy
from outpace.simulate.costs import Cost, parse_curve

AVX2 = "1:9.85,3:9.95,4:11.3,6:13.5,8:15.8,12:23.5,16:30.0,32:57.4,64:111.7"
COPIES = 0.15  # ms of the host a round for each drafter without a model
ALL = "all"


@dataclass
class Clock:
    """Seconds that are stated."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Recorded(Model):
    """A target that writes one kept answer, whatever is asked of it; its passes take their stated time."""

    max_positions = 1 << 20
    exact = True
    token_bytes = 8
    device = device("cpu")

    def __init__(self, vocab_size: int, weight_bytes: int | None, seconds: Cost, clock: Clock) -> None:
        self.vocab_size, self._weight_bytes, self.seconds, self._clock = vocab_size, weight_bytes, seconds, clock
        self.text: Sequence[int] = ()  # prompt and answer

    @property
    def weight_bytes(self) -> int | None:
        return self._weight_bytes

    def open(self, capacity: int, room: int) -> ToySession:
        return ToySession(capacity, room)

    def score(self, forest: Sequence[Part]) -> Tensor:
        self._clock.now += self.seconds(sum(len(part.tokens) for part in forest)) / 1000
        said: list[int] = []
        for part in forest:
            session = part.session
            if part.keep is not None:
                session.keep(part.keep)
            before = session.pending
            session.extend(part.parents)
            depths = session.pending_depths[before:]
            said += [self._after(session.length + depths[node]) for node in part.wanted]
        rows = np.zeros((len(said), self.vocab_size), np.float32)
        rows[np.arange(len(said)), said] = 1.0
        return tensor_of(rows)

    def _after(self, position: int) -> int:
        """What stands behind this position: on another path too, where nobody comes to."""
        return self.text[position + 1] if position + 1 < len(self.text) else 0


class Stepping:
    """A draft model whose forwards take a stated time, and more for a text that it reads."""

    def __init__(self, model: Any, milliseconds: float, clock: Clock) -> None:
        self._model, self._milliseconds, self._clock = model, milliseconds, clock
        self.forwards = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def score_held(self, forest: Sequence[Part]) -> SparseLogits:
        rows = sum(len(part.tokens) for part in forest)
        self._clock.now += self._milliseconds * (1 + max(0, rows - 4) / 16) / 1000
        self.forwards += 1
        return self._model.score_held(forest)


class Slow(Drafter):
    """A drafter without a model that takes a stated time of the host."""

    runs_model = False

    def __init__(self, inner: Drafter, clock: Clock) -> None:
        self.inner, self._clock, self.name, self.is_fitted = inner, clock, inner.name, inner.is_fitted

    def open(self, request: Request) -> Any:
        return self.inner.open(request)

    def grow(self, states: Sequence[Any], trees: Sequence[TokenTree]) -> list[int]:
        self._clock.now += COPIES / 1000
        return self.inner.grow(states, trees)

    def observe(self, state: Any, seen: Observation) -> None:
        self.inner.observe(state, seen)

    def close(self, state: Any) -> None:
        self.inner.close(state)


@dataclass
class Stand:
    """The parts that all replays share; `host`: milliseconds a round."""

    clock: Clock
    target: Recorded
    draft: Stepping
    host: float

    def engine(self, names: str) -> Engine:
        """One that knows nothing, on the stated clock, with drafters joined by +."""
        parts = []
        for name in names.split("+"):
            part = build_drafter(name, BuildContext(self.draft, self.target), {})
            parts.append(part if part.runs_model else Slow(part, self.clock))
        parts.sort(key=lambda part: part.runs_model)
        options = EngineOptions(nodes=PLANNED_NODES, reuse=False, batch=1)
        return Engine(self.target, SharedTree(parts), options=options, clock=self.clock)


def answer(stand: Stand, engine: Engine, one: dict[str, Any], tokens: int) -> dict[str, float]:
    """One kept answer written again: what it took beyond its first round."""
    text = [*one["prompt"], *one["tokens"][:tokens]]
    stand.target.text = text
    decoder = registry.find("decoders", "auto")
    request = Request(tuple(one["prompt"]), Greedy(), len(text) - len(one["prompt"]))
    run = engine.submit(request, decoder, decoder.Options())
    before = stand.draft.forwards
    while run.finish_reason is None:
        stand.clock.now += stand.host / 1000
        engine.step()
    if list(run.committed) != text:
        raise RuntimeError(f"{one['task']}: another text than was kept, {run.error or 'without an error'}")
    steps = run.history.steps
    later = steps[1:]
    plain = sum(step.emitted for step in later) * (stand.target.seconds(1) + stand.host) / 1000
    return {
        "plain": plain,
        "seconds": stand.clock.now - run.history.first_token,
        "tokens": sum(step.emitted for step in later),
        "passes": len(later),
        "rows": sum(step.verified_rows for step in later),
        "draft": sum(step.draft_seconds for step in later),
        "forwards": stand.draft.forwards - before,
    }


def replay(stand: Stand, drafter: str, kept: Sequence[dict[str, Any]], tokens: int) -> dict[str, dict[str, float]]:
    """All answers by one drafter: sums by task."""
    engine = stand.engine(drafter)
    sums: dict[str, dict[str, float]] = {}
    for one in kept:
        found = answer(stand, engine, one, tokens)
        for task in (one["task"], ALL):
            into = sums.setdefault(task, dict.fromkeys(found, 0.0))
            for name, value in found.items():
                into[name] += value
    engine.close()
    return sums


def read(file: Path, tasks: Sequence[str] | None, each: int) -> list[dict[str, Any]]:
    """The first answers of these tasks, or of all."""
    counts: Counter[str] = Counter()
    kept = []
    for line in file.read_text().splitlines():
        one = json.loads(line)
        counts[one["task"]] += 1
        if counts[one["task"]] <= each and (tasks is None or one["task"] in tasks):
            kept.append(one)
    return kept


def show(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    """Times plain decoding's speed by task, and what it comes from."""
    table = Table("drafter", *next(iter(found.values())), box=None)
    for name, sums in found.items():
        table.add_row(name, *(f"{s['plain'] / s['seconds']:.2f}" for s in sums.values()))
        table.add_row("  tokens a pass", *(f"{s['tokens'] / s['passes']:.2f}" for s in sums.values()))
        table.add_row("  rows a pass", *(f"{s['rows'] / s['passes']:.1f}" for s in sums.values()))
        table.add_row("  drafting, of all", *(f"{s['draft'] / s['seconds']:.2f}" for s in sums.values()))
        table.add_row("  forwards a pass", *(f"{s['forwards'] / s['passes']:.2f}" for s in sums.values()))
    Console(width=220).print(table)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--drafters", default="model+prediction+ngram,model+prediction+suffix")
    parser.add_argument("--tasks")
    parser.add_argument("--each", type=int, default=10, help="answers of a task")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--pass-times", default=AVX2)
    parser.add_argument("--step", type=float, default=1.5)
    parser.add_argument("--host", type=float, default=0.5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    kept = read(args.answers, args.tasks.split(",") if args.tasks else None, args.each)
    target, clock = load_model(None), Clock()
    draft = load_draft(args.draft, target)
    model = target.model
    recorded = Recorded(model.vocab_size, model.weight_bytes, parse_curve("pass-times", args.pass_times), clock)
    stand = Stand(clock, recorded, Stepping(draft.model, args.step, clock), args.host)
    found = {name: replay(stand, name, kept, args.tokens) for name in args.drafters.split(",")}
    show(found)
    if args.json:
        args.json.write_text(json.dumps(found))
    speeds = {name: {task: s["plain"] / s["seconds"] for task, s in sums.items()} for name, sums in found.items()}
    print(json.dumps(speeds))


if __name__ == "__main__":
    main()
