"""Interrupts at chosen moments of this thread."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

ANY_EVENT = ("call", "return", "c_call", "c_return", "c_exception")
TAKEN_EVENTS = ("call", "c_return")  # where a handler of signals may run; the others lie between two such places


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection in the block: an interrupt during the finalization of another test's object would be
    reported for that test."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Interrupt:
    """Raises KeyboardInterrupt at the `first`th start or end of a call, where the interpreter handles signals, and
    another one `then` lines later (0: none). `events` are the counted events of `sys.setprofile`."""

    def __init__(self, first: int, then: int = 0, events: Sequence[str] = ANY_EVENT) -> None:
        self._calls, self._lines, self._events, self.came = first, then, events, False

    def run(self, work: Callable[[], None]) -> None:
        with uncollected():
            sys.settrace(self._trace)
            sys.setprofile(self._profile)
            try:
                work()
            finally:
                sys.setprofile(None)
                sys.settrace(None)

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        self._calls -= event in self._events and frame.f_code is not Interrupt.run.__code__
        if self._calls < 0:
            self.came = True
            raise KeyboardInterrupt

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self.came and event == "line":
            self._lines -= 1
            if not self._lines:
                raise KeyboardInterrupt
        return self._trace
