"""What the options of a request cost: plain decoding and `auto` with sampling, filters, penalties and bias.

Run: python bench/request_options.py --data FOLDER [--prompts 2] [--tokens 128] [--rounds 5] [--only WORD]
FOLDER holds prompts as docs/benchmarks.md describes them. All options by both ways in turn, one request at a time, on
the same LLM; medians over the rounds, prompts' reading included. One JSON line last; exit 1 where a text of `auto`
differs from plain decoding's with the same options.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from short_answers import as_prompt, end, new_llm, read_prompts, shipped_pair

from outpace.api.llm import LLM
from outpace.core.errors import UserError

PLAIN, AUTO = "plain", "auto"
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature 0.8": {"temperature": 0.8},
    "temperature 0.8, top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "temperature 1, top-k 50, min-p 0.05": {"temperature": 1.0, "top_k": 50, "min_p": 0.05},
    "greedy, repetition penalty 1.1": {"repetition_penalty": 1.1},
    "temperature 0.8, repetition penalty 1.1": {"temperature": 0.8, "repetition_penalty": 1.1},
    "temperature 0.8, presence penalty 0.5": {"temperature": 0.8, "presence_penalty": 0.5},
    "temperature 0.8, one token's bias": {"temperature": 0.8, "logit_bias": {100: -5.0}},
    "greedy, 5 log-probabilities": {"logprobs": 5},
    "greedy, two bad words": {"bad_words": ["dog", "cat"]},
}


def tokens_per_second(llm: LLM, prompts: Sequence[Any], options: dict[str, Any]) -> tuple[float, list[tuple[int, ...]]]:
    """One prompt after the other; the texts beside it."""
    began, texts = time.perf_counter(), []
    for prompt in prompts:
        texts.append(llm.generate([prompt], **options)[0].tokens)
    return sum(map(len, texts)) / (time.perf_counter() - began), texts


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=2, help="of each task")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="options whose name holds this word")
    args = parser.parse_args()
    chosen = {name: one for name, one in OPTIONS.items() if args.only in name}
    if not chosen:
        raise UserError(f"no options have {args.only!r} in their name, there are: {'; '.join(OPTIONS)}")
    target, draft = shipped_pair()
    texts = read_prompts(args.data, args.prompts).values()
    prompts = [as_prompt(target, text) for text in texts]
    speeds: dict[tuple[str, str], list[float]] = defaultdict(list)
    found: dict[tuple[str, str], list[tuple[int, ...]]] = {}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("options", total=args.rounds * len(chosen) * 2)
        for turn in range(args.rounds):
            for way in (PLAIN, AUTO)[:: 1 if turn % 2 else -1]:
                with new_llm(target, draft, "autoregressive" if way == PLAIN else "auto") as llm:
                    for name, options in chosen.items():
                        given = {"max_tokens": args.tokens, "seed": 1} | options
                        tokens_per_second(llm, prompts[:1], given)  # what it learns of such requests
                        speed, found[name, way] = tokens_per_second(llm, prompts, given)
                        speeds[name, way].append(speed)
                        progress.advance(task)
    table = Table("options", "plain, tokens/s", "auto, tokens/s", "auto over plain", "texts that differ")
    rows, differing = [], 0
    for name in chosen:
        plain, auto = (speeds[name, way] for way in (PLAIN, AUTO))
        ratio = median(mine / other for mine, other in zip(auto, plain, strict=True))
        other = sum(one != two for one, two in zip(found[name, PLAIN], found[name, AUTO], strict=True))
        differing += other
        table.add_row(name, f"{median(plain):.0f}", f"{median(auto):.0f}", f"{ratio:.2f}x", str(other))
        rows.append({"options": name, "plain": median(plain), "auto": median(auto), "over_plain": ratio})
    Console(width=120).print(table)
    end({"rows": rows, "differing": differing}, differing)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
