"""Draws what `outpace simulate --width A,B,... --json FILE` found: what the width of a draft forward changes.

Run: python bench/plot_widths.py FILE.json --width 16 [--to docs/widths.png]
The width, the paper's K, is how many nodes the drafter expands in a forward. Panels: tokens a pass, hit rate, speed
over plain decoding; a line for each method and ratio. `--width` is the first one of the simulation, whose rows have
no number in their names.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

FIELDS = {
    "mean_accepted_length": "tokens a pass",
    "hit_rate": "hit rate",
    "speedup": "times plain decoding's speed",
}
COLORS = {"card": "#4c6a92", "planned": "#b5566b"}
STYLES = ("-", "--", ":")


class Line(NamedTuple):
    """One method at one ratio."""

    method: str
    ratio: str


def lines(rows: Sequence[Mapping[str, Any]], first: int) -> dict[Line, dict[int, Mapping[str, Any]]]:
    """The rows of methods that were simulated with several widths, by width."""
    found: dict[Line, dict[int, Mapping[str, Any]]] = defaultdict(dict)
    for row in rows:
        named = re.fullmatch(r"(card|planned)(?:-k(\d+))?", row["method"])
        if named:
            found[Line(named[1], row["costs"])][int(named[2] or first)] = row
    return found


def draw(axes: Any, found: Mapping[Line, Mapping[int, Mapping[str, Any]]], field: str) -> None:
    """One panel."""
    ratios = list(dict.fromkeys(line.ratio for line in found))
    for line, by_width in found.items():
        widths = sorted(by_width)
        values = [by_width[width][field] for width in widths]
        style = STYLES[ratios.index(line.ratio) % len(STYLES)]
        label = line.method if len(ratios) == 1 else f"{line.method}, ratio {line.ratio}"
        axes.plot(widths, values, style, marker="o", markersize=4, color=COLORS[line.method], label=label)
        for width, value in zip(widths, values, strict=True):
            above = line.method == "planned" if field != "hit_rate" else line.method == "card"
            place = (0, 6 if above else -12)
            axes.annotate(f"{value:.2f}", (width, value), place, textcoords="offset points", ha="center", fontsize=7)
    axes.set_xscale("log", base=2)
    every = sorted({width for by_width in found.values() for width in by_width})
    axes.set_xticks(every, [str(width) for width in every])
    axes.minorticks_off()
    axes.margins(x=0.08, y=0.16)
    axes.set_title(FIELDS[field], fontsize=9, loc="left")
    axes.set_xlabel("nodes a forward of the drafter (K)", fontsize=8)
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, length=2)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--to", type=Path, default=Path("docs/widths.png"))
    arguments = parser.parse_args()
    found = lines(json.loads(arguments.file.read_text()), arguments.width)
    figure = Figure(figsize=(10, 3.1), layout="constrained")
    for axes, field in zip(figure.subplots(1, len(FIELDS)), FIELDS, strict=True):
        draw(axes, found, field)
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower left", ncols=len(names), frameon=False, fontsize=8)
    figure.savefig(arguments.to, dpi=150)


if __name__ == "__main__":
    main()
