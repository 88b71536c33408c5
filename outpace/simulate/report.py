"""Reports a simulation: a table for a terminal or Markdown, rows for JSON, and a plot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.core.errors import UserError
from outpace.simulate.run import Outcome
from outpace.simulate.setups import PLAIN, SetupSizes
from outpace.simulate.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

COLOURS = {"card": "#2f6fb2", "part": "#a9c6e3", "published": "#e08a3c", "other": "#8a8f98"}


def by_setup(outcomes: Iterable[Outcome]) -> dict[str, list[Outcome]]:
    """Group outcomes by the setup's name."""
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.setup.name, []).append(outcome)
    return found


def _details(rows: Sequence[Outcome]) -> list[list[str]]:
    """Return the columns besides the speedups, each with a text per ratio of times."""
    return [
        [f"{row.figures.mean_accepted_length:.2f}" for row in rows],
        [f"{row.rows_per_token:.1f}" for row in rows],
        [_percent(row.figures.hit_rate) for row in rows],
        [_percent(row.target_idle) for row in rows],
        [_percent(row.draft_idle) for row in rows],
    ]


def table(outcomes: Sequence[Outcome], title: str) -> Table:
    """Build the table of speedups by ratio of times, with figures of all ratios in one column each."""
    from rich import box
    from rich.table import Table

    made = Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    made.add_column("T_target /\nT_draft", min_width=12)
    for name in dict.fromkeys(outcome.costs for outcome in outcomes):
        made.add_column(name, justify="right", style="bold", no_wrap=True)
    for name in ("tokens\na pass", "rows a\ntoken", "hit\nrate", "target\nidle", "drafter\nidle"):
        made.add_column(name, justify="right")
    for rows in by_setup(outcomes).values():
        is_plain = rows[0].setup.method == PLAIN
        details = ("1.00", "1.0", "", "", "") if is_plain else (" ".join(texts) for texts in _details(rows))
        made.add_row(_title(rows), *(f"{row.speedup:.2f}" for row in rows), *details)
    return made


def markdown(outcomes: Sequence[Outcome]) -> str:
    """Return the table as Markdown."""
    costs = list(dict.fromkeys(outcome.costs for outcome in outcomes))
    names = "tokens a pass | rows a token | hit rate | target idle | drafter idle"
    lines = [f"| T_target / T_draft | {' | '.join(costs)} | {names} |", "|---" * (len(costs) + 6) + "|"]
    for rows in by_setup(outcomes).values():
        details = ("" if "-" in texts else ", ".join(texts) for texts in _details(rows))
        cells = [_title(rows), *(f"{row.speedup:.2f}" for row in rows), *details]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def about(trace: Trace, sizes: SetupSizes, devices: int) -> dict[str, Any]:
    """Describe the trace and the sizes for JSON."""
    return {
        "target": trace.target,
        "draft": trace.draft,
        "answers": len(trace.answers),
        "tokens": trace.tokens,
        "top1": round(trace.acceptance(), 4),
        "nodes": sizes.nodes,
        "width": sizes.width,
        "devices": devices,
    }


def as_rows(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """Return the outcomes for JSON."""
    return [
        {
            "method": outcome.setup.name,
            "costs": outcome.costs,
            "ratio": round(outcome.ratio, 4),
            "speedup": round(outcome.speedup, 4),
            "speedup_by_task": {task: round(speedup, 4) for task, speedup in outcome.speedups.items()},
            "mean_accepted_length": round(outcome.figures.mean_accepted_length, 4),
            "hit_rate": None if outcome.figures.hit_rate is None else round(outcome.figures.hit_rate, 4),
            "hits": outcome.figures.by_kind,
            "acceptance_by_position": [round(rate, 4) for rate in outcome.figures.acceptance_by_position[:8]],
            "rows_a_token": round(outcome.rows_per_token, 4),
            "target_idle": round(outcome.target_idle, 4),
            "draft_idle": round(outcome.draft_idle, 4),
            "draft_length": outcome.draft_length,
            "tokens": outcome.tokens,
            "equal_text": True,  # another text raises an error
        }
        for outcome in outcomes
    ]


def _title(rows: Sequence[Outcome]) -> str:
    lengths = list(dict.fromkeys(str(row.draft_length) for row in rows if row.draft_length))
    return rows[0].setup.title + (f", {'/'.join(lengths)} long" if lengths else "")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def plot(outcomes: Sequence[Outcome], title: str, file: Path) -> None:
    """Plot a panel for each ratio, with speedups as bars and mean accepted lengths as numbers."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("the plot needs `pip install matplotlib`; leave out --plot for the table alone") from None
    costs = list(dict.fromkeys(outcome.costs for outcome in outcomes))
    kept = [outcome for outcome in outcomes if outcome.setup.method != PLAIN]
    names = list(by_setup(kept))
    figure = Figure(figsize=(3.0 + 3.3 * len(costs), 1.7 + 0.36 * len(names)), layout="constrained")
    panels = figure.subplots(1, len(costs), sharey=True, squeeze=False)[0]
    most = max((outcome.speedup for outcome in kept), default=1.0)
    for axes, cost in zip(panels, costs, strict=True):
        _panel(axes, [outcome for outcome in kept if outcome.costs == cost], most)
        axes.set_title(f"$T_\\mathrm{{target}}\\,/\\,T_\\mathrm{{draft}}$ = {cost}", fontsize=10, loc="left")
    panels[0].set_yticks(range(len(names)), [by_setup(kept)[name][0].setup.title for name in names])
    panels[0].invert_yaxis()
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    figure.supxlabel("speedup over plain decoding (grey: emitted tokens per target pass)", fontsize=9)
    try:
        figure.savefig(file, dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"the plot cannot be written to {file} ({error})") from error


def _panel(axes: Axes, outcomes: Sequence[Outcome], most: float) -> None:
    for place, outcome in enumerate(outcomes):
        axes.barh(place, outcome.speedup, height=0.66, color=COLOURS[_kind(outcome.setup.name)], zorder=2)
        axes.text(outcome.speedup + 0.015 * most, place, f"{outcome.speedup:.2f}", va="center", fontsize=9)
        length = f"{outcome.figures.mean_accepted_length:.2f}"
        axes.text(1.39 * most, place, length, va="center", ha="right", fontsize=8, color="#8a8f98")
    axes.axvline(1.0, color="#444444", linewidth=0.8, zorder=3)
    axes.set_xlim(0, 1.4 * most)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.25, zorder=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _kind(name: str) -> str:
    if not name.startswith("card"):
        return "other"
    return {"card": "card", "card-published": "published"}.get(name, "part")
