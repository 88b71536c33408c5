"""Ctrl-C: a command that has something to put in order takes it at safe points; elsewhere it ends the program at once.

At a safe point (between two rounds of an answer, between two stages of loading) nothing is half done. The handler of
the signal is the only state there is.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

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
