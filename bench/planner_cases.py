"""Measure where `auto` chooses badly: hidden costs, with models that cost nothing and move a clock themselves.

Run: python bench/planner_cases.py [--only KIND] [--requests 1,8,32] [--explain] ...
Does `auto` lose where time passes that the planner does not see? The table has its rate over that of plain decoding and
over that of the best chain of 1 to 4; cells below 0.97 of plain or 0.95 of the best are bold. Each pass of a stand-in
model adds its time to a virtual clock, and so do hidden costs, which the planner does not time; other programs on the
machine therefore hardly change a figure. With --host the clock also counts the time that the host takes between passes.
There are --answers, or as many as --requests, at least six.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from common import parse, run
from host_cost import VOCAB, TableModel

from outpace.core.drafting import BuildContext
from outpace.core.logits import SparseLogits
from outpace.core.types import Request
from outpace.decoders.auto import Auto
from outpace.decoders.autoregressive import Autoregressive
from outpace.decoders.speculative import Speculative
from outpace.drafters import model as draft_model
from outpace.engine.engine import Engine, EngineOptions
from outpace.engine.sequence import TokenSequence
from outpace.engine.warmup import warm_up
from outpace.models.base import Part
from outpace.rules.greedy import Greedy

OFFERED = 32  # best tokens that a model returns
MS = 1e-3
CHAINS = ("chain1", "chain2", "chain3", "chain4")
DRAFTS = {"good": 0.8, "useless": 0.0}  # chance that the draft's best token is the target's
# Hidden costs and their amounts. The unit is a plain pass, for `gap per draft step` a draft step.
HIDDEN = (
    ("none", 0.0),
    ("gap after a drafted round", 0.2),
    ("gap after a drafted round", 0.5),
    ("gap after a drafted round", 1.0),
    ("gap per draft step", 2.0),
    ("gap after every round", 0.5),
    ("next pass slower", 0.1),
    ("next pass slower", 0.3),
    ("next pass slower", 0.5),
    ("capture (flagged)", 10.0),
    ("graph of draft step (flagged)", 5.0),
    ("catch-up costs", 0.5),
    ("slow observe", 0.02),
)


@dataclass(frozen=True)
class Setting:
    """Times in seconds, and what is asked; the defaults are those of a GPU, which memory limits."""

    requests: int = 1
    agreement: float = DRAFTS["good"]
    hidden: str = "none"
    amount: float = 0.0
    prompt: int = 16  # tokens
    target_pass: float = 10 * MS  # with one row
    target_row: float = 0.03 * MS  # of each further row
    draft_step: float = 1.5 * MS
    draft_row: float = 0.02 * MS
    host: bool = False  # whether the clock counts the host's time too

    @property
    def plain_pass(self) -> float:
        """Seconds of a pass in which each request has one row."""
        return self.target_pass + self.target_row * (self.requests - 1)


class World:
    """The virtual clock, and the hidden cost."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.now = 0.0
        self.skipped = 0.0  # seconds of the stand-in models themselves, which the clock leaves out
        self.hidden = 0.0  # seconds that the planner did not time
        self.steps = 0  # draft steps of this round
        self.rounds = 0
        self._has_drafted = False  # in the last round
        self._shapes = set[tuple[str, int, int]]()  # that were captured
        self.num_captures = Counter[str]()  # by kind

    def clock(self) -> float:
        """Return the time in seconds."""
        return self.now + (time.perf_counter() - self.skipped if self.setting.host else 0.0)

    def hide(self, seconds: float) -> None:
        """Add a hidden cost to the clock."""
        self.now += seconds
        self.hidden += seconds

    def run_target(self, forest: Sequence[Part]) -> None:
        """Add the time of a target pass."""
        setting = self.setting
        seconds = setting.target_pass + setting.target_row * (sum(len(part.tokens) for part in forest) - 1)
        if setting.hidden == "next pass slower" and self._has_drafted:
            self.hide(setting.amount * seconds)
        self._capture("capture (flagged)", forest, max(len(part.tokens) for part in forest))
        self.now += seconds

    def run_draft(self, forest: Sequence[Part]) -> None:
        """Add the time of a draft step."""
        setting = self.setting
        seconds = setting.draft_step + setting.draft_row * (sum(len(part.tokens) for part in forest) - 1)
        is_reading = any(len(part.tokens) - len(part.logit_rows) > 8 for part in forest)
        if setting.hidden == "catch-up costs" and is_reading:
            self.hide(setting.amount * setting.target_pass)
        self._capture("graph of draft step (flagged)", forest, max(len(part.logit_rows) for part in forest))
        self.steps += 1
        self.now += seconds

    def _capture(self, kind: str, forest: Sequence[Part], size: int) -> None:
        """Hide the time of a captured graph when its bucket first occurs, and count it as the runtimes do."""
        shape = (kind, _power_of_two(len(forest)), _power_of_two(size))
        if self.setting.hidden == kind and shape not in self._shapes:
            self._shapes.add(shape)
            if self.rounds:
                self.hide(self.setting.amount * self.setting.target_pass)
                self.num_captures[kind] += 1

    def end_round(self) -> None:
        """Add hidden costs between two rounds."""
        setting = self.setting
        if setting.hidden == "gap after every round" or (setting.hidden == "gap after a drafted round" and self.steps):
            self.hide(setting.amount * setting.plain_pass)
        if setting.hidden == "gap per draft step":
            self.hide(setting.amount * setting.draft_step * self.steps)
        self._has_drafted, self.steps = bool(self.steps), 0
        self.rounds += 1


