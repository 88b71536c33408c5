"""Output of the commands: streamed text, a summary line, JSON, and a progress bar while a model is loaded."""

from __future__ import annotations

import json
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table

from outpace.cli import process
from outpace.core.stats import percent, summarize

if TYPE_CHECKING:
    from pathlib import Path

    from outpace.api.stream import Result, Stream
    from outpace.api.text import Piece
    from outpace.cluster.remote_target import RemoteStream
    from outpace.core.stats import PlanEstimates, RoundStats

DRAFTED = "green"
GREY = "bright_black"


def stdout() -> Console:
    """Return a console for the results of a command."""
    return Console(highlight=False, markup=False)


def stderr() -> Console:
    """Return a console for everything else."""
    return Console(stderr=True, highlight=False, markup=False)


def print_sentence(text: str, style: str | None = None) -> None:
    """Print a sentence to stdout, wrapped at spaces on a terminal and in one line elsewhere."""
    console = stdout()
    console.print(text, style=style, soft_wrap=not console.is_terminal)


def say(text: str, style: str = GREY) -> None:
    """Print one line to stderr, wrapped at spaces on a terminal."""
    console = stderr()
    console.print(text, style=style, soft_wrap=not console.is_terminal)


@contextmanager
def saying_what_is_kept(folder: Path | None) -> Iterator[None]:
    """Say after an interrupt in the block what was kept: the folder in which the same command continues, or None if
    nothing is kept. It is said here, because the library of the command line hides the interrupt from the program."""
    try:
        yield
    except KeyboardInterrupt:
        kept = f"the same command continues in {folder}" if folder and folder.exists() else "nothing was stored"
        say(f"stopped; {kept}", "yellow")
        raise


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


def show_rounds(rounds: Sequence[RoundStats]) -> None:
    """Print to stderr how many rounds verified how many rows, then what the planner expected of each round, the result,
    and why it drafted no more."""
    groups = Counter(one.verified_rows for one in rounds)
    emitted = sum(one.emitted for one in rounds)
    by_rows = ", ".join(f"{count} of {rows} row{'s' if rows > 1 else ''}" for rows, count in sorted(groups.items()))
    experts = summarize(rounds).experts_per_pass
    ending = f"; experts per pass and layer: {experts:.1f}" if experts else ""
    say(f"{len(rounds)} rounds wrote {emitted} tokens: {by_rows}{ending}")
    title = "by round: measured, and in brackets what the planner expected"
    rows = list[tuple[str, ...]]()
    for number, one in enumerate(rounds, 1):
        plan, tokens, seconds = one.plan, str(one.emitted), f"{1e3 * one.seconds:.1f}"
        widths, why = "", "not planned by this method"
        if plan is not None:
            widths, why = " ".join(map(str, plan.widths)) or "none", plan.why
            tokens, seconds = f"{tokens} ({plan.tokens:.2f})", f"{seconds} ({1e3 * plan.seconds:.1f})"
        applied = [f"{one.experts:.1f}"] if experts else []
        rows.append((str(number), widths, str(one.verified_rows), *applied, tokens, seconds, why))
    table = Table(box=None, padding=(0, 1), title_justify="left", title=title)
    names = ("round", "widths", "rows", *(["experts"] if experts else []), "tokens", "ms")
    for name, *cells in zip(names, *rows, strict=False):
        table.add_column(name, justify="right", no_wrap=True, min_width=min(max(map(len, [name, *cells])), 14))
    room = stderr().width - sum((column.min_width or 0) + 2 for column in table.columns) - 2
    table.add_column("why no more", no_wrap=True, overflow="ellipsis", max_width=max(room, 12))
    for row in rows:
        table.add_row(*row)
    stderr().print(table)
    _show_estimates([one.plan and one.plan.estimates for one in rounds])


