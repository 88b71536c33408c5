"""Plot what CARD gains by the width of a draft step (the paper's K), where wider steps cost more.

Run: python bench/card_widths.py --trace pair.trace --draft-times 1:1.48,16:1.60,64:1.75 --out widths.png
     [--ratio 7] [--methods card,planned] [--widths 4,8,16,32,64,128,256] [--answers 12] [--nodes 32] [--rows FILE]
The trace is one of `outpace bench --trace`. `--draft-times` are measured times of a draft step by rows; a target pass
takes `--ratio` times as long as a draft step of one row, for any number of rows. Several `NAME=TIMES` are several lines
of the plot. Every point is printed and appended to `--rows`; points that this file already has are not simulated again.
Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import append_row, numbers, parse, read_rows, run

from outpace.api.plot import figure_for
from outpace.bench.plot import COLORS
from outpace.simulate import trace
from outpace.simulate.run import simulate
from outpace.simulate.setups import PLAIN, PassCosts, SetupSizes, parse_curve, setups
from outpace.simulate.trace import limit_trace

MAX_NODES = 16384  # of a tree: large, so that wide steps have room
PANELS = {"speedup": "speedup over plain decoding", "length": "tokens per pass", "hits": "hit rate"}
Row = dict[str, Any]


def measure(args: argparse.Namespace) -> list[Row]:
    """Simulate every method at every width and cost; return one row for each."""
    found: list[Row] = read_rows(args.rows)
    recorded = limit_trace(trace.load(args.trace), args.answers)
    for given in args.draft_times:
        label, _, times = given.rpartition("=")
        draft = parse_curve("draft-times", times)
        costs = PassCosts(label, lambda rows, draft=draft: args.ratio * draft(1), draft)
        for width in map(int, numbers(args.widths)):
            named = {setup.name: setup for setup in setups(SetupSizes(args.nodes, width, MAX_NODES))}
            for method in args.methods.split(","):
                key = {"draft": label, "method": method, "width": width}
                if any(key.items() <= row.items() for row in found):
                    continue
                setup = named.get(f"{method}-k{width}", named[method])
                *_, outcome = simulate(recorded, [named[PLAIN], setup], [costs])
                figures = outcome.figures
                row = key | {"speedup": outcome.speedup, "length": figures.mean_accepted_length}
                row |= {"hits": figures.hit_rate, "step": draft(width) / draft(1)}
                found.append(append_row(args.rows, row))
                print(json.dumps(row), flush=True)
    return found


def plot(rows: Sequence[Row], args: argparse.Namespace) -> None:
    """Draw a panel for each figure, with a line for each method and cost; the best width is marked."""
    with figure_for(args.out, 11, 4) as figure:
        peaks: list[float] = []
        lines = list(dict.fromkeys((row["method"], row["draft"]) for row in rows))
        for axes, (name, title) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
            for (method, draft), color in zip(lines, COLORS, strict=False):
                points = sorted((r["width"], r[name]) for r in rows if (r["method"], r["draft"]) == (method, draft))
                label = f"{method}, draft steps {draft}" if draft else method
                axes.plot(*zip(*points, strict=True), color=color, marker="o", markersize=3, label=label)
                if name == "speedup":
                    best = max(points, key=lambda point: point[1])
                    axes.plot(*best, color=color, marker="o", markersize=9, fillstyle="none")
                    below = any(abs(other - best[1]) < 0.3 for other in peaks)  # another curve's label is above
                    peaks.append(best[1])
                    place = (0, -16 if below else 7)
                    axes.annotate(f"{best[1]:.2f}", best, place, textcoords="offset points", ha="center", color=color)
            axes.set_xscale("log", base=2)
            widths = sorted({row["width"] for row in rows})
            axes.set_xticks(widths, list(map(str, widths)))
            axes.set_title(title)
            axes.set_xlabel("width of a draft step (K)")
            axes.margins(y=0.15)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=2)


def main() -> None:
    """Run the command."""
    options: dict[str, Any] = {"trace": ..., "out": ..., "draft_times": [""], "ratio": 7.0, "answers": int, "nodes": 32}
    args = parse(__doc__, **options, methods="card,planned", widths="4,8,16,32,64,128,256", rows=Path)
    plot(measure(args), args)


if __name__ == "__main__":
    run(main)
