"""The plot: tokens a second by method and task, acceptance by position, and what several requests at once give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from outpace.bench.figures import TableRow
from outpace.bench.plot_quality import quality, worth
from outpace.core.errors import UserError

COLORS = (
    *("#4c6a92", "#d1793b", "#5a9a6f", "#b5566b", "#8671a8", "#94754f", "#4fa3a5", "#b59f3b", "#7a7f87", "#333333"),
    *("#9db4d3", "#edb88f", "#a3cfb3", "#dba0ae", "#c3b6d8", "#c9b294"),
)
MOST_BARS = 24  # with more only those of all tasks together are drawn
FEWEST = 20  # rounds behind a rate that is drawn
LONGEST = 48  # characters of a name in the legend
INK = "#333333"
PALE = "#c4c8ce"


def plot(found: Sequence[TableRow], facts: Mapping[str, Any], file: Path) -> None:
    """Writes a picture whose form its file's name tells. UserError where matplotlib is missing or cannot write it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("the plot needs `pip install matplotlib`; all else is written") from None
    alone = [row for row in found if row.batch == 1]
    colors = {label: COLORS[number % len(COLORS)] for number, label in enumerate(dict.fromkeys(r.label for r in found))}
    tasks = list(dict.fromkeys(row.task for row in alone))
    drafting = [row for row in alone if row.task == tasks[-1] and row.acceptance_by_position] if tasks else []
    has_batches = any(row.batch > 1 for row in found)
    if len(alone) > MOST_BARS:
        alone, tasks = [row for row in alone if row.task == tasks[-1]], tasks[-1:]
    bars = max(5.0, 0.34 * len(alone) + 0.5 * len(tasks))
    worths = worth([row for row in alone if row.task == tasks[-1]]) if tasks else []
    widths = [bars] + [4.6] * bool(drafting) + [4.2] * has_batches + [5.4] * len(worths)
    figure = Figure(figsize=(sum(widths), 5.4), layout="constrained")
    panels = list(figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0])
    _speeds(panels.pop(0), alone, tasks, colors)
    if drafting:
        _positions(panels.pop(0), drafting, colors)
    if has_batches:
        _batches(panels.pop(0), found, colors)
    for name in worths:
        axes = panels.pop(0)
        _dress(axes, quality(axes, [row for row in alone if row.task == tasks[-1]], name, colors))
    figure.suptitle(_title(facts), fontsize=11, color=INK, x=0.01, ha="left", linespacing=1.5)
    handles, names = figure.axes[0].get_legend_handles_labels()
    columns = max(1, int(sum(widths) / 2.6))
    figure.legend(handles, names, loc="outside lower left", ncols=columns, frameon=False, fontsize=9)
    try:
        figure.savefig(file, dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"the plot cannot be written to {file} ({error})") from error


def _title(facts: Mapping[str, Any]) -> str:
    inflated = f", INFLATED {facts['inflate']} times" if facts.get("inflate", 1) > 1 else ""
    draft = f", draft {'/'.join(Path(facts['draft']).parts[-2:])}" if facts.get("draft") else ""
    where = f"{facts['processor']}, threads {facts['threads']}, commit {facts['commit'] or 'unknown'}"
    return f"{Path(str(facts['target'])).name}{inflated}{draft}\n{where}"


def _speeds(axes: Any, found: Sequence[TableRow], tasks: Sequence[str], colors: Mapping[str, str]) -> None:
    """Bars with the quartiles of the prompts, grouped by task; the speedup over plain decoding above."""
    cells = {(row.task, row.label): row for row in found}
    start, ticks = 0.0, []
    shown: set[str] = set()
    for task in tasks:
        labels = [label for label in colors if (task, label) in cells]
        for place, label in enumerate(labels):
            row = cells[task, label]
            name = None if label in shown else _short(label)
            shown.add(label)
            _bar(axes, start + place, row, colors[label], name)
        ticks.append(start + (len(labels) - 1) / 2)
        start += len(labels) + 1.2
    axes.set_xticks(ticks, tasks)
    axes.set_xlim(-1, start - 1.2)
    top = max((max(row.tokens_per_second or 0, (row.quartiles or (0, 0, 0))[2]) for row in found), default=1) or 1
    axes.set_ylim(0, 1.12 * top)
    _dress(axes, "tokens/s, decoding (bar: pooled; line: quartiles of prompts; figure: speedup)")
    axes.tick_params(axis="x", length=0)


def _bar(axes: Any, place: float, row: TableRow, color: str, name: str | None) -> None:
    height = row.tokens_per_second or 0.0
    hatch = "////" if row.is_peer else None
    axes.bar(place, height, 0.86, color=color, label=name, hatch=hatch, edgecolor="white", linewidth=0)
    top = height
    if row.quartiles:
        low, _, high = row.quartiles
        axes.plot([place, place], [low, high], color=INK, linewidth=1.4, solid_capstyle="round")
        top = max(height, high)
    text = "failed" if not row.prompts else "" if row.speedup is None else f"{row.speedup:.2g}×"
    if row.speedup is not None and row.speedup < 10:
        text = f"{row.speedup:.2f}"
    axes.annotate(text, (place, top), (0, 3), textcoords="offset points", ha="center", fontsize=7, color=INK)


def _positions(axes: Any, found: Sequence[TableRow], colors: Mapping[str, str]) -> None:
    """Lines end where too few rounds came so far."""
    longest = 1
    for row in found:
        rates = [
            rate
            for rate, rounds in zip_longest(row.acceptance_by_position, row.reached_by_position)
            if rounds is None or rounds >= FEWEST
        ]
        longest, places = max(longest, len(rates)), range(1, len(rates) + 1)
        style = {"color": colors[row.label], "linestyle": "--" if row.is_peer else "-"}
        axes.plot(places, rates, marker="o", markersize=4, linewidth=1.6, clip_on=False, **style)
    axes.set_ylim(0, 1)
    axes.set_xlim(0.7, longest + 0.3)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("position in the draft", color=INK)
    _dress(axes, f"accepted, once those before it were ({FEWEST} rounds at least)")


def _batches(axes: Any, found: Sequence[TableRow], colors: Mapping[str, str]) -> None:
    """Tokens a second in all, over how many requests run at once."""
    ticks: set[int] = set()
    for label, color in colors.items():
        points = {row.batch: row.tokens_per_second for row in found if row.label == label and row.batch > 1}
        if points:
            counts = sorted(points)
            ticks |= set(counts)
            axes.plot(counts, [points[count] for count in counts], marker="o", markersize=4, linewidth=1.6, color=color)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(ticks), [str(count) for count in sorted(ticks)])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests at once", color=INK)
    _dress(axes, "tokens/s in all")


def _dress(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=9, color=INK, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(PALE)
    axes.tick_params(colors=INK, labelsize=9)
    axes.yaxis.grid(True, color=PALE, linewidth=0.5, alpha=0.7)
    axes.set_axisbelow(True)


def _short(label: str) -> str:
    return label if len(label) <= LONGEST else label[: LONGEST - 1] + "…"
