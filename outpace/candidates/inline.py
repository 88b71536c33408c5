"""The drafter on a simulated clock: deterministic, for tests and for planning two devices on one machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from outpace.candidates.base import Worker
from outpace.candidates.cache import CandidateCache, Layer
from outpace.candidates.loop import DraftLoop, Message
from outpace.core.types import Drafter

T = TypeVar("T")


@dataclass
class SimulatedClock:
    """Seconds that each thing takes: one forward of the drafter, one pass of the target over n rows."""

    draft_seconds: Callable[[], float] = lambda: 1.0
    target_seconds: Callable[[int], float] = lambda rows: 4.0
    now: float = 0.0


class InlineWorker(Worker):
    """Draft forwards that finish before the clock reaches the end of the target's pass are published during it.

    A forward that a correction overtakes is published all the same, when it ends: its nodes then meet dead parents.
    """

    def __init__(self, drafter: Drafter, clock: SimulatedClock | None = None) -> None:
        super().__init__()
        self._loop = DraftLoop(drafter)
        self.clock = clock or SimulatedClock()
        self._running: tuple[float, list[tuple[int, Layer]]] | None = None  # its end, its layers

    def beside(self, target_pass: Callable[[], T], rows: int) -> T:
        result = target_pass()
        end = self.clock.now + self.clock.target_seconds(rows)
        while self._is_running() and self._finish_time() <= end:
            self._finish()
        self.clock.now = end
        return result

    def wait(self, cache: CandidateCache, layers: int) -> None:
        for _ in range(2 * layers):  # a forward for an older tree may be under way, or other requests' turn
            if cache.layers >= layers or not self._is_running():
                return
            self._finish()

    def close(self) -> None:
        self._running = None

    def _post(self, message: Message) -> None:
        if self.failure is None:
            self._loop.mail.put(message)

    def _is_running(self) -> bool:
        """Whether the drafter has a forward under way; it starts one if it can."""
        if self._running is None and self.failure is None:
            self._start()
        return self._running is not None

    def _finish_time(self) -> float:
        return self._running[0] if self._running else self.clock.now

    def _finish(self) -> None:
        """Publishes the forward under way and moves the clock to its end."""
        if self._running:
            finish, layers = self._running
            self._publish(layers)
            self._running = None
            self.clock.now = max(self.clock.now, finish)

    def _start(self) -> None:
        try:
            layers = self._loop.grow()
        except Exception as failure:
            self.failure = failure
            return
        if layers:
            self._running = (self.clock.now + self.clock.draft_seconds(), layers)
