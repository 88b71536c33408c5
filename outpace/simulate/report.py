"""Reports a simulation: a table for a terminal or Markdown, and rows for JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from outpace.simulate.run import Outcome
from outpace.simulate.setups import PLAIN, SetupSizes
from outpace.simulate.trace import Trace

if TYPE_CHECKING:
    from rich.table import Table


def _by_setup(outcomes: Iterable[Outcome]) -> list[list[Outcome]]:
    """Group outcomes by the setup's name."""
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.setup.name, []).append(outcome)
    return list(found.values())


def _details(rows: Sequence[Outcome]) -> list[list[str]]:
    """Return the columns besides the speedups, each with a text per ratio of times."""
    return [
        [f"{row.figures.mean_accepted_length:.2f}" for row in rows],
        [f"{row.rows_per_token:.1f}" for row in rows],
        [_percent(row.figures.hit_rate) for row in rows],
        [_percent(row.target_idle) for row in rows],
        [_percent(row.draft_idle) for row in rows],
    ]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _costs(outcomes: Iterable[Outcome]) -> list[str]:
    return list(dict.fromkeys(outcome.costs for outcome in outcomes))


def table(outcomes: Sequence[Outcome], title: str) -> Table:
    """Build the table of speedups by ratio of times, with figures of all ratios in one column each."""
    from rich import box
    from rich.table import Table

    made = Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    made.add_column("T_target /\nT_draft", min_width=12)
    for name in _costs(outcomes):
        made.add_column(name, justify="right", style="bold", no_wrap=True)
    for name in ("tokens\na pass", "rows a\ntoken", "hit\nrate", "target\nidle", "drafter\nidle"):
        made.add_column(name, justify="right")
    for rows in _by_setup(outcomes):
        is_plain = rows[0].setup.method == PLAIN
        details = ("1.00", "1.0", "", "", "") if is_plain else (" ".join(texts) for texts in _details(rows))
        made.add_row(_title(rows), *(f"{row.speedup:.2f}" for row in rows), *details)
    return made


def markdown(outcomes: Sequence[Outcome]) -> str:
    """Return the table as Markdown."""
    costs = _costs(outcomes)
    names = "tokens a pass | rows a token | hit rate | target idle | drafter idle"
    lines = [f"| T_target / T_draft | {' | '.join(costs)} | {names} |", "|---" * (len(costs) + 6) + "|"]
    for rows in _by_setup(outcomes):
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
