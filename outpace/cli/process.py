"""Ctrl-C: a command that has something to put in order takes it at safe points; elsewhere it ends the program at once.

At a safe point (between two rounds of an answer, between two stages of loading) nothing is half done. The handler of
the signal is the only state there is.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TextIO

import typer

from outpace.core.errors import UserError

INTERRUPTED = 130  # the exit status that a shell expects after Ctrl-C
_SHOW_CURSOR = b"\x1b[?25h"  # a bar hides it


class _Noted:
    """Takes the signal while a command runs at safe points. A second one, while the first waits, ends the program."""

    def __init__(self) -> None:
        self.is_pending = False
        self.stop: Callable[[], None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_pending:
            _die()
        self.is_pending = True
        if self.stop is not None:
            self.stop()


@contextmanager
def at_safe_points() -> Iterator[None]:
    """In the block an interrupt is noted. It becomes a KeyboardInterrupt at the next `check`, at the latest at the
    block's end, unless it was `taken`. A block within a block changes nothing."""
    noted, before = _Noted(), signal.getsignal(signal.SIGINT)
    if before not in (signal.SIG_DFL, signal.default_int_handler) or not _is_main_thread():
        yield
        return
    signal.signal(signal.SIGINT, noted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if noted.is_pending:
        raise KeyboardInterrupt


@contextmanager
def at_any_point() -> Iterator[None]:
    """In the block an interrupt is a KeyboardInterrupt wherever it comes, and one that was noted before is one now."""
    if taken():
        raise KeyboardInterrupt
    before = signal.getsignal(signal.SIGINT)
    if not (before is signal.SIG_DFL or isinstance(before, _Noted)) or not _is_main_thread():
        yield
        return
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def stopping(stop: Callable[[], None]) -> Iterator[None]:
    """In the block an interrupt that is noted calls `stop`, which returns at once; one that was noted before does so
    now."""
    if (noted := _noted()) is None:
        yield
        return
    noted.stop = stop
    try:
        if noted.is_pending:
            stop()
        yield
    finally:
        noted.stop = None


def check() -> None:
    """A safe point."""
    if (noted := _noted()) is not None and noted.is_pending:
        raise KeyboardInterrupt


def taken() -> bool:
    """Whether an interrupt was noted; with this it is forgotten."""
    if (noted := _noted()) is None or not noted.is_pending:
        return False
    noted.is_pending = False
    return True


def _noted() -> _Noted | None:
    """The handler of the block that runs, if there is one."""
    handler = signal.getsignal(signal.SIGINT)
    return handler if isinstance(handler, _Noted) else None


def _is_main_thread() -> bool:
    """The one that may set handlers."""
    return threading.current_thread() is threading.main_thread()


def _die() -> None:
    """Ends the program by the signal, as if it had no handler."""
    with suppress(OSError):
        if os.isatty(2):
            os.write(2, _SHOW_CURSOR)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.raise_signal(signal.SIGINT)


TERMINATED = 128 + signal.SIGTERM  # the exit status that a shell expects after it


@contextmanager
def as_interrupt() -> Iterator[None]:
    """In the block a SIGTERM is a KeyboardInterrupt. However the block takes that, the command then exits with
    TERMINATED."""
    came = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except (KeyboardInterrupt, typer.Exit):
        if not came:
            raise
    finally:
        signal.signal(signal.SIGTERM, before)
    if came:
        raise typer.Exit(TERMINATED)


class OutputError(UserError):
    """Standard output takes nothing more."""


class _Output(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(f"standard output cannot be written ({error.strerror})") from error


class _Errors(io.FileIO):
    """What cannot be said is left unsaid: there is nowhere to say so."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def prepare() -> None:
    """Once, before anything is said. OutputError where standard output is closed."""
    for number in range(3):
        with suppress(OSError):
            os.fstat(number)
            continue
        os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: no other file may get it
    sys.stderr = open(os.devnull, "w") if sys.stderr is None else _wrapped(sys.stderr, _Errors)  # noqa: SIM115
    if sys.stdout is None:
        raise OutputError("standard output is closed, there is nowhere to write to")
    sys.stdout = _wrapped(sys.stdout, _Output)


def silence() -> None:
    """Whatever is still to be written to standard output goes nowhere: the interpreter flushes it once more."""
    if sys.stdout is not None:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def reading() -> Iterator[TextIO]:
    """Standard input, for the block. UserError where it is closed, or holds no text."""
    if sys.stdin is None:
        raise UserError("standard input is closed, there is nothing to read from")
    if isinstance(sys.stdin, io.TextIOWrapper) and sys.stdin.errors == "surrogateescape":  # in the locale C.UTF-8
        with suppress(io.UnsupportedOperation):  # where it has been read from
            sys.stdin.reconfigure(errors="strict")
    try:
        yield sys.stdin
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not text in {error.encoding} (byte {error.start})") from error
    except OSError as error:
        raise UserError(f"standard input cannot be read ({error.strerror or error})") from error


def _wrapped(stream: TextIO, kind: type[io.FileIO]) -> TextIO:
    """The same file with another way to fail; a stream that is no plain file stays as it is."""
    file = getattr(getattr(stream, "buffer", None), "raw", None) or getattr(stream, "buffer", None)
    if type(file) is not io.FileIO:
        return stream
    stream.flush()
    raw = kind(file.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        stream.encoding,
        errors="replace",  # a terminal that cannot show a character is no reason to fail
        line_buffering=bool(stream.line_buffering),
    )
