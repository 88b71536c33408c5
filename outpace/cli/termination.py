"""SIGTERM for commands that keep what is finished: taken as Ctrl-C is, with the exit status of its own."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer

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
