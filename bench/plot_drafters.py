"""Draws what bench/all_drafters.py, or `outpace bench --json FILE`, measured of many drafters.

Run: python bench/plot_drafters.py FILE.json [--to docs/drafters.svg]
A line for each drafter: how much faster than plain decoding, and tokens a pass; a dot is a task, a bar all of them
together. Below, where that was measured: what was accepted by position, and tokens a pass by the prompts seen before.
Methods that differ by their drafter alone are called by it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

PLAIN, ALL = "autoregressive", "all"
GROUPS = {  # the tasks that share a colour
    "repetition": ("edit", "refactor", "document"),
    "code": ("humaneval",),
    "arithmetic": ("gsm8k", "mgsm_de", "mgsm_es", "mgsm_fr", "mgsm_zh"),
    "chat, questions, translation": ("mt_bench", "mt_bench 2", "qa", "translation"),
    "retrieved texts, summaries": ("rag", "summary"),
}
COLORS = ("#b5566b", "#4c6a92", "#d1793b", "#5a9a6f", "#8671a8")
LINES = ("#4c6a92", "#d1793b", "#5a9a6f", "#b5566b", "#8671a8", "#94754f", "#4fa3a5", "#b59f3b", "#7a7f87", "#333333")
FIELDS = {"speedup": "times plain decoding's speed", "mean_accepted_length": "tokens a pass"}
FEWEST, DEEPEST = 100, 10  # rounds behind a rate that is drawn; positions
SEEN = ((0, 1), (1, 3), (3, 6), (6, 10))  # prompts of a task, from the first on
PLACES = [f"{first + 1}" if last == first + 1 else f"{first + 1} to {last}" for first, last in SEEN]


def called(method: str) -> str:
    """`speculative:nodes=16,drafter=suffix` is suffix; auto stays what it is."""
    name, _, options = method.partition(":")
    drafter = next((o.removeprefix("drafter=") for o in options.split(",") if o.startswith("drafter=")), "")
    drafter = drafter if name != "auto" else drafter.replace("+prediction", "")
    return f"auto, {drafter}" if name == "auto" and drafter else drafter or name


def bars(axes: Any, rows: Sequence[Mapping[str, Any]], methods: Sequence[str], field: str) -> None:
    """One panel of all methods."""
    cells = {(row["method"], row["task"]): row[field] for row in rows}
    for place, method in enumerate(methods):
        axes.barh(place, cells[method, ALL], 0.72, color="#dfe2e7", zorder=1)
        axes.annotate(f"{cells[method, ALL]:.2f}", (0.06, place), va="center", fontsize=8, color="#333333")
        for color, (group, tasks) in zip(COLORS, GROUPS.items(), strict=True):
            found = [value for task in tasks if (value := cells.get((method, task))) is not None]
            label = group if not place else None
            axes.plot(found, [place] * len(found), "o", color=color, markersize=5, alpha=0.85, label=label, zorder=2)
    axes.axvline(1.0, color="#333333", linewidth=0.8)
    axes.set_yticks(range(len(methods)), [called(method) for method in methods])
    axes.set_xlim(left=0)
    axes.invert_yaxis()
    _dress(axes, FIELDS[field])


def positions(axes: Any, rows: Sequence[Mapping[str, Any]], styles: Mapping[str, Mapping[str, str]]) -> None:
    """What was accepted once those before it were, of all tasks together."""
    for row in rows:
        if row["task"] == ALL and row["method"] in styles:
            pairs = zip(row["acceptance_by_position"], row["reached_by_position"], strict=False)
            rates = [rate for rate, rounds in pairs if rounds >= FEWEST][:DEEPEST]
            style = styles[row["method"]]
            axes.plot(range(1, len(rates) + 1), rates, marker="o", markersize=3.5, label=called(row["method"]), **style)
    axes.set_ylim(0, 1)
    axes.set_xlabel("position in the draft", fontsize=9)
    _dress(axes, f"accepted, once those before it were ({FEWEST} rounds)")


def learnt(axes: Any, by_seen: Mapping[str, Sequence[float]], styles: Mapping[str, Mapping[str, str]]) -> None:
    """Tokens a pass by a prompt's place in its task."""
    for method, style in styles.items():
        values = by_seen.get(method, ())
        axes.plot(PLACES[: len(values)], values, marker="o", markersize=3.5, **style)
    axes.set_ylim(bottom=1)
    axes.set_xlabel("the prompt's place in its task", fontsize=9)
    _dress(axes, "tokens a pass, by the prompts seen before")


def _dress(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9, length=0)


def plot(rows: Sequence[Mapping[str, Any]], by_seen: Mapping[str, Sequence[float]], to: Path) -> None:
    """Two panels; four with what was seen."""
    pooled = {row["method"]: row["speedup"] for row in rows if row["task"] == ALL and row["method"] != PLAIN}
    methods = sorted(pooled, key=lambda method: -pooled[method])
    height = 0.42 * len(methods) + 1.5
    figure = Figure(figsize=(11, height + 4.2 * bool(by_seen)), layout="constrained")
    shape = {"height_ratios": (height, 4.0)} if by_seen else {}
    panels = figure.subplots(1 + bool(by_seen), 2, squeeze=False, **shape)
    for axes, field in zip(panels[0], FIELDS, strict=True):
        bars(axes, rows, methods, field)
    panels[0][1].set_yticklabels([])
    told = [method for method in methods if "guess=" not in method]  # who is told the answer is far above all others
    if by_seen:
        looks = [{"color": LINES[n % len(LINES)], "linestyle": "-" if n < len(LINES) else "--"} for n in range(99)]
        styles = dict(zip(told, looks, strict=False))
        positions(panels[1][0], rows, styles)
        learnt(panels[1][1], by_seen, styles)
        panels[1][1].legend(
            *panels[1][0].get_legend_handles_labels(),
            fontsize=7,
            frameon=False,
            loc="center left",
            bbox_to_anchor=(1, 0.5),
        )
    handles, names = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower left", ncols=len(names), frameon=False, fontsize=8)
    figure.savefig(to, dpi=150)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--to", type=Path, default=Path("docs/drafters.svg"))
    arguments = parser.parse_args()
    found = json.loads(arguments.file.read_text())
    rows = found["rows"] if isinstance(found, dict) else found
    plot(rows, found.get("seen", {}) if isinstance(found, dict) else {}, arguments.to)


if __name__ == "__main__":
    main()