def _power_of_two(number: int) -> int:
    return 1 << (max(number, 1) - 1).bit_length()


class ClockedTable(TableModel):
    """A model whose next token follows from the last one, by one cycle through the vocabulary; it moves the clock. The
    draft's best token is the target's with the chance `agreement`, its second one in half of the other cases."""

    def __init__(self, world: World, agreement: float | None = None) -> None:
        """`agreement`: None for the target."""
        super().__init__()
        order, following = np.random.default_rng(7).permutation(VOCAB), np.empty(VOCAB, int)
        following[order] = np.roll(order, -1)
        chance = np.random.default_rng(8).random(VOCAB)
        best = (following[:, None] + 1 + np.arange(OFFERED) ** 2) % VOCAB  # other tokens
        if agreement is None:
            best[:, 0] = following
        elif agreement > 0.0:
            is_first, is_second = chance < agreement, (chance >= agreement) & (chance < (1 + agreement) / 2)
            best[is_first, 0], best[is_second, 1] = following[is_first], following[is_second]
        self._best = best.tolist()
        self._values = self._values[:OFFERED]
        self._weight_bytes = 1000 if agreement is None else 150
        self._world = world
        self._run = world.run_target if agreement is None else world.run_draft
        self._graphs = "capture (flagged)" if agreement is None else "graph of draft step (flagged)"

    @property
    def num_captures(self) -> int:
        return self._world.num_captures[self._graphs]

    @property
    def weight_bytes(self) -> int:
        return self._weight_bytes

    def score_sparse(self, forest: Sequence[Part]) -> SparseLogits:
        start = time.perf_counter()
        scored = super().score_sparse(forest)
        self._run(forest)
        self._world.skipped += time.perf_counter() - start
        return scored


def build_drafter(world: World, width: int) -> Any:
    """Build the drafter `model`, with the hidden costs of drafters."""
    table = ClockedTable(world, world.setting.agreement)
    drafter = draft_model.build(draft_model.Options(width=width), given=BuildContext(draft=table))
    observe = drafter.observe

    def observed(state: Any, seen: Any) -> None:
        world.hide(world.setting.amount * world.setting.target_pass)
        observe(state, seen)

    if world.setting.hidden == "slow observe":
        drafter.observe = observed
    return drafter


def build_engine(world: World, method: str, warm: bool = True) -> Engine:
    """Build an engine for `plain`, `auto` or a chain; `auto` knows its costs from a warm-up, if `warm`."""
    width, nodes = (4, 32) if method == "auto" else (1, 8)
    limits = EngineOptions(batch=world.setting.requests, rows=512, chunk=2048, nodes=nodes, reuse=False)
    engine = Engine(ClockedTable(world), build_drafter(world, width), options=limits, clock=world.clock)
    if method == "auto" and warm:
        warm_up(engine, [5], 1e9)
    world.end_round()
    world.rounds, world.hidden = 0, 0.0
    return engine


class Round(NamedTuple):
    """One step of the engine: its sequences, those that it ended included, and its seconds, draft steps and tokens."""

    running: list[TokenSequence]
    seconds: float
    steps: int
    tokens: int


def rounds_of(engine: Engine, world: World, method: str, answers: int, tokens: int) -> Iterator[Round]:
    """Yield every round until `answers` answers of `tokens` tokens are written; each that ends is replaced."""
    decoder = {"plain": Autoregressive, "auto": Auto}.get(method, Speculative)
    options = decoder.Options(**({"draft_length": int(method[5:])} if decoder is Speculative else {}))
    dice, sent, running = random.Random(3), 0, list[TokenSequence]()
    while sent < answers or running:
        while len(running) < world.setting.requests and sent < answers:
            prompt = tuple(dice.randrange(VOCAB) for _ in range(world.setting.prompt))
            running.append(engine.submit(Request(prompt, Greedy(), tokens), decoder, options))
            sent += 1
        start, before = world.clock(), sum(len(one.tokens) for one in running)
        engine.step()
        written = sum(len(one.tokens) for one in running) - before
        yield Round(running, world.clock() - start, world.steps, written)
        for one in running:
            if one.error is not None:
                raise one.error
        running = [one for one in running if one.finish_reason is None]
        world.end_round()


