"""Measure several requests at once: the throughput of `auto` over plain decoding with a full batch.

Run: python bench/batch.py --data FOLDER [--batch 2,4,8,16] [--prompts 6] [--tokens 96] [--rounds 8]
FOLDER holds prompts as docs/benchmarks.md describes them. When a request ends, the next prompt takes its place. Plain
decoding, `auto` and a second LLM with plain decoding answer all prompts, interleaved; each keeps what it learnt. The
table has medians and quartiles over rounds, prefill included: `auto` over the mean of both plain runs, and one plain
run over the other, which shows the noise of the machine. The last line is JSON; the exit status is 1 if texts differ.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median, quantiles
from typing import Any

from common import TASKS, chat_tokens, finish, parse, read_prompts, run, shipped_pair, show
from rich.console import Console
from rich.progress import Progress

from outpace.api.llm import LLM
from outpace.core.errors import UserError
from outpace.models.load import Loaded

AGAIN = "plain again"
METHODS = {"plain": "autoregressive", "auto": "auto", AGAIN: "autoregressive"}
Seconds = dict[str, list[float]]  # by variant


class Batches:
    """Answers all prompts by every variant with a fixed batch size."""

    def __init__(self, target: Loaded, draft: Loaded, prompts: Sequence[Any], batch: int, tokens: int) -> None:
        self._prompts, self._tokens = prompts, tokens
        self._open = ExitStack()
        self._llms = {
            variant: self._open.enter_context(
                LLM(target, draft if method == "auto" else None, method=method, profile=False, reuse=False, batch=batch)
            )
            for variant, method in METHODS.items()
        }
        self.seconds: Seconds = {variant: [] for variant in METHODS}
        self.texts: list[tuple[int, ...]] = []
        self.differing = 0

    def round(self, first: int) -> None:
        """Run all variants once, starting with number `first`."""
        variants = list(METHODS)
        for variant in (*variants[first % 3 :], *variants[: first % 3]):
            start = time.perf_counter()
            results = self._llms[variant].generate(self._prompts, max_tokens=self._tokens)
            self.seconds[variant].append(time.perf_counter() - start)
            texts = [result.tokens for result in results]
            self.texts = self.texts or texts
            self.differing += sum(one != other for one, other in zip(texts, self.texts, strict=True))

    def close(self) -> None:
        """Close the LLMs but not the models."""
        self._open.close()

    def figures(self) -> dict[str, Any]:
        """Return tokens/s and the quartiles of the ratios."""
        plain, auto, again = (self.seconds[variant] for variant in METHODS)
        count = sum(map(len, self.texts))
        mean = [(one + other) / 2 for one, other in zip(plain, again, strict=True)]
        ratios = [one / other for one, other in zip(mean, auto, strict=True)]
        same = [one / other for one, other in zip(plain, again, strict=True)]
        return {
            "plain": round(count / median(mean), 1),
            "auto": round(count / median(auto), 1),
            "ratio": [round(value, 3) for value in quantiles(ratios, n=4, method="inclusive")],
            "plain_over_plain": [round(value, 3) for value in quantiles(same, n=4, method="inclusive")],
            "differing": self.differing,
        }


def main() -> int:
    """Run the command."""
    args = parse(__doc__, data=..., batch="2,4,8,16", prompts=6, tokens=96, rounds=8)
    if args.rounds < 2:
        raise UserError(f"--rounds must be at least 2, not {args.rounds}")
    texts = {name: text for task in read_prompts(args.data, TASKS, args.prompts) for name, text in task.items()}
    target, draft = shipped_pair()
    prompts = [chat_tokens(target, text) for text in texts.values()]
    sizes = [int(part) for part in args.batch.split(",")]
    found: dict[int, dict[str, Any]] = {}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("rounds", total=len(sizes) * args.rounds)
        for size in sizes:
            batches = Batches(target, draft, prompts, size, args.tokens)
            for number in range(args.rounds):
                batches.round(number)
                progress.advance(task)
            batches.close()
            found[size] = batches.figures()
    show([{"batch": size, **row} for size, row in found.items()])
    return finish({"prompts": len(prompts), "batches": found}, sum(row["differing"] for row in found.values()))


if __name__ == "__main__":
    run(main)
