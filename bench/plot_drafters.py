"""Draws what `outpace bench --json FILE` measured of many drafters: a line for each, a dot for each task.

Run: python bench/plot_drafters.py FILE.json [--to docs/drafters.svg]
Left: how much faster than plain decoding; right: tokens a pass. A dot is a task, a bar all of them together. Methods
that differ by their drafter alone are called by it.
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
    "chat, questions, translation": ("mt_bench", "qa", "translation"),
    "retrieved texts, summaries": ("rag", "summary"),
}
COLORS = ("#b5566b", "#4c6a92", "#d1793b", "#5a9a6f", "#8671a8")
FIELDS = {"speedup": "times plain decoding's speed", "mean_accepted_length": "tokens a pass"}


def called(method: str) -> str:
    """`speculative:nodes=16,drafter=suffix` is suffix; auto stays what it is."""
    name, _, options = method.partition(":")
    drafter = next((o.removeprefix("drafter=") for o in options.split(",") if o.startswith("drafter=")), "")
    return f"auto, {drafter}" if name == "auto" and drafter else drafter or name


def draw(axes: Any, rows: Sequence[Mapping[str, Any]], methods: Sequence[str], field: str) -> None:
    """One panel."""
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
    axes.set_title(FIELDS[field], fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9, length=0)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--to", type=Path, default=Path("docs/drafters.svg"))
    arguments = parser.parse_args()
    found = json.loads(arguments.file.read_text())
    rows = found["rows"] if isinstance(found, dict) else found
    pooled = {row["method"]: row["speedup"] for row in rows if row["task"] == ALL and row["method"] != PLAIN}
    methods = sorted(pooled, key=lambda method: -pooled[method])
    figure = Figure(figsize=(11, 0.42 * len(methods) + 1.5), layout="constrained")
    panels = figure.subplots(1, len(FIELDS), sharey=True)
    for axes, field in zip(panels, FIELDS, strict=True):
        draw(axes, rows, methods, field)
    panels[0].invert_yaxis()  # which both share
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower left", ncols=len(names), frameon=False, fontsize=8)
    figure.savefig(arguments.to, dpi=150)


if __name__ == "__main__":
    main()
