"""Several requests at once, as a queue: when one ends, the next begins, so that as many as asked write until the last.

Run: python bench/crowds.py --data FOLDER [--batch 2,4,8,16] [--prompts 6] [--tokens 96] [--rounds 8]
FOLDER holds prompts as docs/benchmarks.md describes them. Plain decoding, `auto`, and plain decoding once more by an
LLM of its own answer all prompts in turn, every round beginning with another one; an LLM keeps what it learnt. Medians
of the rounds' ratios, with quartiles: `auto` over the mean of both plain ones, prompts read in it, and one plain one
over the other, which says what this machine can tell apart. One JSON line last; exit 1 where a text differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from short_answers import as_prompt, end, read_prompts, shipped_pair

from outpace.api.llm import LLM
from outpace.core.errors import UserError
from outpace.models.load import Loaded

AGAIN = "plain again"
METHODS = {"plain": "autoregressive", "auto": "auto", AGAIN: "autoregressive"}
Seconds = dict[str, list[float]]  # by way


class Queue:
    """All prompts, so many at once, by every way."""

    def __init__(self, target: Loaded, draft: Loaded, prompts: Sequence[Any], batch: int, tokens: int) -> None:
        self._prompts, self._tokens = prompts, tokens
        self._open = ExitStack()
        self._llms = {
            way: self._open.enter_context(
                LLM(target, draft if method == "auto" else None, method=method, profile=False, reuse=False, batch=batch)
            )
            for way, method in METHODS.items()
        }
        self.seconds: Seconds = {way: [] for way in METHODS}
        self.texts: list[tuple[int, ...]] = []
        self.differing = 0

    def round(self, first: int) -> None:
        """All ways in turn, from number `first` on."""
        ways = list(METHODS)
        for way in (*ways[first % 3 :], *ways[: first % 3]):
            start = time.perf_counter()
            results = self._llms[way].generate(self._prompts, max_tokens=self._tokens)
            self.seconds[way].append(time.perf_counter() - start)
            texts = [result.tokens for result in results]
            self.texts = self.texts or texts
            self.differing += sum(one != other for one, other in zip(texts, self.texts, strict=True))

    def close(self) -> None:
        """Ends the LLMs; the models stay."""
        self._open.close()

    def figures(self) -> dict[str, Any]:
        """Tokens a second, and the rounds' ratios."""
        plain, auto, again = (self.seconds[way] for way in METHODS)
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


def report(found: dict[int, dict[str, Any]]) -> None:
    """The table for people."""
    table = Table("at once", "plain, tokens/s", "auto", "auto over plain (quartiles)", "plain over plain (quartiles)")
    for batch, row in found.items():
        pairs = [
            f"{middle:.3f} ({low:.3f} to {high:.3f})" for low, middle, high in (row["ratio"], row["plain_over_plain"])
        ]
        table.add_row(str(batch), str(row["plain"]), str(row["auto"]), *pairs)
    Console(width=120).print(table)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--batch", default="2,4,8,16")
    parser.add_argument("--prompts", type=int, default=6, help="of each task")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    if args.rounds < 2:
        raise UserError(f"--rounds must be at least 2, not {args.rounds}")
    texts = read_prompts(args.data, args.prompts)
    target, draft = shipped_pair()
    prompts = [as_prompt(target, text) for text in texts.values()]
    batches = [int(part) for part in args.batch.split(",")]
    found: dict[int, dict[str, Any]] = {}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("rounds", total=len(batches) * args.rounds)
        for batch in batches:
            queue = Queue(target, draft, prompts, batch, args.tokens)
            for number in range(args.rounds):
                queue.round(number)
                progress.advance(task)
            queue.close()
            found[batch] = queue.figures()
    report(found)
    end({"prompts": len(prompts), "batches": found}, sum(row["differing"] for row in found.values()))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
