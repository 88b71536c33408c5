"""CARD's own comparison, on one pair: every method at several ratios of times, by task, and what CARD's parts give.

Run: python bench/card_comparison.py --data FOLDER --out FOLDER [--prompts 6] [--tokens 128] [--ratios 2,3.5,7,15,30]
     [--methods card,planned] [--target MODEL] [--draft MODEL] [--to docs/card.png]
FOLDER holds gsm8k.jsonl, mgsm.jsonl and mt_bench.jsonl, one JSON object with "turns" a line, and a "language" in
mgsm.jsonl. A trace of the pair is recorded once (`outpace bench --trace`); then each method is simulated, and its rows
are kept in --out, so that what was stopped goes on and parts may run beside one another. --methods: these alone. Prints
the tables of what is there as markdown, and draws them with --to. `card-published` is left out unless it is named: so
wide a drafter takes the simulator hours.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from outpace.models.load import load_draft, load_model
from outpace.simulate import costs, report, run, trace
from outpace.simulate.run import LiveModels
from outpace.simulate.setups import PLAIN, Setup, SetupSizes, select_setups

LANGUAGES = ("de", "es", "fr", "zh")
METHODS = {  # of the first table and the plot
    "speculative-chain": "in turn, chain",
    "speculative-tree": "in turn, tree",
    "lookahead": "lookahead",
    "ouroboros": "Ouroboros",
    "auto": "auto",
    "pearl": "PEARL",
    "ssd": "SSD",
    "card-published": "CARD as published",
    "card": "CARD",
    "planned": "planned",
    "auto-ngram": "auto, n-grams too",
    "card-ngram": "CARD, n-grams too",
    "planned-ngram": "planned, n-grams too",
}
PARTS = {  # of the second: what is left out
    "card": "CARD",
    "card-no-correction": "without correction",
    "card-no-late": "without late nodes",
    "card-chain": "without the tree: verifies a chain",
    "card-no-b": "without B",
    "card-no-wait": "without waits",
    "planned": "planned",
    "planned-no-hits": "waits after misses alone",
    "planned-no-rests": "its drafter never rests",
}
COLORS = {"card": "#4c6a92", "planned": "#b5566b", "card-ngram": "#4c6a92", "planned-ngram": "#b5566b"}
GREY = "#a5aab1"

Rows = Mapping[str, Mapping[str, Any]]
"""Of one method, by ratio."""


def record(args: argparse.Namespace) -> Path:
    """The pair's trace: recorded, if it is not there."""
    file: Path = args.out / "pair.trace"
    if file.exists():
        return file
    args.out.mkdir(parents=True, exist_ok=True)
    every = [json.loads(line) for line in (args.data / "mgsm.jsonl").read_text(encoding="utf-8").splitlines()]
    tasks = [args.data / "gsm8k.jsonl"]
    for language in LANGUAGES:
        tasks.append(args.out / f"mgsm_{language}.jsonl")
        mine = [entry | {"task": f"mgsm_{language}"} for entry in every if entry["language"] == language]
        tasks[-1].write_text("".join(json.dumps(entry) + "\n" for entry in mine), encoding="utf-8")
    tasks.append(args.data / "mt_bench.jsonl")
    command = [sys.executable, "-m", "outpace", "bench", "--draft", args.draft, "--trace", str(file)]
    command += ["--target", args.target] if args.target else []
    command += ["--tasks", ",".join(map(str, tasks)), "--turns", "2", "--prompts", str(args.prompts)]
    subprocess.run([*command, "--max-tokens", str(args.tokens)], check=True)
    return file


def setups(names: Sequence[str]) -> list[Setup]:
    """The simulated ones."""
    every = {setup.name: setup for setup in select_setups(SetupSizes(), [], has_models=True)}
    return [every[name] for name in names]


