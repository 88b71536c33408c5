"""Measure what a trained head for the shipped model accepts: tokens per pass of chains, trees and `auto`.

    python bench/head_acceptance.py --head HEAD [--lengths 512 2048 8000] [--prompts 8] [--tokens 64] [--window 512]

Prints a line of JSON for each text length: the mean accepted length on held-out prompts that follow a text of that
length, with and without --window; and the speed of `auto` as a multiple of plain decoding's, the median over the
prompts, without prefill.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import chat_tokens, parse, run

from outpace.api.llm import LLM
from outpace.core.stats import merge_stats
from outpace.distill.prompts import builtin_prompts, is_held_out
from outpace.models.load import Loaded, load_draft, load_model

SETTINGS: dict[str, dict[str, Any]] = {
    "chain": {"method": "speculative", "draft_length": 4, "width": 1, "nodes": 5},
    "tree": {"method": "speculative", "draft_length": 4, "width": 4, "nodes": 24},
    "auto": {"method": "auto"},
}


def measure(
    target: Loaded, head: Path, questions: Sequence[Sequence[int]], tokens: int, options: dict[str, Any]
) -> tuple[float, float]:
    """Return the mean accepted length over greedy answers, each checked against plain decoding, and the speedup."""
    draft = load_draft(head, target)
    with LLM(target, draft, drafter=draft.drafter, profile=False, **options) as llm:
        asked: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True}
        drafted = [llm.generate([one], **asked)[0] for one in questions]
        plain = [llm.generate([one], plain=True, **asked)[0] for one in questions]
    if [one.tokens for one in drafted] != [one.tokens for one in plain]:
        raise SystemExit("a text differs from that of plain decoding")
    speedup = statistics.median(
        one.tokens_per_second / other.tokens_per_second for one, other in zip(drafted, plain, strict=True)
    )
    return merge_stats([one.figures for one in drafted]).mean_accepted_length, speedup


def main() -> None:
    """Run the command."""
    args = parse(__doc__, head=..., lengths=[512, 2048, 8000], window=512, prompts=8, tokens=64)
    target = load_model(None)
    asked = [text for text in builtin_prompts() if is_held_out(text)]
    asked = asked[:: max(1, len(asked) // args.prompts)][: args.prompts]
    before = target.tokenizer.encode("\n\n".join(text for text in builtin_prompts() if not is_held_out(text)))
    for length in args.lengths:
        questions = [chat_tokens(target, text) for text in asked]
        questions = [[*before[: max(0, length - len(one) - args.tokens)], *one] for one in questions]
        row: dict[str, Any] = {"length": length}
        for name, shape in SETTINGS.items():
            for label, window in ((name, 0), (f"{name}, window {args.window}", args.window)):
                found, speedup = measure(target, args.head, questions, args.tokens, {**shape, "head_window": window})
                row[label] = round(found, 2)
                if name == "auto":
                    row[f"{label}: speedup"] = round(speedup, 3)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    run(main)
