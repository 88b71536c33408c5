"""The second table: what theory predicts beside what was measured, and what the texts of lossy rules are worth."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from outpace.bench.figures import TableRow

GREY = "bright_black"
CAPTION = (
    "By position: tokens a round from the acceptance of each position; one chance: if all positions had the same."
    " By theory: the former over the time of drafting and of the pass alone. Relaxed: tokens that a lossy rule accepted"
    " and the exact rule would have rejected. Perplexity: of the text, by the target at temperature 1; a good text has"
    " plain decoding's. Right: of the answers whose reference is known."
)
Column = tuple[str, Callable[[TableRow], str]]


def table(found: Sequence[TableRow]) -> Table | None:
    """Those of the columns that have something to show; None where none has."""
    kept = [(name, show) for name, show in COLUMNS if any(show(row) != "-" for row in found)]
    if not any(name in _TELLING for name, _ in kept):
        return None
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1), caption_justify="left")
    made.add_column("method", overflow="fold", min_width=14, max_width=40)
    for name, _ in kept:
        made.add_column(name, justify="right", no_wrap=True)
    task = None
    for row in found:
        if row.task != task:
            made.add_section()
            made.add_row(Text(row.task, style=GREY))
            task = row.task
        made.add_row(Text("  " + row.label), *(show(row) for _, show in kept))
    made.caption = Text(CAPTION, style=GREY)
    return made


def _fixed(name: str, digits: int = 2, unit: str = "") -> Callable[[TableRow], str]:
    def show(row: TableRow) -> str:
        value = getattr(row, name)
        return "-" if value is None else f"{value:.{digits}f}{unit}"

    return show


def _share(row: TableRow) -> str:
    return "-" if row.relaxed is None else f"{row.relaxed:.0%}"


def _right(row: TableRow) -> str:
    return "-" if row.accuracy is None else f"{row.accuracy:.0%} of {row.scored}"


COLUMNS: tuple[Column, ...] = (
    ("accepted\nlength", _fixed("mean_accepted_length")),
    ("by\nposition", _fixed("predicted_length")),
    ("one\nchance", _fixed("constant_length")),
    ("speedup", _fixed("speedup", unit="x")),
    ("by\ntheory", _fixed("predicted_speedup", unit="x")),
    ("relaxed", _share),
    ("perplexity", _fixed("perplexity")),
    ("right", _right),
)
_TELLING = {name for name, _ in COLUMNS} - {"accepted\nlength", "speedup"}