def simulate(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Writes the rows of each method, unless they are there."""
    recorded, live = trace.load(record(args)), None
    prices = [costs.by_ratio(ratio) for ratio in costs.ratios(args.ratios)]
    for setup in setups(names):
        file = args.out / f"{setup.name}.json"
        if file.exists():
            continue
        if setup.is_live and live is None:
            target = load_model(args.target)
            live = LiveModels(recorded, target.model, load_draft(args.draft, target).model)
        found = run.simulate(recorded, [*setups([PLAIN]), setup], prices, live=live)
        rows = [row for row in report.as_rows(found) if row["method"] == setup.name]
        file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        print(setup.name, *(f"{row['speedup']:.3f}" for row in rows), file=sys.stderr, flush=True)


def known(folder: Path, names: Sequence[str]) -> dict[str, Rows]:
    """What was simulated, by method."""
    files = {name: folder / f"{name}.json" for name in names}
    return {
        name: {row["costs"]: row for row in json.loads(file.read_text(encoding="utf-8"))}
        for name, file in files.items()
        if file.exists()
    }


def table(titles: Mapping[str, str], found: Mapping[str, Rows], parts: bool) -> str:
    """Speeds over plain decoding by ratio; then what made them, at the middle ratio, with or without the tasks."""
    ratios = list(next(iter(found.values())))
    middle = ratios[len(ratios) // 2]
    tasks = [] if parts else list(next(iter(found.values()))[middle]["speedup_by_task"])
    heads = [*ratios, *(f"{task}, {middle}" for task in tasks), f"tokens a pass, {middle}", f"hits, {middle}"]
    lines = [f"| T_target / T_draft | {' | '.join(heads)} |", "|---" + "|--:" * len(heads) + "|"]
    for name, title in titles.items():
        if name not in found:
            continue
        rows, here = found[name], found[name][middle]
        cells = [f"{rows[ratio]['speedup']:.2f}" for ratio in ratios]
        cells += [f"{here['speedup_by_task'][task]:.2f}" for task in tasks]
        cells.append(f"{here['mean_accepted_length']:.2f}")
        cells.append("" if here["hit_rate"] is None else f"{here['hit_rate']:.0%}")
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(found: Mapping[str, Rows], file: Path) -> None:
    """Bars: every method at each ratio, and by task at the middle one."""
    names = [name for name in METHODS if name in found]
    ratios = list(found[names[0]])
    middle = ratios[len(ratios) // 2]
    tasks = list(found[names[0]][middle]["speedup_by_task"])
    panels = [(f"ratio {ratio}", [found[name][ratio]["speedup"] for name in names]) for ratio in ratios]
    panels += [
        (f"{task}, ratio {middle}", [found[name][middle]["speedup_by_task"][task] for name in names]) for task in tasks
    ]
    columns = max(len(ratios), len(tasks))
    figure = Figure(figsize=(2.0 + 1.75 * columns, 2 * (0.55 + 0.21 * len(names))), layout="constrained")
    grid = figure.subplots(2, columns, sharey=True, sharex=True)
    every = [*panels[: len(ratios)], *[None] * (columns - len(ratios)), *panels[len(ratios) :]]
    for axes, panel in zip(grid.flat, every, strict=False):
        if panel is None:
            axes.set_visible(False)
            continue
        title, values = panel
        bars = axes.barh(range(len(names)), values, color=[COLORS.get(name, GREY) for name in names], height=0.72)
        axes.bar_label(bars, [f"{value:.2f}" for value in values], padding=2, fontsize=7)
        axes.axvline(1.0, color="#555", linewidth=0.7)
        axes.set_title(title, fontsize=8, loc="left")
        axes.set_yticks(range(len(names)), [METHODS[name] for name in names], fontsize=8)
        axes.tick_params(labelsize=7, length=0)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.set_xticks([])
        axes.margins(x=0.22)
    grid.flat[0].invert_yaxis()
    figure.savefig(file, dpi=150)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--ratios", default="2,3.5,7,15,30")
    usual = [name for name in dict.fromkeys([*METHODS, *PARTS]) if name != "card-published"]
    parser.add_argument("--methods", default=",".join(usual))
    parser.add_argument("--to", type=Path)
    args = parser.parse_args()
    simulate(args, args.methods.split(","))
    found = known(args.out, list(dict.fromkeys([*METHODS, *PARTS])))
    print(table(METHODS, found, parts=False), end="\n\n")
    print(table(PARTS, found, parts=True))
    if args.to is not None:
        draw(found, args.to)


if __name__ == "__main__":
    main()
