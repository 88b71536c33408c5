"""Reports a simulation: a table for a terminal, rows for JSON, and a plot by delay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.api.plot import figure_for
from outpace.core.stats import percent
from outpace.simulate.run import Outcome
from outpace.simulate.setups import SetupSizes
from outpace.simulate.trace import Trace

if TYPE_CHECKING:
    from rich.table import Table


DETAILS: tuple[tuple[str, Callable[[Outcome], str]], ...] = (  # columns of the wide table
    ("tokens/pass", lambda row: f"{row.figures.mean_accepted_length:.2f}"),
    ("rows/token", lambda row: f"{row.rows_per_token:.1f}"),
    ("hit rate", lambda row: percent(row.figures.hit_rate)),
    ("target idle", lambda row: percent(row.target_idle)),
    ("drafter idle", lambda row: percent(row.draft_idle)),
)


def _costs(outcomes: Iterable[Outcome]) -> list[str]:
    return list(dict.fromkeys(outcome.costs for outcome in outcomes))


def table(outcomes: Sequence[Outcome], title: str, is_wide: bool) -> Table:
    """Build the table of speedups: a column for each ratio of times, or with `is_wide` a row, with further figures."""
    from rich import box
    from rich.table import Table

    what = "speedup over plain decoding, by ratio T_target / T_draft"
    made = Table(title=f"{title}\n{what}", title_justify="left", box=box.SIMPLE_HEAD)
    made.add_column("method", overflow="fold")
    delays = ["delay"] if any(outcome.delay for outcome in outcomes) else []
    details = [name.replace(" ", "\n") for name, _ in DETAILS]
    for name in (*delays, *(("ratio", "speedup", *details) if is_wide else _costs(outcomes))):
        made.add_column(name, justify="right", no_wrap=True)
    by_setup: dict[tuple[str, float | None], list[Outcome]] = {}
    for outcome in outcomes:
        by_setup.setdefault((outcome.setup.name, outcome.delay), []).append(outcome)
    for (_, delay), rows in by_setup.items():
        lengths = dict.fromkeys(str(row.draft_length) for row in rows if row.draft_length)
        start = [rows[0].setup.title + (f", {'/'.join(lengths)} long" if lengths else "")]
        start += ["" if delay is None else f"{delay:g}" for _ in delays]
        if is_wide:
            for row in rows:
                made.add_row(*start, row.costs, f"{row.speedup:.2f}", *(show(row) for _, show in DETAILS))
        else:
            made.add_row(*start, *(f"{row.speedup:.2f}" for row in rows))
    return made


def conclusion(outcomes: Sequence[Outcome]) -> str:
    """Return a sentence with the fastest method at each ratio of times."""
    best: dict[str, Outcome] = {}
    for outcome in outcomes:
        if outcome.costs not in best or outcome.speedup > best[outcome.costs].speedup:
            best[outcome.costs] = outcome
    found = [f"{row.setup.title} at {costs} ({row.speedup:.2f}x)" for costs, row in best.items()]
    return f"fastest: {', '.join(found)}; all texts equal"


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
            "delay": outcome.delay,
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


def plot(outcomes: Sequence[Outcome], title: str, file: Path) -> None:
    """Plot the speedup by ratio of times; if there are several delays, by delay, with a panel for each ratio and dashed
    lines for methods without a delay."""
    costs = _costs(outcomes)
    has_delays = len({outcome.delay for outcome in outcomes if outcome.delay is not None}) > 1
    panels = costs if has_delays else [""]
    with figure_for(file, 4.2 * len(panels) + 2.2, 4.2, title) as figure:
        for axes, name in zip(figure.subplots(1, len(panels), squeeze=False, sharey=True)[0], panels, strict=True):
            for number, setup in enumerate(dict.fromkeys(outcome.setup.name for outcome in outcomes)):
                rows = [row for row in outcomes if row.setup.name == setup and name in ("", row.costs)]
                style = {"color": f"C{number}", "label": rows[0].setup.title}
                points = sorted((row.delay, row.speedup) for row in rows if row.delay is not None)
                if not has_delays:
                    axes.plot([row.costs for row in rows], [row.speedup for row in rows], marker="o", **style)
                elif points:
                    axes.plot(*zip(*points, strict=True), marker="o", **style)
                else:
                    if rows[0].figures.drafted:
                        style["label"] += ", no delay"
                    axes.axhline(rows[0].speedup, linestyle="--", **style)
            axes.set_title(f"T_target / T_draft {name}" if has_delays else "")
            axes.set_xlabel("delay one way, in target passes" if has_delays else "T_target / T_draft")
        figure.axes[0].set_ylim(bottom=0)  # after all panels, which share the axis, have set its top
        figure.axes[0].set_ylabel("speedup over plain decoding")
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper")
