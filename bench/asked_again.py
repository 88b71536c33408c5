"""Prompts that are asked a second time: the whole time of an answer by several ways, plain decoding's over it.

Run: python bench/asked_again.py --data FOLDER [--tokens 24 128] [--temperature 0] [--prompts 6] [--rounds 5]
FOLDER holds prompts as docs/benchmarks.md describes them. Each prompt is asked once of every LLM, then timed by all of
them in turn: plain decoding that reads the prompt anew; plain decoding, and `auto` without the drafter `prediction`,
that reuse its keys and values; `auto` as it is, which also drafts the earlier answer. Medians by prompt, pooled by
their sums. One JSON line last; exit 1 where a text differs.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table
from short_answers import as_prompt, end, read_prompts, shipped_pair

from outpace.api.llm import LLM
from outpace.core.errors import UserError

SEED = 1  # of all answers: a prompt that is asked again is asked with its seed
PLAIN = "plain decoding"
WAYS: dict[str, dict[str, Any]] = {
    PLAIN: {"method": "autoregressive", "reuse": False},
    "plain decoding, prompt reused": {"method": "autoregressive"},
    "auto by model and n-grams, prompt reused": {"method": "auto", "drafter": "model+ngram"},
    "auto": {"method": "auto"},
}
Times = dict[tuple[str, str], list[float]]  # (way, prompt) -> seconds


def measure(llms: dict[str, LLM], prompts: dict[str, Any], rounds: int, **options: Any) -> tuple[Times, int]:
    """Seconds of each answer that was asked for before, and how many answers differed from plain decoding's."""
    times: Times = defaultdict(list)
    texts: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    console = Console(stderr=True)
    for number in track(range(rounds + 1), "rounds", console=console):
        for name, prompt in prompts.items():
            for way, llm in llms.items():
                result = llm.generate([prompt], seed=SEED, **options)[0]
                texts[name].add(result.tokens)
                if number:
                    times[way, name].append(result.seconds)
    return times, sum(len(found) - 1 for found in texts.values())


def report(times: Times, prompts: dict[str, Any], tokens: int) -> dict[str, float]:
    """The table for people; the figures for machines."""
    table = Table("way", "pooled", "worst prompt", "best prompt", title=f"{tokens} tokens")
    figures = {}
    plain = {name: median(times[PLAIN, name]) for name in prompts}
    for way in WAYS:
        mine = {name: median(times[way, name]) for name in prompts}
        each = [plain[name] / mine[name] for name in prompts]
        pooled = sum(plain.values()) / sum(mine.values())
        table.add_row(way, f"{pooled:.2f}x", f"{min(each):.2f}x", f"{max(each):.2f}x")
        figures[f"{way}, {tokens}"] = round(pooled, 3)
    Console(width=100).print(table)
    return figures


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=[24, 128])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompts", type=int, default=6, help="of each task")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    target, draft = shipped_pair()
    prompts = {name: as_prompt(target, text) for name, text in read_prompts(args.data, args.prompts).items()}
    figures: dict[str, float] = {}
    differing = 0
    for tokens in args.tokens:
        with ExitStack() as stack:
            llms = {}
            for way, options in WAYS.items():
                own = None if options["method"] == "autoregressive" else draft
                llms[way] = stack.enter_context(closing(LLM(target, own, profile=False, batch=len(prompts), **options)))
            times, wrong = measure(llms, prompts, args.rounds, max_tokens=tokens, temperature=args.temperature)
        figures |= report(times, prompts, tokens)
        differing += wrong
    end({"prompts": len(prompts), "temperature": args.temperature, "differing": differing, **figures}, differing)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
