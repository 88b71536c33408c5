"""`outpace theory`: possible speedups of a draft with a given acceptance and cost, by formulas."""

from __future__ import annotations

from typing import Annotated, Any

from rich.table import Table

from outpace.cli import display
from outpace.cli.flags import flag
from outpace.cli.options import Json
from outpace.core.errors import UserError, check_range, check_whole


def theory(
    acceptance: Annotated[
        str,
        flag(
            "Acceptance rate of a drafted token (alpha); or one for each position, with commas between them, as"
            " `outpace bench` reports them: the last one holds for all further positions."
        ),
    ] = "0.8",
    cost: Annotated[float, flag("Cost coefficient (c): time of a draft step over that of a plain pass.")] = 0.1,
    verify: Annotated[float, flag("Time that each further row adds to a pass, as a share of a plain pass.")] = 0.0,
    overhead: Annotated[float, flag("Other time in a round, as a share of a plain pass.")] = 0.0,
    lengths: Annotated[int, flag("Show draft lengths (gamma) up to this one.")] = 10,
    as_json: Json = False,
) -> None:
    """Show possible gains of speculation: tokens a round, speedups by draft length, and their limits."""
    positions = _positions(acceptance)
    check_range("cost", cost, 0.0, 100.0)
    check_range("verify", verify, 0.0, 100.0)
    check_range("overhead", overhead, 0.0, 100.0)
    check_whole("lengths", lengths, 1, 256)
    rows = [_row(positions, gamma, cost, 1.0 + verify * gamma, overhead) for gamma in range(1, lengths + 1)]
    limits = _limits(positions[-1], cost)
    if as_json:
        display.print_json({"acceptance": positions, "cost": cost, "lengths": rows, "limits": limits})
        return
    display.stdout().print(_table(rows))
    for name, value in limits.items():
        title = name.replace("in_turn", "sequential").replace("_", " ")
        display.stdout().print(f"{title}: {'none' if value is None else f'{value:.2f}'}")


def _positions(text: str) -> list[float]:
    try:
        positions = [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"acceptance is {text!r}, it must be numbers with commas between them, as in 0.8,0.7") from None
    for position in positions:
        check_range("acceptance", position, 0.0, 1.0)
    return positions


def _row(positions: list[float], gamma: int, cost: float, verify: float, overhead: float) -> dict[str, Any]:
    from outpace.core import theory as formulas

    known = (positions + positions[-1:] * gamma)[:gamma]
    tokens = formulas.expected_tokens_by_position(known)
    return {
        "draft_length": gamma,
        "tokens": tokens,
        "in_turn": formulas.speedup(tokens, gamma, cost, verify, overhead),
        "in_parallel": formulas.pearl_speedup(positions[0], gamma, cost) if len(set(positions)) == 1 else None,
    }


def _limits(alpha: float, cost: float) -> dict[str, float | None]:
    from outpace.core import theory as formulas

    found = {"limit_in_turn": formulas.sequential_limit(alpha), "limit_in_parallel": formulas.parallel_limit(cost)}
    return {name: value if value < float("inf") else None for name, value in found.items()}


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("draft length", "tokens a round", "sequential speedup", "in parallel (PEARL)"):
        table.add_column(name, justify="right")
    best = max(rows, key=lambda row: row["in_turn"])
    for row in rows:
        parallel = "-" if row["in_parallel"] is None else f"{row['in_parallel']:.2f}"
        cells = [str(row["draft_length"]), f"{row['tokens']:.2f}", f"{row['in_turn']:.2f}", parallel]
        table.add_row(*cells, style="bold" if row is best else "")
    return table
