"""What a draft that is no good costs the default method: garbage from the first token on, and from mid-answer on.

Run: python bench/never_a_loss.py [--target T] [--draft auto] [--tokens 512] [--turn 256] [--prompts FILE.jsonl] ...
Each prompt is answered by plain decoding, with a draft that proposes what it likes least, with one that begins to do so
after --turn tokens, and with the draft as it is: token by token in turn, for a shared machine's speed changes within an
answer; with a planner that knows nothing. By drafts alone (--drafter model), since copies would gain what is lost.
Decoding without prefill; of the draft that turns also the part behind the turn, over the same tokens of plain decoding.
Exit 1 where a text differs. One JSON line last.
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

from rich.console import Console
from rich.progress import track
from rich.table import Table

from outpace.api.llm import LLM, load
from outpace.api.params import SamplingParams
from outpace.bench.contenders import Contender
from outpace.bench.own import MethodRunner
from outpace.core.logits import SparseLogits
from outpace.distill.prompts import read_prompts
from outpace.models.base import Part

PROMPTS = (
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A shop sells pens at 3 dollars each. How much do 7 pens cost, and how much change is there from 50 dollars?",
)
PLAIN, GARBAGE, TURNING, BEHIND, GOOD = "plain", "garbage", "turns to garbage", "behind the turn", "as it is"


@dataclass
class Turning:
    """A draft model that, from `place` tokens of a text on, likes best what it likes least."""

    model: Any
    place: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def score_held(self, forest: Sequence[Part]) -> SparseLogits:
        """The draft's scores, turned around behind the place."""
        places = [part.session.length for part in forest]  # before it reads on
        held = self.model.score_held(forest)
        return held._replace(values=-held.values, best=()) if max(places) >= self.place else held


@dataclass
class Times:
    """Seconds and tokens of decoding, answer by answer."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def add(self, answer: Answer, first: int) -> None:
        """Of this answer what came after its `first` tokens."""
        begun = next(number for number, count in enumerate(answer.written) if count >= first)
        if begun + 1 == len(answer.written):
            raise SystemExit(f"an answer's last round begins before token {first}: choose an earlier --turn")
        self.seconds.append(sum(answer.seconds[begun + 1 :]))
        self.tokens.append(answer.written[-1] - answer.written[begun])

    def ratios(self, plain: Times) -> list[float]:
        """Of each answer's speed to plain decoding's."""
        pairs = zip(self.seconds, self.tokens, plain.seconds, plain.tokens, strict=True)
        return [(tokens / seconds) / (others / took) for seconds, tokens, took, others in pairs]

    def ratio(self, plain: Times) -> float:
        """Of all answers together."""
        return (sum(self.tokens) / sum(self.seconds)) / (sum(plain.tokens) / sum(plain.seconds))


class Answer:
    """One answer that goes on as far as it is told."""

    def __init__(self, llm: LLM, prompt: Sequence[int], params: SamplingParams) -> None:
        self._pieces = llm.stream(list(prompt), params)
        self.run = llm.engine.waiting[-1]
        self.seconds: list[float] = []  # of each round, all that it took until its text was there
        self.written: list[int] = []  # tokens after each round

    def reach(self, count: int) -> None:
        """Rounds, until so many tokens are written."""
        while not self.written or self.written[-1] < count:
            rounds, began = len(self.run.history.steps), time.perf_counter()
            while len(self.run.history.steps) == rounds:
                next(self._pieces)
            self.seconds.append(time.perf_counter() - began)
            self.written.append(len(self.run.tokens))


def measure(llm: LLM, args: argparse.Namespace) -> tuple[dict[str, Times], dict[str, Times], int]:
    """Times by row, plain decoding's times for each of them, and how many texts differ."""
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    turning = {PLAIN: None, GARBAGE: 0, TURNING: args.turn, GOOD: 1 << 40}
    found = {name: Times() for name in (PLAIN, GARBAGE, TURNING, BEHIND, GOOD)}
    plain = {name: Times() for name in found}
    different = 0
    texts = read_prompts(args.prompts) if args.prompts else PROMPTS
    prompts = [llm.tokenizer.encode_prompt(text) for text in texts][: args.count]
    for prompt in track(prompts, console=Console(stderr=True)):
        with ExitStack() as parts:  # new ones each time: their planners know nothing
            answers = {
                n: Answer(_open(parts, llm, args.drafter, turn, prompt), prompt, params) for n, turn in turning.items()
            }
            for count in range(1, args.tokens + 1):
                for answer in answers.values():
                    answer.reach(count)
        for name, times in found.items():
            first = args.turn if name == BEHIND else 1
            times.add(answers[TURNING if name == BEHIND else name], first)
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
    """Measures and prints."""
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
    table = Table(title=f"{args.tokens} tokens, turned after {args.turn}; ratios to plain decoding")
    for column in ("draft", "tokens/s", "all together", "by answer"):
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