def _show_estimates(rounds: Sequence[PlanEstimates | None]) -> None:
    """Print to stderr what the plans were computed from, from each round in which levels or acceptance changed."""
    if not any(rounds):
        return
    title = "what levels were chosen by, from rounds in which it changed; times in ms"
    table = Table(box=None, padding=(0, 1), title_justify="left", title=title)
    for column in ("round", "requests", "levels", "plain", "pass", "step", "excess", "reading"):
        table.add_column(column, justify="right", no_wrap=True, min_width=len(column))
    table.add_column("accepted", no_wrap=True, overflow="ellipsis")
    last = None
    for number, one in enumerate(rounds, 1):
        if one is not None and (last is None or (one.levels, one.acceptance) != (last.levels, last.acceptance)):
            last = one
            times = one.plain_seconds, one.pass_seconds, one.step_seconds, one.excess_seconds, one.reading_seconds
            accepted = " ".join(f"{chance:.2f}" for chance in one.acceptance[:4])
            table.add_row(*map(str, (number, one.requests, one.levels)), *(f"{1e3 * x:.1f}" for x in times), accepted)
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
    """Writes pieces to stdout at once, thoughts in grey to stderr; with `color`, accepted draft tokens in colour. On a
    terminal, lines break at spaces, except in fenced code, and a word appears when it is complete."""

    def __init__(self, color: bool = False) -> None:
        self._console, self._color, self._last = stdout(), color, "\n"
        self._word: list[tuple[str, str | None]] = []  # parts of the word that is being written, with their styles
        self._column = 0
        self._is_code = False
        self._thoughts, self._is_thinking = stderr(), False

    @property
    def is_terminal(self) -> bool:
        return self._console.is_terminal

    def show(self, piece: Piece) -> None:
        if piece.reasoning:
            self._thoughts.out(printable(piece.reasoning), style=GREY, end="")
            self._is_thinking = True
        self.write(piece.text, DRAFTED if self._color and piece.is_draft else None)

    def write(self, text: str, style: str | None = None) -> None:
        if not text:
            return
        self._end_thought()
        self._last = text[-1]
        if not self._console.is_terminal:
            self._put(text, style)
        else:
            for part in re.findall(r"\n|[^\S\n]+|\S+", printable(text)):
                if part.isspace():
                    self._end_word()
                    fits = part == "\n" or self._is_code or self._column + cell_len(part) < self._console.width
                    self._put(part if fits else "", style)
                    self._column = 0 if part == "\n" else self._column + cell_len(part)
                else:
                    self._word.append((part, style))
        self._console.file.flush()

    def end(self) -> None:
        """End the current line, if any."""
        self._end_thought()
        self._end_word()
        if self._last != "\n":
            self._put("\n", None)
            self._column = 0

    def _end_word(self) -> None:
        """Write the word that is being held back, on a new line if it does not fit on this one."""
        if not self._word:
            return
        word = "".join(part for part, _ in self._word)
        width = cell_len(word)
        if self._column == 0 and word.startswith("```"):
            self._is_code = not self._is_code
        if self._column > 0 and self._column + width > self._console.width and not self._is_code:
            self._put("\n", None)
            self._column = 0
        for part, style in self._word:
            self._put(part, style)
        self._word, self._column = [], self._column + width

    def _put(self, text: str, style: str | None) -> None:
        self._console.out(text, style=style, end="")

    def _end_thought(self) -> None:
        if self._is_thinking:
            self._thoughts.out("")
        self._is_thinking = False


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


def summary(result: Result, second: str = "") -> str:
    """Return the summary of an answer: tokens/s, `second`, mean accepted length, hit rate, and whether it was cut."""
    method = f"{result.method}{'' if result.lossless else ' (lossy)'}"
    if not result.tokens:
        return f"{method}: stopped before the first token"
    found = result.figures
    count = len(result.tokens)
    parts = [f"{result.tokens_per_second:.1f} tokens/s" if count > 1 else "1 token", second]
    if found.drafted or found.hits or found.misses:
        parts.append(f"mean accepted length {found.mean_accepted_length:.2f}")
    if found.hit_rate is not None:
        parts.append(f"hit rate {percent(found.hit_rate)}")
    ends = {"length": f"cut at {count} tokens" if count > 1 else "cut", "abort": "stopped"}
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
