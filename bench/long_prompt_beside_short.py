"""When short prompts get their first token, with a long prompt that is read beside them and without it.

Run: python bench/long_prompt_beside_short.py [--long 6000] [--short 16] [--rounds 5] [--method auto]. The long request
comes first. Both ways in turn, round after round. Median: of all first tokens of a way;
latest: the median over rounds of a round's latest one. Prints a table and one JSON line last.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from contextlib import closing
from typing import Any

from rich.console import Console
from rich.table import Table

from outpace.api.llm import LLM
from outpace.api.params import SamplingParams
from outpace.core.errors import UserError
from outpace.engine.sequence import Running

WORDS = ("lamp", "window", "house", "sea", "night", "winter", "bread", "salt", "clock", "rain", "wheel", "glass")


def tokens_of(llm: LLM, count: int, seed: int) -> list[int]:
    """A text of so many tokens; two of them have no beginning in common."""
    text = " ".join(WORDS[(seed + 7 * place + place * place) % len(WORDS)] for place in range(count))
    return list(llm.tokenizer.encode(f"{seed}. {text}"))[:count]


def first_tokens(llm: LLM, prompts: list[list[int]], tokens: int) -> list[float]:
    """Seconds until each request's first token."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    asked = [llm.prepare(prompt, params) for prompt in prompts]
    runs: list[Running] = [llm.engine.submit(one.request, one.decoder, one.options, one.text.watch) for one in asked]
    while any(run.finish_reason is None for run in runs):
        llm.engine.step()
    return [run.history.first_token - run.history.submitted for run in runs]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", type=int, default=6000, help="tokens of the long prompt")
    parser.add_argument("--short", type=int, default=16, help="short prompts beside it")
    parser.add_argument("--length", type=int, default=60, help="tokens of a short prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--method", default="auto")
    args = parser.parse_args()
    found: dict[str, list[list[float]]] = {"with": [], "without": []}  # by round
    long_seconds = []
    with closing(LLM(method=args.method, batch=args.short + 1, reuse=False, profile=False)) as llm:
        first_tokens(llm, [tokens_of(llm, args.length, 99)] * 2, 4)
        for number in range(args.rounds):
            short = [tokens_of(llm, args.length, 100 * number + each) for each in range(args.short)]
            found["without"].append(first_tokens(llm, short, 4))
            seconds = first_tokens(llm, [tokens_of(llm, args.long, number), *short], 4)
            long_seconds.append(seconds[0])
            found["with"].append(seconds[1:])
    row: dict[str, Any] = dict(vars(args))
    table = Table("short prompts' first token, ms", "median", "latest", title=f"beside {args.long} tokens")
    for way, rounds in found.items():
        row[f"{way}_median_ms"] = 1e3 * statistics.median(itertools.chain(*rounds))
        row[f"{way}_latest_ms"] = 1e3 * statistics.median(map(max, rounds))
        table.add_row(way, f"{row[f'{way}_median_ms']:.0f}", f"{row[f'{way}_latest_ms']:.0f}")
    row["times_later"] = round(row["with_median_ms"] / row["without_median_ms"], 2)
    row["times_later_at_worst"] = round(row["with_latest_ms"] / row["without_latest_ms"], 2)
    row["long_ms"] = 1e3 * statistics.median(long_seconds)
    table.add_row("times later", f"{row['times_later']:.2f}", f"{row['times_later_at_worst']:.2f}")
    Console(width=100).print(table)
    print(json.dumps({key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()}))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
