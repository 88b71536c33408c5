"""Timers of the event loop on the server's clock: one that falls due in a standstill of the process goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from outpace.core.clock import TICK, SuspendAwareClock


class Timer:
    """Calls once, in the loop, after so many seconds of the clock."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, time: Callable[[], float], seconds: float, call: Callable[[], object]
    ) -> None:
        self._loop, self._time, self._call = loop, time, call
        self._due, self.is_over = time() + seconds, False  # `is_over`: it has called
        self._handle = loop.call_later(seconds, self._look)

    def _look(self) -> None:
        left = self._due - self._time()
        if left > 0.0:
            self._handle = self._loop.call_later(left, self._look)
        else:
            self.is_over = True
            self._call()

    def cancel(self) -> None:
        self._handle.cancel()


class LoopClock:
    """The time in which the server could work, kept by its event loop from `begin` to `end`."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._clock = SuspendAwareClock(now)
        self.time = self._clock.time

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._look()

    def end(self) -> None:
        self._handle.cancel()

    def after(self, seconds: float, call: Callable[[], object]) -> Timer:
        """Calls once so many seconds have passed."""
        return Timer(self._loop, self.time, seconds, call)

    def _look(self) -> None:
        self._clock.look()
        self._handle = self._loop.call_later(TICK, self._look)
