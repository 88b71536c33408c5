"""Measure short answers: the speedup of `auto` over plain decoding, prefill included.

Run: python bench/short_answers.py --data FOLDER [--tokens 16 32 64] [--prompts 6] [--rounds 5] [--save FILE.json]
FOLDER holds prompts as docs/benchmarks.md describes them. Each prompt is answered by three variants, interleaved:
plain decoding; `auto` in a new LLM without a saved profile; `auto` with the state that another LLM learnt on other
prompts. No cache is shared between answers. Speedups are ratios of the summed medians of all prompts; the worst prompt
is shown too. The last line is JSON; the exit status is 1 if texts differ.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from common import TASKS, chat_tokens, finish, parse, read_prompts, run, shipped_pair, show
from rich.console import Console
from rich.progress import Progress

from outpace.api.llm import LLM
from outpace.models.load import Loaded

PLAIN, NEW, KNOWING = "plain", "auto, new", "auto, profile"
Times = dict[tuple[str, int, str], list[float]]  # (variant, tokens, prompt) -> seconds


class Comparison:
    """Answers the same prompts by all variants, interleaved."""

    def __init__(self, target: Loaded, draft: Loaded, texts: dict[str, str]) -> None:
        self.target, self.draft = target, draft
        self.prompts = {name: chat_tokens(target, text) for name, text in texts.items()}
        self.times: Times = defaultdict(list)
        self.texts: dict[tuple[int, str], tuple[int, ...]] = {}
        self.differing = 0
        self.learnt: dict[str, Any] = {}

    def learn(self, tokens: int = 96) -> None:
        """Learn the state that a profile would save, from answers to every fourth prompt."""
        with self.open("auto") as llm:
            for prompt in list(self.prompts.values())[::-4]:
                llm.generate([prompt], max_tokens=tokens)
            drafter = llm.engine.drafting.drafter
            self.learnt = {
                "costs": llm.engine.costs.state_dict(),
                "drafter": drafter.capabilities.learnt.state_dict() if drafter else None,
            }

    def open(self, method: str) -> LLM:
        """Create an LLM over the loaded models without any learnt state."""
        draft = None if method == "autoregressive" else self.draft
        return LLM(self.target, draft, method=method, profile=False, reuse=False)

    def answer(self, variant: str, name: str, tokens: int) -> None:
        """Time one answer from its submission to its end."""
        with self.open("autoregressive" if variant == PLAIN else "auto") as llm:
            if variant == KNOWING:
                llm.engine.costs.load_state_dict(self.learnt["costs"])
                drafter = llm.engine.drafting.drafter
                if drafter is not None:
                    drafter.capabilities.learnt.load_state_dict(self.learnt["drafter"])
            result = llm.generate([self.prompts[name]], max_tokens=tokens)[0]
        self.times[variant, tokens, name].append(result.seconds)
        self.differing += self.texts.setdefault((tokens, name), result.tokens) != result.tokens

    def go(self, lengths: Sequence[int], rounds: int, progress: Progress) -> None:
        """Answer all prompts; each round starts with another variant."""
        variants = (PLAIN, NEW, KNOWING)
        task = progress.add_task("answers", total=rounds * len(lengths) * len(self.prompts) * len(variants))
        for turn in range(rounds):
            for name in self.prompts:
                for tokens in lengths:
                    for variant in (*variants[turn % 3 :], *variants[: turn % 3]):
                        self.answer(variant, name, tokens)
                        progress.advance(task)

    def ratios(self, variant: str, tokens: int) -> tuple[float, dict[str, float]]:
        """Return the speedups over plain decoding: of all prompts together, and by prompt."""
        mine = {name: median(self.times[variant, tokens, name]) for name in self.prompts}
        plain = {name: median(self.times[PLAIN, tokens, name]) for name in self.prompts}
        return sum(plain.values()) / sum(mine.values()), {name: plain[name] / mine[name] for name in mine}


def main() -> int:
    """Run the command."""
    args = parse(__doc__, data=..., tokens=[16, 32, 64], prompts=6, rounds=5, save=Path)
    texts = {name: text for task in read_prompts(args.data, TASKS, args.prompts) for name, text in task.items()}
    comparison = Comparison(*shipped_pair(), texts)
    comparison.learn()
    with Progress(console=Console(stderr=True)) as progress:
        comparison.go(args.tokens, args.rounds, progress)
    rows = []
    for tokens in args.tokens:
        for variant in (NEW, KNOWING):
            pooled, each = comparison.ratios(variant, tokens)
            worst = min(each, key=each.__getitem__)
            row = {"tokens": tokens, "variant": variant, "pooled": pooled, "median": median(each.values())}
            row |= {"worst": each[worst], "worst prompt": worst}
            rows.append(row | {"prompts below 0.95": sum(ratio < 0.95 for ratio in each.values())})
    show(rows)
    if args.save:
        times = [{"variant": v, "tokens": t, "prompt": p, "seconds": s} for (v, t, p), s in comparison.times.items()]
        args.save.write_text(json.dumps(times), encoding="utf-8")
    return finish({"differing": comparison.differing, "prompts": len(texts), "rows": rows}, comparison.differing)


if __name__ == "__main__":
    run(main)
