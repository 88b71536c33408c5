"""The part of bench/gpu.py on answers: tokens a second of each method in turns, and what their parts would give."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from gpu_checks import asked_of
from gpu_clock import Bench, Row, joules

from outpace.api.llm import LLM
from outpace.core.theory import card_limit

METHODS: dict[str, dict[str, Any]] = {
    "plain": {"method": "autoregressive"},
    "in turn": {"method": "speculative", "drafter": "model"},
    "beside": {"method": "card", "drafter": "model", "worker": "thread"},
    "planner": {"method": "auto", "profile": False},
}
DEAR = 30  # times its own cost: from here on a target writes few tokens in the time there is
FEW_TOKENS, FEW_PROMPTS = 48, 2


def turns(bench: Bench, target: Any, draft: Any, parts: dict[str, float], inflate: int, batch: int) -> Iterator[Row]:
    """Every method in turn, as often as is asked for, after one turn that does not count: graphs are captured then, and
    the planner learns what it then knows. `parts`: milliseconds of a plain pass, of one that verifies, of a draft step.
    """
    is_dear = inflate >= DEAR
    count = min(bench.args.tokens, FEW_TOKENS) if is_dear else bench.args.tokens
    prompts = bench.args.prompts[: FEW_PROMPTS if is_dear else None]
    asked = asked_of(target, [prompts[number % len(prompts)] for number in range(max(batch, len(prompts)))])
    repeats = 1 if inflate > DEAR else bench.args.repeats
    about = {"inflate": inflate, "batch": batch}
    rates: dict[str, list[float]] = {name: [] for name in METHODS}
    last: dict[str, list[Any]] = {}
    with ExitStack() as stack:
        llms = {
            name: stack.enter_context(LLM(target, draft, batch=batch, reuse=False, **options))
            for name, options in METHODS.items()
        }
        for turn in range(repeats + 1):
            for name, llm in llms.items():
                if turn == 0 and inflate > DEAR and name == "plain":
                    continue  # its passes are captured by the others
                before, start = joules(bench), time.perf_counter()
                last[name] = llm.generate(asked, max_tokens=count)
                seconds = time.perf_counter() - start
                written = sum(len(result.tokens) for result in last[name])
                used = joules(bench)
                energy = None if before is None or used is None else (used - before) / written
                yield about | {"method": name, "turn": turn, "tokens_per_second": written / seconds, "joules": energy}
                if turn:
                    rates[name].append(written / seconds)
    plain = statistics.median(rates["plain"])
    for name, found in rates.items():
        row = about | {"method": name, "times_plain": statistics.median(found) / plain}
        yield row | (_formula(name, last[name], parts) if batch == 1 else {})


def _formula(name: str, results: Sequence[Any], parts: dict[str, float]) -> Row:
    """What the planner's formulas make of the measured parts: over plain decoding."""
    figures = [result.figures for result in results]
    passes = sum(one.passes for one in figures)
    length = sum(one.emitted for one in figures) / passes
    drafting = 1e3 * sum(one.draft_seconds for one in figures) / passes  # milliseconds a pass
    row: Row = {"tokens_a_pass": length}
    if name == "in turn":
        row["formula"] = length * parts["plain"] / (parts["verify"] + drafting)
    if name == "beside":
        row["formula"] = card_limit(length, parts["verify"] / parts["plain"], parts["step"] / parts["plain"])
    return row
