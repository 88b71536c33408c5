"""Compares rule `judge` with greedy speculation and `top_beta` on questions with right answers: a table and a plot.

For each rule: the share of right answers, the share whose final answer is the target's own, and tokens per target pass,
with 95 % intervals by bootstrap over questions. Chains of four drafted tokens, temperature 0, the shipped pair.

    python bench/judge_table.py --tasks questions/sums-test.jsonl --judge judge-sums --other judge-places --plot x.png
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from outpace import LLM, UserError
from outpace.api.prompt_file import read_prompt_file
from outpace.api.scoring import Reference, final_answer, is_right, read

RECALLS = (0.8, 0.9, 0.95, 0.99)
TOP_BETA = ((2, 0.5), (3, 1.0), (5, 3.0))
RESAMPLES = 2000
METHOD = {"method": "speculative", "draft_length": 4, "width": 1, "batch": 8, "reuse": False}
Figures = dict[str, np.ndarray]  # by name, one value for each question


def rules_of(own: Path, other: Path | None) -> dict[str, dict[str, Any]]:
    """Return the options of each rule by its label."""
    rules: dict[str, dict[str, Any]] = {"greedy": {"rule": "greedy"}}
    for name, judge in (("judge", own), ("other task's judge", other)):
        for recall in RECALLS if judge is not None else ():
            rules[f"{name}, {recall:g}"] = {"rule": "judge", "judge": str(judge), "recall": recall}
    for beta, tau in TOP_BETA:
        rules[f"top_beta, {beta}, {tau:g}"] = {"rule": "top_beta", "beta": beta, "tau": tau}
    return rules


def measure(options: dict[str, Any], texts: Sequence[str], references: Sequence[Reference], most: int) -> Figures:
    """Answer all questions by one rule."""
    with LLM(**METHOD, **options) as llm:
        results = llm.generate([[{"role": "user", "content": text}] for text in texts], max_tokens=most)
    pairs = list(zip(references, (result.text for result in results), strict=True))
    finals = [final_answer(*pair) for pair in pairs]
    return {
        "right": np.array([bool(is_right(*pair)) for pair in pairs], float),
        "final": np.array(finals, object),
        "tokens": np.array([len(result.tokens) for result in results], float),
        "passes": np.array([result.figures.passes for result in results], float),
        "relaxed": np.array([result.figures.relaxed for result in results], float),
    }


def interval(values: np.ndarray, weights: np.ndarray | None = None) -> tuple[float, float, float]:
    """Return the ratio of the sums (without weights: the mean) and its 95 % interval over resampled questions."""
    weights = np.ones_like(values) if weights is None else weights
    drawn = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(values[drawn].sum(1) / weights[drawn].sum(1), (0.025, 0.975))
    return float(values.sum() / weights.sum()), float(low), float(high)


def table_rows(measured: dict[str, Figures]) -> list[dict[str, Any]]:
    """Return the row of each rule."""
    own = measured["greedy"]["final"]
    return [
        {
            "rule": label,
            "right": interval(found["right"]),
            "same_answer": interval((found["final"] == own).astype(float)),
            "tokens_per_pass": interval(found["tokens"], found["passes"]),
            "relaxed": float(found["relaxed"].sum() / found["tokens"].sum()),
        }
        for label, found in measured.items()
    ]


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    table = Table("rule", "right", "target's final answer", "tokens per pass", "relaxed")
    for row in rows:
        shares = [f"{value:.2f} ({low:.2f} to {high:.2f})" for value, low, high in (row["right"], row["same_answer"])]
        value, low, high = row["tokens_per_pass"]
        table.add_row(row["rule"], *shares, f"{value:.2f} ({low:.2f} to {high:.2f})", f"{row['relaxed']:.0%}")
    Console(width=120).print(table)


def plot(named: dict[str, list[dict[str, Any]]], file: Path) -> None:
    """Draw the share of right answers over tokens per pass, one panel per task."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6 * len(named), 4.4), layout="constrained")
    for axes, (task, rows) in zip(figure.subplots(1, len(named), squeeze=False)[0], named.items(), strict=True):
        for kind, color in (("greedy", "k"), ("judge", "C0"), ("other task's judge", "C1"), ("top_beta", "C2")):
            own = [row for row in rows if row["rule"].partition(",")[0] == kind]
            x, y = (np.array([row[name] for row in own]) for name in ("tokens_per_pass", "right"))
            if own:
                spans = [np.abs(points[:, 1:] - points[:, :1]).T for points in (x, y)]
                axes.errorbar(x[:, 0], y[:, 0], spans[1], spans[0], "o-", color=color, label=kind, lw=1, elinewidth=0.5)
        axes.set_title(task, loc="left", fontsize=10)
        axes.set_xlabel("tokens per target pass")
        axes.set_ylabel("share of right answers")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(file, dpi=120)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=Path, nargs="+", required=True)
    parser.add_argument("--judge", type=Path, nargs="+", required=True, help="the judge of each task")
    parser.add_argument("--other", type=Path, nargs="*", default=[], help="for each task, the judge of another")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    named: dict[str, list[dict[str, Any]]] = {}
    for number, (task, judge) in enumerate(zip(args.tasks, args.judge, strict=True)):
        entries = read_prompt_file(task)[: args.prompts]
        texts = [entry["turns"][0] for entry in entries]
        references = [read(entry, text, str(task)) for entry, text in zip(entries, texts, strict=True)]
        rules = rules_of(judge, args.other[number] if number < len(args.other) else None)
        answer = partial(measure, texts=texts, references=references, most=args.max_tokens)
        name = f"{entries[0].get('task', task.stem)}, {len(texts)} questions"
        named[name] = table_rows({label: answer(options) for label, options in rules.items()})
        print(name)
        show(named[name])
        if args.plot:
            plot(named, args.plot)
    print(json.dumps(named))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
