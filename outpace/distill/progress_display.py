"""Displays the progress of a distillation: a live line on a terminal, else a line every half minute."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta

from rich.console import Console
from rich.live import Live
from rich.table import Table

Figures = dict[str, float]
"""Figures of a stage by name; those in NAMES are displayed."""

Progress = Callable[[Figures], None]
"""Receives the figures of one stage."""

StageProgress = Callable[[str, Figures], None]
"""Receives the stage's name and its figures."""

INTERVAL = 30.0  # seconds between two lines without a terminal
NAMES = {
    "tokens": "tokens",
    "tokens_per_second": "tokens/s",
    "loss": "loss",
    "top1": "held-out agreement",
    "chain": "chain of 4",
    "tree": "tree of 16",
    "prompts": "prompts",
    "questions": "questions",
    "mismatches": "mismatches",
    "important": "important",
    "shards": "shards",
    "step": "step",
    "judged": "done",
    "bytes_per_token": "bytes/token",
    "dropped": "torn shards dropped",
    "seconds_left": "left",
}
COUNTS = {"tokens", "shards", "step", "dropped", "tokens_per_second", "bytes_per_token"}
COUNTS |= {"questions", "mismatches", "important"}


class ProgressDisplay(AbstractContextManager["ProgressDisplay"]):
    """Displays the latest value of each figure of the current stage on stderr."""

    def __init__(self, quiet: bool = False) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._live = Live(console=self._console, refresh_per_second=4) if sys.stderr.isatty() and not quiet else None
        self._quiet, self._stage, self._printed = quiet, "", 0.0
        self._figures: Figures = {}

    def __enter__(self) -> ProgressDisplay:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, stage: str, figures: Figures) -> None:
        is_new = stage != self._stage
        if is_new:
            self._stage, self._figures = stage, {}
        self._figures |= figures
        texts = {NAMES[name]: _format(name, self._figures[name]) for name in NAMES if name in self._figures}
        if self._live is not None:
            table = Table("", *texts, box=None, padding=(0, 2))
            table.add_row(stage, *texts.values())
            self._live.update(table)
        elif not self._quiet and (is_new or "dropped" in figures or time.monotonic() - self._printed >= INTERVAL):
            self._printed = time.monotonic()
            shown = ", ".join(f"{name} {text}" for name, text in texts.items())
            self._console.print(f"{time.strftime('%H:%M:%S')} {stage}: {shown}", soft_wrap=True)


def _format(name: str, value: float) -> str:
    if name == "seconds_left":
        return str(timedelta(seconds=round(value)))
    if name == "judged":
        return f"{value:.0%}"
    if name in COUNTS:
        return f"{value:,.0f}"
    return f"{value:.3f}"
