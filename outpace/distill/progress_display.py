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
COUNT, SHARE = ",.0f", ".3f"
NAMES = {  # and formats
    "tokens": ("tokens", COUNT),
    "tokens_per_second": ("tokens/s", COUNT),
    "loss": ("loss", SHARE),
    "top1": ("held-out agreement", SHARE),
    "chain": ("chain of 4", SHARE),
    "tree": ("tree of 16", SHARE),
    "prompts": ("prompts", SHARE),
    "questions": ("questions", COUNT),
    "mismatches": ("mismatches", COUNT),
    "important": ("important", COUNT),
    "shards": ("shards", COUNT),
    "step": ("step", COUNT),
    "judged": ("done", ".0%"),
    "dropped": ("torn shards dropped", COUNT),
    "seconds_left": ("left", ""),
}


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
        texts = {
            label: format(self._figures[name], spec) if spec else str(timedelta(seconds=round(self._figures[name])))
            for name, (label, spec) in NAMES.items()
            if name in self._figures
        }
        if self._live is not None:
            table = Table("", *texts, box=None, padding=(0, 2))
            table.add_row(stage, *texts.values())
            self._live.update(table)
        elif not self._quiet and (is_new or "dropped" in figures or time.monotonic() - self._printed >= INTERVAL):
            self._printed = time.monotonic()
            shown = ", ".join(f"{name} {text}" for name, text in texts.items())
            self._console.print(f"{time.strftime('%H:%M:%S')} {stage}: {shown}", soft_wrap=True)
