"""Timers of the event loop that ignore the time in which the process was suspended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from outpace.core.clock import TICK, SuspendAwareClock


class Timer:
    """Call a function once, in the event loop, after a number of seconds of the given clock."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, time: Callable[[], float], seconds: float, call: Callable[[], object]
    ) -> None:
        self._loop, self._time, self._call = loop, time, call
        self._due, self.has_fired = time() + seconds, False
        self._handle = loop.call_later(seconds, self._check)

    def _check(self) -> None:
        left = self._due - self._time()
        if left > 0.0:
            self._handle = self._loop.call_later(left, self._check)
        else:
            self.has_fired = True
            self._call()

    def cancel(self) -> None:
        self._handle.cancel()


class LoopClock:
    """A clock that the event loop updates between `begin` and `end`. It counts only time in which the process ran."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._clock = SuspendAwareClock(now)
        self.time = self._clock.time

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._tick()

    def end(self) -> None:
        self._handle.cancel()

    def after(self, seconds: float, call: Callable[[], object]) -> Timer:
        """Schedule a call."""
        return Timer(self._loop, self.time, seconds, call)

    def _tick(self) -> None:
        self._clock.look()
        self._handle = self._loop.call_later(TICK, self._tick)
