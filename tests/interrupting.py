"""Interrupts at chosen moments of what runs in this thread."""

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
    """No garbage is collected in the block, so that no interrupt comes while another test's object is: there it would
    be reported as that test's, and leave the object half finalized."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Interrupt:
    """Raises a KeyboardInterrupt at the `first`th beginning or end of a call, which is where the interpreter takes it,
    and another one `then` lines later (0: none). `events`: those of `sys.setprofile` that count."""

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
