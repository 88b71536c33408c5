"""Where a round's time goes: each part's own microseconds, by method and temperature, beside what memory allows, and
how many different Python functions a round runs: behind a pass the code itself is cold, and each costs a microsecond.

Run: python bench/round_profile.py --draft FOLDER [--tokens 96] [--threads 2] [--bandwidth 35] [--quantile 0.5].
Target and draft by the native runtime. Every part is wrapped from here; nested parts are taken out of those around
them. Rounds are asked for step by step; bench/whole_rounds.py compares that with what `auto` does, rounds that the
kernels carry out in one call. A part's figure is the `--quantile` over all rounds: the median, or a lower one where the
machine is shared.
CARD's drafter works in a thread of its own: its turns have a table of their own. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import wraps
from statistics import median
from types import CodeType
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from outpace.api.llm import LLM
from outpace.api.text import TextAssembler
from outpace.card.cache import CandidateCache
from outpace.card.loop import DraftLoop
from outpace.card.thread import ThreadWorker
from outpace.core.tree import TokenTree
from outpace.drafters import model as model_drafter
from outpace.drafters.ngram import NgramDrafter
from outpace.engine import engine, target_runner
from outpace.engine.native_rounds import Carriers
from outpace.engine.sequence import Running
from outpace.models.load import Loaded, load_draft, load_model
from outpace.rules import greedy, gumbel

PROMPTS = (
    "Explain in three sentences why the sky is blue.",
    "Write a short Python function that adds two numbers, and say what each line does.",
    "A train travels 60 miles in 1.5 hours. What is its average speed? Think step by step.",
)
SAMPLINGS: dict[str, dict[str, Any]] = {"0": {}, "0.8": {"temperature": 0.8, "seed": 3}}
SPECULATIVE = {"method": "speculative", "draft_length": 4}
CARD = {"method": "card", "worker": "thread"}
METHODS: dict[str, dict[str, Any]] = {
    "plain": {"method": "autoregressive"},
    "ngram": {**SPECULATIVE, "drafter": "ngram"},
    "chain": {**SPECULATIVE, "drafter": "model", "width": 1},
    "tree": {**SPECULATIVE, "drafter": "model", "width": 4},
    "tree+ngram": {**SPECULATIVE, "drafter": "model+ngram", "width": 4},
    "auto": {"method": "auto", "profile": False},
    "card": {**CARD, "drafter": "model"},
    "card+ngram": {**CARD, "drafter": "model+ngram"},
}
Spent = dict[str, float]


class Clock:
    """Each thread's own time by part, in seconds; a part's time is without that of the parts inside it."""

    def __init__(self) -> None:
        self._local = threading.local()
        self.laps: dict[str, list[Spent]] = defaultdict(list)  # by the name of what is one lap

    def _open(self) -> list[float]:
        """Seconds spent inside the parts that this thread is in, the innermost last."""
        if not hasattr(self._local, "inside"):
            self._local.inside, self._local.spent = [], defaultdict(float)
        inside: list[float] = self._local.inside
        return inside

    def timed(self, name: str, call: Callable[..., Any], is_lap: bool = False) -> Callable[..., Any]:
        """The same function, with its own time noted. A lap ends what its thread counted so far."""

        @wraps(call)  # with what it is marked by
        def wrapped(*args: Any, **options: Any) -> Any:
            inside = self._open()
            inside.append(0.0)
            start = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                whole = time.perf_counter() - start
                self._local.spent[name] += whole - inside.pop()
                if inside:
                    inside[-1] += whole
                if is_lap:
                    self.laps[name].append(dict(self._local.spent))
                    self._local.spent.clear()

        return wrapped


class Watched:
    """A native model whose passes are timed; all else is its own."""

    def __init__(self, clock: Clock, name: str, inner: Any) -> None:
        self._inner, self.outputs = inner, inner.outputs
        self.forward, self.score = clock.timed(name, inner.forward), clock.timed(name, inner.score)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def seams(target: Any, draft: Any) -> Iterator[tuple[Any, str, str]]:
    """(where, attribute, the part's name) of all that is timed; what no part claims is "the rest"."""
    yield target, "score", "target: around the call"
    yield draft, "score", "draft: around the call"
    yield draft, "score_held", "draft: around the call"
    for rule in (greedy.Greedy, gumbel.Gumbel):
        yield rule, "walk", "walk"
        yield rule, "reduce", "reduce"
    yield model_drafter.ModelDrafter, "_offers", "rank"
    yield target_runner.Passes, "run", "parts, rows"
    yield Running, "commit", "commit, record"
    yield Running, "note_step", "commit, record"
    yield TextAssembler, "_say", "text"
    for drafter in (model_drafter.ModelDrafter, NgramDrafter):
        yield drafter, "grow", "grow"
        yield drafter, "observe", "observe"
    yield engine.Drafting, "follow", "observe"
    yield TokenTree, "copy", "tree copy"
    for name in ("query", "late", "correct", "insert"):
        yield CandidateCache, name, "cache"
    yield ThreadWorker, "wait", "wait for a draft"


@contextmanager
def watching(clock: Clock, target: Any, draft: Any) -> Iterator[None]:
    """Times all parts within the block."""
    kept: list[tuple[Any, str, Any, bool]] = []

    def put(where: Any, name: str, value: Any) -> None:
        kept.append((where, name, getattr(where, name), name in vars(where)))
        setattr(where, name, value)

    for model, name in ((target, "target"), (draft, "draft")):
        put(model, "team", lambda team=model.team, part=f"{name}: native call": Watched(clock, part, team()))
    for where, name, part in seams(target, draft):
        put(where, name, clock.timed(part, getattr(where, name)))
    put(Carriers, "may_carry", lambda *_: None)
    put(engine.Engine, "step", clock.timed("the rest", engine.Engine.step, is_lap=True))
    put(DraftLoop, "grow", clock.timed("turn's rest", DraftLoop.grow, is_lap=True))
    try:
        yield
    finally:
        for where, name, value, was_own in reversed(kept):
            setattr(where, name, value) if was_own else delattr(where, name)


def typical(laps: Sequence[Spent], quantile: float) -> Spent:
    """Microseconds by part: each part's own quantile over the laps."""
    names = {name for lap in laps for name in lap}
    return {name: 1e6 * np.quantile([lap.get(name, 0.0) for lap in laps], quantile, method="lower") for name in names}


def different_functions(llm: LLM, chat: Any, tokens: int) -> int:
    """How many different Python functions a round runs in the caller's thread, list comprehensions and the like among
    them: the median."""
    rounds: list[set[CodeType]] = []

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code is engine.Engine.step.__code__:
            rounds.append(set())
        if event == "call" and rounds:
            rounds[-1].add(frame.f_code)

    sys.setprofile(note)
    try:
        llm.chat(chat, max_tokens=tokens)
    finally:
        sys.setprofile(None)
    return int(median(map(len, rounds[2:])))  # the first ones read the prompt


def measure(target: Loaded, draft: Loaded, method: str, temperature: str, args: argparse.Namespace) -> dict[str, Any]:
    """One method's answers to all prompts: parts of a round, tokens a round, parts of a turn of CARD's drafter."""
    options = METHODS[method]
    with closing(LLM(target, None if method in ("plain", "ngram") else draft, reuse=False, **options)) as llm:
        chats = [[{"role": "user", "content": text}] for text in PROMPTS]
        llm.chat(chats[0], max_tokens=8)
        functions = different_functions(llm, chats[0], args.tokens)
        clock = Clock()
        emitted = rounds = 0
        with watching(clock, target.model, draft.model):
            for chat in chats:
                seen = len(clock.laps["the rest"])
                figures = llm.chat(chat, max_tokens=args.tokens, **SAMPLINGS[temperature]).figures
                emitted, rounds = emitted + figures.emitted, rounds + figures.passes
                del clock.laps["the rest"][seen : len(clock.laps["the rest"]) - figures.passes + 1]  # the prompt's pass
    turns = [lap for lap in clock.laps.get("turn's rest", []) if "draft: native call" in lap]
    row = {"method": method, "temperature": temperature, "tokens_a_round": emitted / rounds, "functions": functions}
    return row | {
        name: typical(laps, args.quantile) for name, laps in (("round", clock.laps["the rest"]), ("turn", turns))
    }


def floors(target: Any, draft: Any, bandwidth: float) -> dict[str, float]:
    """Microseconds that the weights of a pass take to read at `bandwidth` GB/s."""
    return {name: model.weight_bytes / bandwidth / 1e3 for name, model in (("target", target), ("draft", draft))}


def show(rows: Sequence[dict[str, Any]], floor: dict[str, float]) -> None:
    """The table: a column for each method and temperature, a line for each part."""
    for kind in ("round", "turn"):
        columns = [row for row in rows if row[kind]]
        if not columns:
            continue
        table = Table(title=f"microseconds of a {kind}; weights at full bandwidth: {floor}")
        table.add_column("part")
        for row in columns:
            table.add_column(f"{row['method']} {row['temperature']}", justify="right")
        names = sorted(
            {name for row in columns for name in row[kind]}, key=lambda n: -sum(r[kind].get(n, 0) for r in columns)
        )
        for name in names:
            table.add_row(name, *(f"{row[kind].get(name, 0.0):.0f}" for row in columns))
        table.add_row("all", *(f"{sum(row[kind].values()):.0f}" for row in columns))
        if kind == "round":
            calls = [sum(t for name, t in row[kind].items() if not name.endswith("native call")) for row in columns]
            table.add_row("all but native calls", *(f"{call:.0f}" for call in calls))
            table.add_row("different functions", *(str(row["functions"]) for row in columns))
            table.add_row("tokens a round", *(f"{row['tokens_a_round']:.2f}" for row in columns))
            table.add_row("a token", *(f"{sum(row[kind].values()) / row['tokens_a_round']:.0f}" for row in columns))
        Console(width=200).print(table)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2, help="torch's threads; the native runtime takes all cores")
    parser.add_argument("--bandwidth", type=float, default=35.0, help="GB/s that the memory gives")
    parser.add_argument("--quantile", type=float, default=0.5)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--temperatures", nargs="+", choices=list(SAMPLINGS), default=list(SAMPLINGS))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target = load_model(None, runtime="native")
    draft = load_draft(args.draft, target, runtime="native")
    rows = []
    for temperature in args.temperatures:
        for method in args.methods:
            rows.append(measure(target, draft, method, temperature, args))
    floor = {name: round(value) for name, value in floors(target.model, draft.model, args.bandwidth).items()}
    show(rows, floor)
    print(json.dumps({"floors": floor, "rows": rows}))


if __name__ == "__main__":
    main()
