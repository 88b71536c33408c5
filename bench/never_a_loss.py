"""Measure what a bad draft model costs `auto`: garbage from the first token on, or from the middle of an answer on.

Run: python bench/never_a_loss.py [--target T] [--draft auto] [--tokens 512] [--turn 256] [--prompts FILE.jsonl] ...
Each prompt is answered by plain decoding, with a draft model that proposes its least likely tokens, with one that
starts to do so after --turn tokens, and with the unchanged draft model. The four answers are interleaved token by
token, because the speed of a shared machine changes within an answer. Planners start without learnt state. The default
--drafter is the model alone, since copies of the text would hide the loss. Prefill is not timed; for the draft that
turns bad, the part after the turn is also compared separately. The exit status is 1 if texts differ. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prompts import PROMPTS
from rich.console import Console
from rich.progress import track
from rich.table import Table

from outpace.api.llm import LLM, load
from outpace.api.params import SamplingParams
from outpace.bench.contenders import Contender
from outpace.bench.method_runner import MethodRunner
from outpace.core.logits import SparseLogits
from outpace.distill.prompts import read_prompts
from outpace.models.base import Part

PLAIN, GARBAGE, TURNING, AFTER, GOOD = "plain", "garbage", "turns to garbage", "after the turn", "unchanged"


@dataclass
class Turning:
    """A draft model that negates its logits once the text has `place` tokens."""

    model: Any
    place: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def score_held(self, forest: Sequence[Part]) -> SparseLogits:
        """Return the logits of the draft model, negated after `place`."""
        places = [part.session.length for part in forest]  # before the forward
        held = self.model.score_held(forest)
        return held._replace(values=-held.values, best=()) if max(places) >= self.place else held


@dataclass
class Times:
    """Decoding times and token counts by answer."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def add(self, answer: Answer, first: int) -> None:
        """Add the part of an answer after its first `first` tokens."""
        begun = next(number for number, count in enumerate(answer.written) if count >= first)
        if begun + 1 == len(answer.written):
            raise SystemExit(f"an answer's last round begins before token {first}: choose an earlier --turn")
        self.seconds.append(sum(answer.seconds[begun + 1 :]))
        self.tokens.append(answer.written[-1] - answer.written[begun])

    def ratios(self, plain: Times) -> list[float]:
        """Return the speedup of each answer over plain decoding."""
        pairs = zip(self.seconds, self.tokens, plain.seconds, plain.tokens, strict=True)
        return [(tokens / seconds) / (others / took) for seconds, tokens, took, others in pairs]

    def ratio(self, plain: Times) -> float:
        """Return the speedup of all answers together."""
        return (sum(self.tokens) / sum(self.seconds)) / (sum(plain.tokens) / sum(plain.seconds))


class Answer:
    """One answer, decoded in steps."""

    def __init__(self, llm: LLM, prompt: Sequence[int], params: SamplingParams) -> None:
        self._pieces = llm.stream(list(prompt), params)
        self.run = llm.engine.waiting[-1]
        self.seconds: list[float] = []  # wall time of each round
        self.written: list[int] = []  # tokens after each round

    def reach(self, count: int) -> None:
        """Run rounds until `count` tokens are written."""
        while not self.written or self.written[-1] < count:
            rounds, began = len(self.run.history.steps), time.perf_counter()
            while len(self.run.history.steps) == rounds:
                next(self._pieces)
            self.seconds.append(time.perf_counter() - began)
            self.written.append(len(self.run.tokens))


def measure(llm: LLM, args: argparse.Namespace) -> tuple[dict[str, Times], dict[str, Times], int]:
    """Return times by draft model, the matching times of plain decoding, and the number of differing texts."""
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    turning = {PLAIN: None, GARBAGE: 0, TURNING: args.turn, GOOD: 1 << 40}
    found = {name: Times() for name in (PLAIN, GARBAGE, TURNING, AFTER, GOOD)}
    plain = {name: Times() for name in found}
    different = 0
    texts = read_prompts(args.prompts) if args.prompts else PROMPTS
    prompts = [llm.tokenizer.encode_prompt(text) for text in texts][: args.count]
    for prompt in track(prompts, console=Console(stderr=True)):
        with ExitStack() as parts:  # new LLMs, so that planners start without state
            answers = {
                n: Answer(_open(parts, llm, args.drafter, turn, prompt), prompt, params) for n, turn in turning.items()
            }
            for count in range(1, args.tokens + 1):
                for answer in answers.values():
                    answer.reach(count)
        for name, times in found.items():
            first = args.turn if name == AFTER else 1
            times.add(answers[TURNING if name == AFTER else name], first)
            plain[name].add(answers[PLAIN], first)
        different += sum(answer.run.tokens != answers[PLAIN].run.tokens for answer in answers.values())
    return found, plain, different


def _open(parts: ExitStack, llm: LLM, drafter: str, turn: int | None, prompt: Sequence[int]) -> LLM:
    if turn is None:
        contender, draft = Contender("autoregressive", "autoregressive"), None
    else:
        contender = Contender("auto", "auto", {"drafter": drafter})
        assert llm.draft is not None
        model = Turning(llm.draft.model, len(prompt) + turn if turn else 0)
        draft = replace(llm.draft, model=model, again=None)
    models: Any = SimpleNamespace(target=llm.target, draft=draft)
    return parts.enter_context(closing(MethodRunner(contender, models, SamplingParams(), 1))).llm


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--drafter", default="model")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--turn", type=int, default=256)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--count", type=int, default=3)
    args = parser.parse_args()
    if args.count < 1:
        parser.error(f"--count is {args.count}, it must be at least 1")
    if not 1 <= args.turn < args.tokens:
        parser.error(f"--turn is {args.turn}, it must be between 1 and {args.tokens - 1}, before the last of --tokens")
    with load(args.target, draft=args.draft, method="autoregressive") as llm:
        found, plain, different = measure(llm, args)
    table = Table(title=f"{args.tokens} tokens, turn after {args.turn}; speedup over plain decoding")
    for column in ("draft", "tokens/s", "all answers", "by answer"):
        table.add_column(column)
    rows = []
    for name, times in found.items():
        ratios = [round(ratio, 3) for ratio in times.ratios(plain[name])]
        speed, ratio = sum(times.tokens) / sum(times.seconds), round(times.ratio(plain[name]), 3)
        table.add_row(name, f"{speed:.1f}", f"{ratio:.3f}", ", ".join(map(str, ratios)))
        rows.append({"draft": name, "tokens_per_second": round(speed, 2), "ratio": ratio, "by_answer": ratios})
    Console().print(table)
    print(json.dumps({"tokens": args.tokens, "turn": args.turn, "different": different, "rows": rows}))
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
