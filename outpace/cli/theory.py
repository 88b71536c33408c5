"""`outpace theory`: possible speedups of a draft with a given acceptance and cost, by formulas."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from outpace.cli import display
from outpace.cli.flags import flag, flags, numbers
from outpace.cli.options import JSON
from outpace.core import theory as formulas
from outpace.core.errors import UserError, check_range, check_whole


@flags
def theory(
    acceptance: str = flag(
        "0.8",
        "Acceptance rate of a drafted token (alpha); or one for each position, with commas between them, as"
        " `outpace bench` reports them: the last one holds for all further positions.",
    ),
    drafts: str = flag(
        "",
        "Acceptance rates of the second, third, ... draft of one token, each after the earlier ones were rejected, with"
        " commas between them. They show the gain of several drafts of each token that follows a rejection.",
    ),
    cost: float = flag(0.1, "Cost coefficient (c): time of a draft step over that of a plain pass."),
    verify: float = flag(0.0, "Time that each further row adds to a pass, as a share of a plain pass."),
    stages: int = flag(1, "Number of stages, if the target runs in a pipeline (--pp-plan)."),
    hop: float = flag(0.0, "Time from each stage to the next, and from the last to the first, in plain passes."),
    lengths: int = flag(10, "Show draft lengths (gamma) up to this one."),
    as_json: bool = JSON,
) -> None:
    """Show possible gains of speculation: tokens a round, speedups by draft length, and their limits."""
    positions, others = _rates("acceptance", acceptance), _rates("drafts", drafts) if drafts else []
    for name, share in (("cost", cost), ("verify", verify)):
        check_range(name, share, 0.0, 100.0)
    check_whole("lengths", lengths, 1, 256)
    check_pipeline(stages, hop)
    rows = [_row(positions, gamma, cost, stages, hop, 1.0 + verify * gamma) for gamma in range(1, lengths + 1)]
    pipeline = {"pipeline": _pipeline(rows, cost, stages, hop, verify)} if hop else {}
    found = {
        "sequential_limit": formulas.tokens_per_rejection(positions),
        "parallel_limit": formulas.parallel_limit(cost),
    }
    limits = {name: value if value < float("inf") else None for name, value in found.items()}
    bounds = [_bound(positions, others[:count]) for count in range(len(others) + 1)]
    if as_json:
        shown = {"acceptance": positions, "cost": cost, "lengths": rows, "limits": limits, "bounds": bounds}
        display.print_json(shown | pipeline)
        return
    display.stdout().print(_table(rows))
    for name, value in pipeline.get("pipeline", {}).items():
        display.stdout().print(f"{name.replace('_', ' ')}: {value:.2f}")
    for name, limit in limits.items():
        display.stdout().print(f"{name.replace('_', ' ')}: {_speed(limit)}")
    for bound in bounds:
        count, rejections = bound["drafts"], 100 * bound["rejections_per_token"]
        title = f"with {count} free draft{'s' if count > 1 else ''} (Yin et al.)"
        speed = _speed(bound["ideal_speedup"])
        display.stdout().print(f"{title}: speedup {speed}, {rejections:.1f} rejections in 100 tokens")
    best = max(rows, key=lambda row: row["sequential_speedup"])
    display.say(
        f"best: {best['draft_length']} drafted tokens a round, {best['sequential_speedup']:.2f}x plain decoding"
    )


def _rates(name: str, text: str) -> list[float]:
    says = f"{name} is {text!r}, it must be numbers with commas between them, as in 0.8,0.7"
    rates: list[float] = numbers(text, float, says)
    for rate in rates:
        check_range(name, rate, 0.0, 1.0)
    return rates


def _bound(positions: list[float], others: list[float]) -> dict[str, Any]:
    """Return the bounds of Yin et al. for drafts without cost, with drafts of rates `others` too after a rejection."""
    first = formulas.any_acceptance([positions[0], *others])
    tokens = formulas.tokens_per_rejection([first, *(positions[1:] or positions)])
    ideal = tokens if tokens < float("inf") else None
    return {"drafts": 1 + len(others), "rejections_per_token": 1.0 / tokens, "ideal_speedup": ideal}


def _speed(limit: float | None) -> str:
    return "none" if limit is None else f"{limit:.2f}"


def check_pipeline(stages: int, hop: float) -> None:
    """Raise UserError unless these values describe a pipeline, or none (one stage, no hop)."""
    check_whole("stages", stages, 1, 1024)
    check_range("hop", hop, 0.0, 1e6)
    if hop and stages < 2:
        raise UserError(f"hop is {hop:g}, which needs a pipeline: name its stages with --stages")


def _pipeline(rows: list[dict[str, Any]], cost: float, stages: int, hop: float, verify: float) -> dict[str, float]:
    """Return the travel time of a pass, and what the best draft length saves of it and needs to break even."""
    best = max(rows, key=lambda row: row["sequential_speedup"])
    gamma = best["draft_length"]
    return {
        "travel_time": formulas.travel_time(stages, hop),
        "travel_time_saved_per_token": formulas.pipeline_saving(stages, hop, best["tokens"]),
        "break_even_tokens": formulas.pipeline_break_even(gamma, cost, stages, hop, 1.0 + verify * gamma),
    }


def _row(positions: list[float], gamma: int, cost: float, stages: int, hop: float, verify: float) -> dict[str, Any]:
    travel = formulas.travel_time(stages, hop)
    known = (positions + positions[-1:] * gamma)[:gamma]
    tokens = formulas.expected_tokens_by_position(known)
    return {
        "draft_length": gamma,
        "tokens": tokens,
        "sequential_speedup": formulas.pipeline_speedup(tokens, gamma, cost, stages, hop, verify),
        "pearl_speedup": formulas.pearl_tokens(positions, gamma) * (1.0 + travel) / max(gamma * cost, 1.0 + travel),
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("draft length", "tokens a round", "sequential speedup", "in parallel (PEARL)"):
        table.add_column(name, justify="right")
    best = max(rows, key=lambda row: row["sequential_speedup"])
    for row in rows:
        speeds = (row["tokens"], row["sequential_speedup"], row["pearl_speedup"])
        cells = [str(row["draft_length"]), *(f"{speed:.2f}" for speed in speeds)]
        table.add_row(*cells, style="bold" if row is best else "")
    return table
