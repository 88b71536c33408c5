"""Signals and standard streams of the process.

A command handles Ctrl-C at safe points only, where nothing is half done: between two rounds of an answer, or two stages
of loading. The only state is the installed signal handler. Problems of standard streams become one sentence.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TextIO

import typer

from outpace.core.errors import UserError

INTERRUPTED = 130  # the exit status that shells expect after SIGINT
TERMINATED = 128 + signal.SIGTERM  # and after SIGTERM
_GRACE = 1.0  # seconds in which the main thread may end the program by an error of its own
_SHOW_CURSOR = b"\x1b[?25h"  # progress bars hide it


class _DeferredInterrupt:
    """A SIGINT handler that notes the signal for the next safe point. A second signal before that ends the program."""

    def __init__(self) -> None:
        self.is_pending = False
        self.stop: Callable[[], None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_pending:
            with suppress(OSError):
                if os.isatty(2):
                    os.write(2, _SHOW_CURSOR)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
        self.is_pending = True
        if self.stop is not None:
            self.stop()


def end_after_loss(error: Exception) -> None:
    """Print the error and end the program with status 1, unless it ends by itself in a second."""
    time.sleep(_GRACE)
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(1)


@contextmanager
def at_safe_points() -> Iterator[None]:
    """Defer interrupts in the block to the next `check`, at the latest to the block's end, unless `take` removes them.

    They become KeyboardInterrupt there. Nested blocks have no effect.
    """
    handler, before = _DeferredInterrupt(), signal.getsignal(signal.SIGINT)
    with _handled_by(handler, before in (signal.SIG_DFL, signal.default_int_handler)):
        yield
    if handler.is_pending:
        raise KeyboardInterrupt


@contextmanager
def at_any_point() -> Iterator[None]:
    """Raise KeyboardInterrupt wherever an interrupt occurs in the block, and at once for one that was deferred."""
    if take():
        raise KeyboardInterrupt
    is_default = signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    with _handled_by(signal.default_int_handler, is_default or _handler() is not None):
        yield


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], Any], may_replace: bool) -> Iterator[None]:
    """Handle interrupts in the block by `handler`, if it may replace the present one and this is the main thread."""
    if not may_replace or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, handler)
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def stopping(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop`, which must return at once, when an interrupt is deferred in the block, or was before it."""
    if (handler := _handler()) is None:
        yield
        return
    handler.stop = stop
    try:
        if handler.is_pending:
            stop()
        yield
    finally:
        handler.stop = None


def check() -> None:
    """Raise KeyboardInterrupt if an interrupt was deferred: a safe point."""
    if (handler := _handler()) is not None and handler.is_pending:
        raise KeyboardInterrupt


def take() -> bool:
    """Return whether an interrupt was deferred, and forget it."""
    if (handler := _handler()) is None or not handler.is_pending:
        return False
    handler.is_pending = False
    return True


def _handler() -> _DeferredInterrupt | None:
    handler = signal.getsignal(signal.SIGINT)
    return handler if isinstance(handler, _DeferredInterrupt) else None


@contextmanager
def sigterm_as_interrupt(status: int = TERMINATED) -> Iterator[None]:
    """Raise KeyboardInterrupt for a SIGTERM in the block; whatever handles it, the command exits with this status."""
    was_terminated = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal was_terminated
        was_terminated = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except (KeyboardInterrupt, typer.Exit):
        if not was_terminated:
            raise
    finally:
        signal.signal(signal.SIGTERM, before)
    if was_terminated:
        raise typer.Exit(status)


class OutputError(UserError):
    """Standard output cannot be written."""


class _Stream(io.FileIO):
    """A standard stream: errors of stdout are OutputErrors; stderr drops what cannot be written, for there is no other
    place to report it."""

    is_error = False  # whether it is stderr, whatever its number

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if self.is_error:
                return memoryview(data).nbytes
            if isinstance(error, BrokenPipeError):
                raise
            raise OutputError(f"standard output cannot be written ({error.strerror})") from error


def prepare_streams() -> None:
    """Replace closed or fragile standard streams. Raises OutputError if standard output is closed."""
    for number in range(3):
        with suppress(OSError):
            os.fstat(number)
            continue
        os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, so that no other file can get it
    sys.stderr = open(os.devnull, "w") if sys.stderr is None else _checked(sys.stderr, True)  # noqa: SIM115
    if sys.stdout is None:
        raise OutputError("standard output is closed, there is nowhere to write to")
    sys.stdout = _checked(sys.stdout, False)


def _checked(stream: TextIO, is_error: bool) -> TextIO:
    """Return the same stream over `_Stream`; a stream that is not a plain file stays as it is."""
    buffer = getattr(stream, "buffer", None)
    file = getattr(buffer, "raw", buffer)  # with PYTHONUNBUFFERED there is no buffer above the file
    if type(file) is not io.FileIO:
        return stream
    stream.flush()
    raw = _Stream(file.fileno(), "w", closefd=False)
    raw.is_error = is_error
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        stream.encoding,
        errors="replace",  # a terminal that cannot show a character must not end the command
        line_buffering=bool(stream.line_buffering),
    )


def silence_output() -> None:
    """Discard further output, which the interpreter would flush once more at its exit."""
    if sys.stdout is not None:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def standard_input() -> Iterator[TextIO]:
    """Give standard input to the block. Raises UserError if it is closed, unreadable, or not text."""
    if sys.stdin is None:
        raise UserError("standard input is closed, there is nothing to read from")
    if isinstance(sys.stdin, io.TextIOWrapper) and sys.stdin.errors == "surrogateescape":  # in the locale C.UTF-8
        with suppress(io.UnsupportedOperation):  # once it has been read from
            sys.stdin.reconfigure(errors="strict")
    try:
        yield sys.stdin
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not text in {error.encoding} (byte {error.start})") from error
    except OSError as error:
        raise UserError(f"standard input cannot be read ({error.strerror or error})") from error
