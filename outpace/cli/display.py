"""Output of the commands: streamed text, a summary line, JSON, and a progress bar while a model is loaded."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table

from outpace.cli import process

if TYPE_CHECKING:
    from outpace.api.stream import Result, Stream
    from outpace.api.text import Piece
    from outpace.cluster.remote_target import RemoteStream
    from outpace.core.stats import RoundStats

DRAFTED = "green"
GREY = "bright_black"


def stdout() -> Console:
    """Return a console for the results of a command."""
    return Console(highlight=False, markup=False)


def stderr() -> Console:
    """Return a console for everything else."""
    return Console(stderr=True, highlight=False, markup=False)


def say(text: str, style: str = GREY) -> None:
    """Print one line to stderr without wrapping it."""
    stderr().print(text, style=style, soft_wrap=True)


def say_recommended(sampling: Mapping[str, Any]) -> None:
    """Say which sampling parameters come from the model's files, if any do."""
    if sampling:
        named = ", ".join(f"{name} {value:g}" for name, value in sampling.items())
        say(f"sampling as the model's files recommend: {named}; --generation-config none turns it off")


def show_warnings_plainly() -> None:
    """Show each warning as one line, without its place in the code."""
    warnings.showwarning = lambda message, *place: say(f"warning: {message}", "yellow")


def print_json(value: Mapping[str, Any]) -> None:
    """Print one line of JSON to stdout."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def print_for_machines(value: Mapping[str, Any]) -> None:
    """Print a last line of JSON after a table, except on a terminal, where it would scroll the table away."""
    if not sys.stdout.isatty():
        print_json(value)


def show_rounds(rounds: Sequence[RoundStats]) -> None:
    """Print to stderr what the planner expected of each round, the result, and why it drafted no more."""
    table = Table(box=None, title_justify="left", title="rounds: expected by the planner, and measured")
    for column in ("round", "layer\nwidths", "rows", "expected\ntokens", "tokens", "expected\nms", "ms"):
        table.add_column(column, justify="right")
    table.add_column("why no more", min_width=24)
    for number, one in enumerate(rounds, 1):
        plan = one.plan
        widths = tokens = seconds = ""
        if plan is not None:
            widths = " ".join(map(str, plan.widths)) or "none"
            tokens, seconds = f"{plan.tokens:.2f}", f"{1e3 * plan.seconds:.1f}"
        why = "the method does not plan its rounds" if plan is None else plan.why
        measured = str(one.verified_rows), tokens, str(one.emitted), seconds, f"{1e3 * one.seconds:.1f}"
        table.add_row(str(number), widths, *measured, why)
    stderr().print(table)


def write_answer(stream: Stream | RemoteStream, show: Callable[[Piece], None]) -> bool:
    """Show each piece as it comes; return False if Ctrl-C ended the answer. Warnings are shown after it."""
    with warnings.catch_warnings(record=True) as caught, process.at_safe_points():
        with process.stopping(stream.abort):
            for piece in stream:
                show(piece)
        is_complete = not process.take()
    for warning in caught:
        say(f"warning: {warning.message}", "yellow")
    return is_complete


class TextPrinter:
    """Writes pieces to stdout at once; with `color`, accepted draft tokens in colour."""

    def __init__(self, color: bool = False) -> None:
        self._console, self._color, self._last = stdout(), color, "\n"

    def show(self, piece: Piece) -> None:
        self.write(piece.text, DRAFTED if self._color and piece.is_draft else None)

    def write(self, text: str, style: str | None = None) -> None:
        if text:
            shown = printable(text) if self._console.is_terminal else text
            self._console.out(shown, style=style, end="")
            self._console.file.flush()
            self._last = text[-1]

    def end(self) -> None:
        """End the current line, if any."""
        if self._last != "\n":
            self._console.out("")


def printable(text: str) -> str:
    """Remove control characters: a model may write escape sequences."""
    return "".join(sign for sign in text if sign in "\n\t" or (sign >= " " and not "\x7f" <= sign <= "\x9f"))


def figures(result: Result) -> dict[str, float | None]:
    """Return the statistics of an answer under the names that all commands use; None if unknown."""
    return {
        "tokens_per_second": round(result.tokens_per_second, 3),
        "time_to_first_token": round(result.time_to_first_token, 4) if result.tokens else None,
        "mean_accepted_length": round(result.figures.mean_accepted_length, 4),
        "draft_acceptance": rounded(result.figures.draft_acceptance),
        "hit_rate": rounded(result.figures.hit_rate),
    }


def rounded(value: float | None) -> float | None:
    """Round a number; None stays None."""
    return None if value is None else round(value, 4)


def percent(value: float | None) -> str:
    """Format a share."""
    return "-" if value is None else f"{value:.0%}"


def summary(result: Result, second: str = "") -> str:
    """Return the summary of an answer: tokens/s, `second`, mean accepted length, hit rate, and whether it was cut."""
    method = f"{result.method}{'' if result.lossless else ' (lossy)'}"
    if not result.tokens:
        return f"{method}: stopped before the first token"
    found = result.figures
    parts = [f"{result.tokens_per_second:.1f} tokens/s", second]
    if found.drafted or found.hits or found.misses:
        parts.append(f"mean accepted length {found.mean_accepted_length:.2f}")
    if found.hit_rate is not None:
        parts.append(f"hit rate {percent(found.hit_rate)}")
    ends = {"length": f"cut at {len(result.tokens)} tokens", "abort": "stopped"}
    parts.append(ends.get(result.finish_reason, ""))
    return f"{method}: " + ", ".join(part for part in parts if part)


@contextmanager
def loading_bar(quiet: bool = False, after: float = 0.5) -> Iterator[Callable[[str, float], None]]:
    """Yield a function that shows the progress of a stage; each call of it is a safe point for interrupts.

    The bar appears on stderr once the block takes longer than `after` seconds; never if `quiet` or without a terminal.
    """
    console = stderr()
    columns = (SpinnerColumn(), TextColumn("{task.description:<12}"), BarColumn())
    bar = Progress(*columns, console=console, transient=True)
    task, due = bar.add_task("", total=1.0), time.monotonic() + after

    def show(stage: str, fraction: float) -> None:
        process.check()
        if quiet or not console.is_terminal or time.monotonic() < due:
            return
        bar.update(task, description=stage if fraction < 1.0 else "preparing", completed=fraction)
        bar.start()

    with process.at_safe_points():
        try:
            yield show
        finally:
            if bar.live.is_started:
                bar.stop()
