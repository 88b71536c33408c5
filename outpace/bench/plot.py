"""Plots a bench: speed by task and method, acceptance by position, and speed against quality."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outpace.api.plot import INK, figure_for
from outpace.bench.contenders import baseline, is_lossy_label
from outpace.bench.figures import TableRow

COLORS = (
    *("#4c6a92", "#d1793b", "#5a9a6f", "#b5566b", "#8671a8", "#94754f", "#4fa3a5", "#b59f3b", "#7a7f87", "#333333"),
    *("#9db4d3", "#edb88f", "#a3cfb3", "#dba0ae", "#c3b6d8", "#c9b294"),
)
MAX_BARS = 24  # with more, only the bars of all tasks together are drawn
MIN_ROUNDS = 20  # rounds that an acceptance rate needs to be drawn
MAX_LABEL = 48  # characters of a name in the legend
QUALITY_TITLES = {
    "perplexity": "speed and perplexity of the text\n(hollow: lossy; line: plain decoding)",
    "accuracy": "speed and right answers\n(hollow: lossy; line: plain decoding)",
}
_JUDGE = re.compile(r"(?<=,judge=)[^,]*/(?=[^,/])")  # the parent folders of a judge


def plot(rows: Sequence[TableRow], facts: Mapping[str, Any], file: Path) -> None:
    """Write the picture in the format of the file's suffix. UserError without matplotlib or if writing fails."""
    single = [row for row in rows if row.batch == 1]
    colors = {label: COLORS[number % len(COLORS)] for number, label in enumerate(dict.fromkeys(r.label for r in rows))}
    tasks = list(dict.fromkeys(row.task for row in single))
    last = [row for row in single if row.task == tasks[-1]] if tasks else []
    drafting = [row for row in last if row.acceptance_by_position]
    if len(single) > MAX_BARS:
        single, tasks = last, tasks[-1:]
    bars = max(5.0, 0.34 * len(single) + 0.5 * len(tasks))
    measures = quality_measures(last)
    widths = [bars] + [4.6] * bool(drafting) + [5.4] * len(measures)
    with figure_for(file, sum(widths), 5.4, _title(facts)) as figure:
        panels = iter(figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0])
        _plot_speeds(next(panels), single, tasks, colors)
        if drafting:
            _plot_acceptance(next(panels), drafting, colors)
        for measure in measures:
            _plot_quality(next(panels), last, measure, colors)
        handles, names = figure.axes[0].get_legend_handles_labels()
        columns = max(1, int(sum(widths) / (0.6 + 0.08 * max(map(len, names), default=0))))
        figure.legend(handles, names, loc="outside lower left", ncols=columns)


def _title(facts: Mapping[str, Any]) -> str:
    draft = f", draft {'/'.join(Path(facts['draft']).parts[-2:])}" if facts.get("draft") else ""
    where = f"{facts['processor']}, threads {facts['threads']}, commit {facts['commit'] or 'unknown'}"
    return f"{Path(str(facts['target'])).name}{draft}\n{where}"


def _plot_speeds(axes: Any, rows: Sequence[TableRow], tasks: Sequence[str], colors: Mapping[str, str]) -> None:
    """Draw bars of tokens/s grouped by task, with the prompts' quartiles and the speedup above each bar."""
    start, ticks, tops = 0.0, [], [0.0]
    names = {label: _JUDGE.sub("", label) for label in colors}
    unnamed = {label: name if len(name) <= MAX_LABEL else "…" + name[1 - MAX_LABEL :] for label, name in names.items()}
    for task in tasks:
        bars = [row for row in rows if row.task == task]
        for number, row in enumerate(bars):
            place, height = start + number, row.tokens_per_second or 0.0
            hatch = "////" if row.is_peer else None
            label = unnamed.pop(row.label, None)
            axes.bar(place, height, 0.86, label=label, color=colors[row.label], hatch=hatch, edgecolor="white", lw=0)
            if row.quartiles:
                low, _, high = row.quartiles
                axes.plot([place, place], [low, high], color=INK)
                height = max(height, high)
            text = "" if row.speedup is None else f"{row.speedup:.2f}"
            text = text if row.prompts else "failed"
            axes.annotate(text, (place, height), (0, 3), textcoords="offset points", ha="center", fontsize=7)
            tops.append(height)
        ticks.append(start + (len(bars) - 1) / 2)
        start += len(bars) + 1.2
    axes.set_xticks(ticks, tasks)
    axes.set_xlim(-1, start - 1.2)
    axes.set_ylim(0, 1.12 * (max(tops) or 1))
    axes.set_title("tokens/s, decoding\n(bar: pooled; line: quartiles of prompts; figure: speedup)")
    axes.tick_params(axis="x", length=0)


def _plot_acceptance(axes: Any, rows: Sequence[TableRow], colors: Mapping[str, str]) -> None:
    """Draw acceptance by position; a line ends where fewer than MIN_ROUNDS rounds reached the position."""
    longest = 1
    for row in rows:
        pairs = zip(row.acceptance_by_position, row.reached_by_position, strict=True)
        rates = [rate for rate, rounds in pairs if rounds >= MIN_ROUNDS]
        longest, places = max(longest, len(rates)), range(1, len(rates) + 1)
        style = {"color": colors[row.label], "linestyle": "--" if row.is_peer else "-"}
        if rates:  # a line without points spoils the layout
            axes.plot(places, rates, marker="o", clip_on=False, **style)
    axes.set_ylim(0, 1)
    axes.set_xlim(0.7, longest + 0.3)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("position in the draft")
    axes.set_title(f"accepted, once those before it were\n({MIN_ROUNDS} rounds at least)")


def quality_measures(rows: Sequence[TableRow]) -> list[str]:
    """Return the measures worth a panel: none if all methods are lossless, or if every value is missing or 0."""
    if not any(_is_lossy(row) for row in rows):
        return []
    return [name for name in QUALITY_TITLES if sum(bool(getattr(row, name)) for row in rows) > 1]


def _plot_quality(axes: Any, rows: Sequence[TableRow], measure: str, colors: Mapping[str, str]) -> None:
    """Draw a point per method, speed against one quality measure; hollow points are lossy."""
    rows = [row for row in rows if getattr(row, measure) is not None and row.speedup is not None]
    points = [(row.speedup or 0.0, getattr(row, measure)) for row in rows]
    for row, (x, y) in zip(rows, points, strict=True):
        axes.plot(x, y, "o", color=colors[row.label], fillstyle="none" if _is_lossy(row) else "full", markersize=7)
        if row.label == baseline(row.label):
            axes.axhline(y, color=INK, linewidth=0.8, linestyle=":")
    axes.margins(0.2, 0.12)
    middle = sum(axes.get_xlim()) / 2
    for place, (point, row) in enumerate(sorted(zip(points, rows, strict=True), key=lambda pair: pair[0])):
        name = _JUDGE.sub("", row.label.partition("rule=")[2]) or row.label
        x, side = (-7, "right") if point[0] > middle else (7, "left")
        offset = x, (4, -4)[place % 2]  # so that names of neighbours do not overlap
        style: dict[str, Any] = {"fontsize": 7, "color": colors[row.label], "va": "center", "ha": side}
        axes.annotate(name, point, offset, textcoords="offset points", **style).set_in_layout(False)
    axes.set_xlabel("speedup over plain decoding")
    axes.set_ylabel("perplexity" if measure == "perplexity" else "share of right answers")
    axes.set_title(QUALITY_TITLES[measure])


def _is_lossy(row: TableRow) -> bool:
    return not row.is_peer and is_lossy_label(row.label)
