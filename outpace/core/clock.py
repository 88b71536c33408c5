"""A clock that stands still while this process does: stopped, suspended, or frozen with its container or machine.

The system's own clock goes on meanwhile, so a limit that is measured by it is over when the process goes on, though
nobody had a chance to keep it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

TICK = 0.5  # seconds between two looks
MOST = 2.0  # seconds that count between two looks


class SuspendAwareClock:
    """Seconds since it was made in which this process could run. It has to be looked at every `TICK`, always by the
    same thread: what is longer than `MOST` between two looks counts as `MOST`."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._seen = (0.0, now())  # the seconds up to the last look, and when that was; one object, for other threads

    def time(self) -> float:
        """In any thread."""
        return self._counted(self._now())

    def look(self) -> float:
        """What `time` gives, noted."""
        now = self._now()
        counted = self._counted(now)
        self._seen = (counted, now)
        return counted

    def _counted(self, now: float) -> float:
        counted, last = self._seen
        return counted + min(now - last, MOST)


class Watchdog:
    """`with Patience(seconds, give_up):` calls `give_up` in a thread where the block takes more awake seconds."""

    def __init__(
        self, seconds: float, give_up: Callable[[], object], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds, self._give_up = seconds, give_up
        self._clock = SuspendAwareClock(now)
        self._is_over = threading.Event()

    def __enter__(self) -> None:
        threading.Thread(target=self._wait, name="patience", daemon=True).start()

    def __exit__(self, *error: object) -> None:
        self._is_over.set()

    def _wait(self) -> None:
        while (left := self._seconds - self._clock.look()) > 0.0:
            if self._is_over.wait(min(left, TICK)):
                return
        self._give_up()
