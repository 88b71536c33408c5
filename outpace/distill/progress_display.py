"""What a running distillation shows: one line that changes on a terminal, a line every half minute elsewhere."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager
from datetime import timedelta

from rich.console import Console
from rich.live import Live
from rich.table import Table

QUIET = 30.0  # seconds between two lines where there is no terminal
NAMES = {
    "tokens": "tokens",
    "tokens_per_second": "tokens/s",
    "loss": "loss",
    "top1": "held-out agreement",
    "chain": "chain of 4",
    "tree": "tree of 16",
    "prompts": "prompts",
    "shards": "shards",
    "step": "step",
    "judged": "done",
    "dropped": "torn shards dropped",
    "seconds_left": "left",
}


class ProgressDisplay(AbstractContextManager["ProgressDisplay"]):
    """Takes a stage and its figures; the last value of every figure of a stage stays in sight."""

    def __init__(self, quiet: bool = False) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._live = Live(console=self._console, refresh_per_second=4) if sys.stderr.isatty() and not quiet else None
        self._quiet, self._stage, self._figures, self._said = quiet, "", dict[str, float](), 0.0

    def __enter__(self) -> ProgressDisplay:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, stage: str, figures: dict[str, float]) -> None:
        """Shows a stage's figures."""
        is_new = stage != self._stage
        if is_new:
            self._stage, self._figures = stage, {}
        self._figures |= figures
        if self._live is not None:
            self._live.update(self._table())
        elif not self._quiet and (is_new or "dropped" in figures or time.monotonic() - self._said >= QUIET):
            self._said = time.monotonic()
            shown = ", ".join(f"{name} {text}" for name, text in self._texts())
            self._console.print(f"{time.strftime('%H:%M:%S')} {stage}: {shown}", soft_wrap=True)

    def _texts(self) -> list[tuple[str, str]]:
        return [(NAMES[name], _shown(name, self._figures[name])) for name in NAMES if name in self._figures]

    def _table(self) -> Table:
        texts = self._texts()
        table = Table("", *(name for name, _ in texts), box=None, padding=(0, 2))
        table.add_row(self._stage, *(text for _, text in texts))
        return table


def _shown(name: str, value: float) -> str:
    if name == "seconds_left":
        return str(timedelta(seconds=round(value)))
    if name == "judged":
        return f"{value:.0%}"
    if name in ("tokens", "shards", "step", "dropped", "tokens_per_second"):
        return f"{value:,.0f}"
    return f"{value:.3f}"
