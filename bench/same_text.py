"""Count differing texts: every method against plain decoding on real prompts, alone and batched, greedy and sampled.

Run: python bench/same_text.py --data FOLDER [--prompts 40] [--tokens 128] [--out FILE.jsonl]. FOLDER holds prompts as
docs/benchmarks.md describes them (mt_bench.jsonl, gsm8k.jsonl, humaneval.jsonl). Answers are appended to FILE; a
second run continues where the first stopped. The exit status is 1 if a text differs, or if a method drafted, accepted,
hit or missed nothing, because such a run proves nothing. The last line is JSON.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

from common import TASKS, append_row, finish, parse, read_prompts, read_rows, run, show
from rich.console import Console
from rich.progress import Progress

from outpace.api.llm import LLM, Result
from outpace.models.load import Loaded, load_draft, load_model

TASKS = TASKS[:3]
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {}, "temperature 0.8": {"temperature": 0.8, "seed": 7}}
METHODS: dict[str, dict[str, Any]] = {
    "autoregressive": {"method": "autoregressive"},
    "auto": {"method": "auto", "drafter": "model+ngram", "profile": False},
    "card": {"method": "card", "drafter": "model+ngram", "worker": "thread"},
    "card, process": {"method": "card", "drafter": "model+ngram", "worker": "process"},
    "planned, thread": {"method": "planned", "drafter": "model", "worker": "thread"},
    "planned, process": {"method": "planned", "drafter": "model", "worker": "process"},
    "planned, simulated": {"method": "planned", "drafter": "model", "worker": "inline"},
    "speculative chain": {"method": "speculative", "drafter": "model", "width": 1, "draft_length": 3},
    "speculative tree": {"method": "speculative", "drafter": "model+ngram", "width": 4, "draft_length": 3},
}
COUNTED = ("drafted", "accepted", "hits", "misses")


class Run:
    """Answers by all methods, appended to a file."""

    def __init__(self, target: Loaded, draft: Loaded, args: argparse.Namespace) -> None:
        self.target, self.draft, self.args = target, draft, args
        per_task = -(-args.prompts // len(TASKS))
        columns = [task.items() for task in read_prompts(args.data, TASKS, per_task, spread=False)]
        self.prompts = [prompt for group in zip(*columns, strict=False) for prompt in group][: args.prompts]
        self.rows: dict[tuple[str, str, str], dict[str, Any]] = {}
        for row in read_rows(args.out):
            self._note(row)

    def _note(self, row: dict[str, Any]) -> None:
        self.rows[row["method"], row["sampling"], row["prompt"]] = row

    def _keep(self, method: str, sampling: str, prompt: str, result: Result) -> None:
        figures = result.figures
        counts = {name: getattr(figures, name) for name in (*COUNTED, "passes")}
        row = {"method": method, "sampling": sampling, "prompt": prompt, "tokens": list(result.tokens), **counts}
        row |= {"by_kind": figures.by_kind, "tokens_per_second": round(result.tokens_per_second, 2)}
        self._note(append_row(self.args.out, row))

    def go(self, progress: Progress) -> None:
        """Write the missing answers: plain decoding one by one, the others by `--together`, then one batch."""
        total = len(self.args.methods) * len(SAMPLINGS) * len(self.prompts)
        task = progress.add_task("answers", total=total)
        for method in self.args.methods:
            options = METHODS[method]
            draft = None if method == "autoregressive" else self.draft
            with closing(LLM(self.target, draft, **options)) as llm:
                for name in SAMPLINGS:
                    at_once = 1 if method == "autoregressive" else self.args.together
                    for start in range(0, len(self.prompts), at_once):
                        group = self.prompts[start : start + at_once]
                        self._answer(llm, method, name, group)
                        progress.advance(task, len(group))
                    batch = self.prompts[: self.args.batch]
                    self._answer(llm, f"{method}, batch of {len(batch)}", name, batch)

    def _answer(self, llm: LLM, label: str, name: str, prompts: list[tuple[str, str]]) -> None:
        """Answer these prompts in one batch, unless the file has all of them."""
        if all((label, name, prompt) in self.rows for prompt, _ in prompts):
            return
        chats = [[{"role": "user", "content": text}] for _, text in prompts]
        results = llm.generate(chats, max_tokens=self.args.tokens, **SAMPLINGS[name])
        for (prompt, _), result in zip(prompts, results, strict=True):
            self._keep(label, name, prompt, result)

    def report(self) -> dict[str, Any]:
        """Print and return the counts by method and sampling; the reference is unbatched plain decoding."""
        groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        for (method, sampling, _), row in self.rows.items():
            groups[method, sampling].append(row)
        shown, differing, silent = [], 0, list[str]()
        for (method, sampling), rows in groups.items():
            differ = sum(row["tokens"] != self._plain(row) for row in rows)
            counts = {name: sum(row[name] for row in rows) for name in COUNTED}
            tokens, passes = sum(len(row["tokens"]) for row in rows), sum(row["passes"] for row in rows)
            row = {"method": method, "sampling": sampling, "texts": len(rows), "differ": differ, "tokens": tokens}
            shown.append(row | counts | {"tokens/pass": tokens / passes})
            differing += differ
            needed = () if method.startswith("autoregressive") else COUNTED[: 4 if method.startswith("card") else 2]
            silent += [f"{method}, {sampling}: no {name}" for name in needed if not counts[name]]
        show(shown, f"{self.target.name}, runtime {self.args.runtime}, exact mode {self.target.model.exact}", width=120)
        return {"differing": differing, "texts": len(self.rows), "proves_nothing": silent}

    def _plain(self, row: dict[str, Any]) -> list[int]:
        tokens: list[int] = self.rows["autoregressive", row["sampling"], row["prompt"]]["tokens"]
        return tokens


def main() -> int:
    """Run the command. The default draft is the target without some layers, so that it accepts most tokens."""
    layers = ",".join(str(layer) for layer in range(30) if layer not in range(12, 16))
    options: dict[str, Any] = {"data": ..., "prompts": 40, "tokens": 128, "batch": 8, "together": 1, "target": str}
    options |= {"methods": list(METHODS), "runtime": "llama", "draft": f"layers:{layers}"}
    args = parse(__doc__, choices={"methods": METHODS}, **options, out=Path("out/same_text.jsonl"))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    target = load_model(args.target, runtime=args.runtime)
    answers = Run(target, load_draft(args.draft, target), args)
    with Progress(console=Console(stderr=True)) as progress:
        answers.go(progress)
    verdict = answers.report()
    return finish(verdict, verdict["differing"] or verdict["proves_nothing"])


if __name__ == "__main__":
    run(main)
