"""Many requests of mixed length and options at once, each held against its single run by plain decoding.

Run: python bench/many_requests.py [--requests 64] [--method card] [--drafter model+ngram] [--draft LAYERS] [--batch 16]
[--tokens 40] [--threads 8]. Counts how many answers (text, tokens, end, log-probabilities bit by bit) differ, streamed
together by as many reading threads as asked. Prints a table and one JSON line last; exit 1 where an answer differs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from outpace.api.llm import LLM, Result
from outpace.api.params import SamplingParams
from outpace.core.errors import UserError
from outpace.core.stats import RunStats
from outpace.models.load import Loaded, load_draft, load_model

DRAFT = "layers:0,1,2,3,4,5,6,7,8,9,20,21,22,23,24,25,26,27,28,29"
TOPICS = ("the sea", "a lamp in the window", "how bread is made", "prime numbers", "the north wind", "an old map")
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, penalties": {"presence_penalty": 0.8, "frequency_penalty": 0.3},
    "sampled": {"temperature": 0.8},
    "filters": {"temperature": 1.1, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "repetition": {"temperature": 0.7, "repetition_penalty": 1.2},
    "bias, bad words": {"logit_bias": {28: -2.0, 30: 1.0}, "bad_words": ["the", "water"]},
    "stop strings": {"stop": [". ", "\n", "ing "], "temperature": 0.9},
    "min tokens": {"min_tokens": 12, "temperature": 1.0},
    "log-probabilities": {"logprobs": 5, "temperature": 0.6},
    "processed ones": {"logprobs": 3, "logprobs_mode": "processed", "temperature": 1.0, "top_p": 0.95},
    "echo": {"echo": True, "logprobs": 1},
}
Wish = tuple[str, str, SamplingParams]


def make_wishes(count: int, most_tokens: int) -> list[Wish]:
    """Kind, prompt and what is asked of each; some prompts begin alike."""
    chance = random.Random(7)
    wishes = []
    for number in range(count):
        kind = list(KINDS)[number % len(KINDS)]
        opening = "You are a patient writer who answers in plain words. " * chance.choice((0, 0, 1, 4))
        prompt = f"{opening}Write about {chance.choice(TOPICS)}. " + "Once upon a time. " * chance.randrange(6)
        options = {"max_tokens": chance.randint(4, most_tokens), "seed": number, **KINDS[kind]}
        options["max_tokens"] = max(options["max_tokens"], options.get("min_tokens", 1))
        wishes.append((kind, prompt, SamplingParams(**options)))
    return wishes


def answer_of(result: Result) -> tuple[Any, ...]:
    """What must not depend on the company."""
    return (result.text, result.tokens, result.finish_reason, result.logprobs, result.prompt_logprobs)


def answer_alone(target: Loaded, wishes: Sequence[Wish]) -> tuple[list[tuple[Any, ...]], float]:
    """Each by plain decoding, nothing reused; the seconds that all took."""
    start = time.perf_counter()
    with closing(LLM(target, method="autoregressive", reuse=False)) as llm:
        answers = [answer_of(llm.stream(prompt, params).finish()) for _, prompt, params in wishes]
    return answers, time.perf_counter() - start


def answer_together(llm: LLM, wishes: Sequence[Wish], threads: int) -> tuple[list[Result], float]:
    """All at once, read by so many threads."""
    start = time.perf_counter()
    streams = [llm.stream(prompt, params) for _, prompt, params in wishes]
    with ThreadPoolExecutor(threads) as pool:
        results = list(pool.map(lambda stream: stream.finish(), streams))
    return results, time.perf_counter() - start


def sums(figures: Sequence[RunStats]) -> dict[str, int]:
    """Of what the methods counted."""
    names = ("emitted", "passes", "drafted", "accepted", "hits", "misses")
    return {name: sum(getattr(each, name) for each in figures) for name in names}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--method", default="card")
    parser.add_argument("--drafter", default="model+ngram")
    parser.add_argument("--draft", default=DRAFT)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=40, help="of the longest answer")
    parser.add_argument("--threads", type=int, default=8, help="that read the streams")
    args = parser.parse_args()
    target = load_model(None, dtype="float32")
    draft = load_draft(args.draft, target)
    wishes = make_wishes(args.requests, args.tokens)
    alone, alone_seconds = answer_alone(target, wishes)
    with closing(LLM(target, draft, method=args.method, drafter=args.drafter, batch=args.batch)) as llm:
        results, seconds = answer_together(llm, wishes, args.threads)
    asked = Counter(kind for kind, _, _ in wishes)
    differ = Counter(
        kind for (kind, _, _), mine, other in zip(wishes, results, alone, strict=True) if answer_of(mine) != other
    )
    table = Table("asked", "answers", "differ", title=f"{args.requests} at once, {args.method}, {args.drafter}")
    for kind, count in asked.items():
        table.add_row(kind, str(count), str(differ[kind]))
    Console(width=100).print(table)
    row: dict[str, Any] = {"requests": args.requests, "method": args.method, "drafter": args.drafter}
    row |= {"differ": differ.total(), "ends": dict(Counter(result.finish_reason for result in results))}
    row |= sums([result.figures for result in results])
    row |= {"seconds": round(seconds, 1), "seconds_alone": round(alone_seconds, 1), "threads": torch.get_num_threads()}
    print(json.dumps(row))
    return 1 if differ else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
