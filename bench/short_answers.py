"""Short answers: the whole time of an answer, its prompt's reading included, by `auto` over plain decoding.

Run: python bench/short_answers.py --data FOLDER [--tokens 16 32 64] [--prompts 6] [--rounds 5] [--save FILE.json]
FOLDER holds prompts as docs/benchmarks.md describes them. Three ways in turn on every prompt: plain decoding; `auto`
that knows no more of the machine than it times while it loads (a new LLM for every answer, no profile); `auto` that
begins with what an LLM before it learnt on other prompts. Nothing of one answer is reused by another. Medians by
prompt, pooled by the sums of the medians; the worst prompt beside it. One JSON line last; exit 1 where a text differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from outpace.api.llm import LLM
from outpace.core.errors import UserError
from outpace.models.files.pairs import shipped_draft
from outpace.models.load import Loaded, load_draft, load_model

TASKS = ("mt_bench", "gsm8k", "humaneval", "spec_bench")
PLAIN, NEW, KNOWING = "plain", "auto, new", "auto, profile"
Times = dict[tuple[str, int, str], list[float]]  # (way, tokens, prompt) -> seconds


def read_prompts(folder: Path, each: int) -> dict[str, str]:
    """The first user message of some prompts of every task, by id; `each` of a task, spread over its file."""
    found: dict[str, str] = {}
    for task in TASKS:
        file = folder / f"{task}.jsonl"
        if not file.is_file():
            raise UserError(f"no prompt file {file}, --data must name a folder with {', '.join(TASKS)} (.jsonl)")
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        found |= {str(row["id"]): row["turns"][0] for row in rows[:: max(1, len(rows) // each)][:each]}
    return found


def shipped_pair() -> tuple[Loaded, Loaded]:
    """The shipped model and its draft."""
    target = load_model(None)
    return target, load_draft(shipped_draft(target.name), target)


def end(row: dict[str, Any], differing: int) -> NoReturn:
    """The line for machines, which is the last; exit 1 where texts differ."""
    print(json.dumps(row))
    sys.exit(1 if differing else 0)


def new_llm(target: Loaded, draft: Loaded, method: str) -> LLM:
    """A new LLM over models that are loaded, which knows nothing of earlier answers."""
    own = None if method == "autoregressive" else draft
    return LLM(target, own, method=method, profile=False, reuse=False)


def as_prompt(target: Loaded, text: str) -> Any:
    """What a user's first message becomes."""
    return target.tokenizer.chat([{"role": "user", "content": text}])


class Race:
    """All ways on the same prompts, in turn."""

    def __init__(self, target: Loaded, draft: Loaded, texts: dict[str, str]) -> None:
        self.target, self.draft = target, draft
        self.prompts = {name: as_prompt(target, text) for name, text in texts.items()}
        self.times: Times = defaultdict(list)
        self.texts: dict[tuple[int, str], tuple[int, ...]] = {}
        self.differing = 0
        self.learnt: dict[str, Any] = {}

    def learn(self, tokens: int = 96) -> None:
        """What a profile would hold, from answers to the second half of the prompts' reverse order."""
        with self.open("auto") as llm:
            for prompt in list(self.prompts.values())[::-4]:
                llm.generate([prompt], max_tokens=tokens)
            drafter = llm.engine.drafting.drafter
            self.learnt = {"costs": llm.engine.costs.remember(), "drafter": drafter.remember() if drafter else None}

    def open(self, method: str) -> LLM:
        """A new LLM over the models that are loaded."""
        return new_llm(self.target, self.draft, method)

    def answer(self, way: str, name: str, tokens: int) -> None:
        """One answer, timed from its submission to its end."""
        with self.open("autoregressive" if way == PLAIN else "auto") as llm:
            if way == KNOWING:
                llm.engine.costs.recall(self.learnt["costs"])
                drafter = llm.engine.drafting.drafter
                if drafter is not None:
                    drafter.recall(self.learnt["drafter"])
            result = llm.generate([self.prompts[name]], max_tokens=tokens)[0]
        self.times[way, tokens, name].append(result.seconds)
        self.differing += self.texts.setdefault((tokens, name), result.tokens) != result.tokens

    def go(self, lengths: Sequence[int], rounds: int, progress: Progress) -> None:
        """Every prompt by all ways in turn, each round beginning with another way."""
        ways = (PLAIN, NEW, KNOWING)
        task = progress.add_task("answers", total=rounds * len(lengths) * len(self.prompts) * len(ways))
        for turn in range(rounds):
            for name in self.prompts:
                for tokens in lengths:
                    for way in (*ways[turn % 3 :], *ways[: turn % 3]):
                        self.answer(way, name, tokens)
                        progress.advance(task)

    def ratios(self, way: str, tokens: int) -> tuple[float, dict[str, float]]:
        """Plain decoding's time over this way's: pooled, and by prompt."""
        mine = {name: median(self.times[way, tokens, name]) for name in self.prompts}
        plain = {name: median(self.times[PLAIN, tokens, name]) for name in self.prompts}
        return sum(plain.values()) / sum(mine.values()), {name: plain[name] / mine[name] for name in mine}


def report(race: Race, lengths: Sequence[int]) -> dict[str, Any]:
    """The table for people; the figures for machines."""
    table = Table("tokens", "way", "pooled", "median", "worst", "worst prompt", "prompts below .95")
    figures: dict[str, Any] = {"differing": race.differing, "prompts": len(race.prompts)}
    for tokens in lengths:
        for way in (NEW, KNOWING):
            pooled, each = race.ratios(way, tokens)
            worst = min(each, key=each.__getitem__)
            below = sum(ratio < 0.95 for ratio in each.values())
            middle = median(each.values())
            cells = (f"{pooled:.2f}x", f"{middle:.2f}x", f"{each[worst]:.2f}x", worst, str(below))
            table.add_row(str(tokens), way, *cells)
            figures[f"{way}, {tokens}"] = {"pooled": round(pooled, 3), "worst": round(each[worst], 3), "below": below}
    Console(width=120).print(table)
    return figures


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--prompts", type=int, default=6, help="of each task")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", type=Path, help="a file for all times")
    args = parser.parse_args()
    texts = read_prompts(args.data, args.prompts)
    race = Race(*shipped_pair(), texts)
    race.learn()
    with Progress(console=Console(stderr=True)) as progress:
        race.go(args.tokens, args.rounds, progress)
    figures = report(race, args.tokens)
    if args.save:
        rows = [{"way": w, "tokens": t, "prompt": p, "seconds": s} for (w, t, p), s in race.times.items()]
        args.save.write_text(json.dumps(rows), encoding="utf-8")
    end(figures, race.differing)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