def measure(setting: Setting, method: str, tokens: int, answers: int, explain: bool = False) -> tuple[float, float]:
    """Return tokens/s, and the share of rounds that drafted."""
    world = World(setting)
    with build_engine(world, method) as engine:
        start, steps, total = world.clock(), Counter[int](), 0
        for one in rounds_of(engine, world, method, answers, tokens):
            steps[one.steps] += 1
            total += one.tokens
        seconds = world.clock() - start
        if explain:
            print(f"    {method}: {total / seconds:.0f} tok/s, hidden {world.hidden / seconds:.0%}", end="")
            print(_beliefs(engine, setting, steps) if method == "auto" else "", flush=True)
    return total / seconds, 1 - steps[0] / steps.total()


def _beliefs(engine: Engine, setting: Setting, steps: Counter[int]) -> str:
    """Return what the planner believes at the end."""
    costs, count = engine.costs, setting.requests
    draft = costs.draft_seconds(engine.drafting.drafter.capabilities.sources[0], count)
    return (
        f" of time, rounds by draft steps {dict(sorted(steps.items()))}, believed speedup {costs.speedup(count):.2f},"
        f" T(n)={costs.pass_seconds(count) / MS:.2f} ms, T(4n)={costs.pass_seconds(4 * count) / MS:.2f},"
        f" d={draft * count / MS:.2f} ms"
    )


def hidden_costs(args: argparse.Namespace) -> None:
    """Print the table."""
    counts = [int(part) for part in args.requests.split(",")]
    cells = " | ".join(f"{count}: auto/plain, auto/best chain (best; rounds drafted)" for count in counts)
    print(f"| hidden cost | amount | draft | {cells} |\n|---|--:|---|{'---|' * len(counts)}")
    num_bad = num_cells = 0
    for kind, standard in HIDDEN:
        if args.only and kind not in args.only.split(","):
            continue
        amount = standard if args.amount is None else args.amount
        for draft in args.drafts.split(","):
            row = []
            for count in counts:
                setting = _setting(args, requests=count, agreement=DRAFTS[draft], hidden=kind, amount=amount)
                cell, is_bad = _compare(setting, args.tokens, args.answers or max(count, 6), args.explain)
                num_bad, num_cells = num_bad + is_bad, num_cells + 1
                row.append(cell)
            print(f"| {kind} | {amount:g} | {draft} | {' | '.join(row)} |", flush=True)
    print(f"{num_bad} of {num_cells} below 0.97 of plain or 0.95 of the best fixed setting")


def _setting(args: argparse.Namespace, **more: Any) -> Setting:
    """Return the setting of `hidden_costs` with the times of --pass-ms and --step-ms."""
    if args.pass_ms:
        more |= {"target_pass": args.pass_ms * MS, "target_row": args.pass_ms * MS * 0.003}
    if args.step_ms:
        more |= {"draft_step": args.step_ms * MS, "draft_row": args.step_ms * MS * 0.013}
    return Setting(prompt=args.prompt, host=args.host, **more)


def _compare(setting: Setting, tokens: int, answers: int, explain: bool) -> tuple[str, bool]:
    """Return a cell of the table of hidden costs, and whether it is bad."""
    methods = ("plain", *CHAINS, "auto")
    rates, shares = zip(*(measure(setting, method, tokens, answers, explain) for method in methods), strict=True)
    plain, auto = rates[0], rates[-1]
    best = max(range(len(methods) - 1), key=lambda place: rates[place])
    is_bad = auto / plain < 0.97 or auto / rates[best] < 0.95
    mark = "**" if is_bad else ""
    figures = f"{mark}{auto / plain:.2f}, {auto / rates[best]:.2f}{mark}"
    return f"{figures} ({methods[best]} {rates[best] / plain:.2f}; {shares[-1]:.0%})", is_bad


def main() -> None:
    """Print the table of hidden costs."""
    options: dict[str, Any] = {"host": False, "requests": "1,8,32", "tokens": 256, "answers": 0, "prompt": 16}
    options |= {"only": "", "amount": float, "drafts": "good,useless", "pass_ms": float, "step_ms": float}
    hidden_costs(parse(__doc__, **options, explain=False))


if __name__ == "__main__":
    run(main)
