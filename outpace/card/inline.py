"""The drafter on a simulated clock: deterministic, for tests and to simulate two devices on one machine."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from outpace.card.cache import CandidateCache, CandidateLevel
from outpace.card.loop import Message, Open
from outpace.card.worker import ObservedModel, SameThreadWorker
from outpace.core.tree import TokenTree
from outpace.core.types import Drafter, Observation, Request

Levels = Sequence[tuple[int, CandidateLevel]]


@dataclass
class SimulatedClock:
    """Durations of a forward of the drafter and of a target pass over n rows, in seconds.

    `draft_seconds` is called after each forward, so it may depend on the forward's width. `shared`: target and drafter
    share one device and get half of it while both work. `delay`: seconds that a message between them takes.
    `target_busy`, `draft_busy`: seconds of work, as on a device alone.
    """

    draft_seconds: Callable[[], float] = lambda: 1.0
    target_seconds: Callable[[int], float] = lambda rows: 4.0
    now: float = 0.0
    shared: bool = False
    delay: float = 0.0
    target_busy: float = 0.0
    draft_busy: float = 0.0

    def run_target(self, rows: int) -> None:
        """Move the clock over a target pass while no drafter works."""
        seconds = self.target_seconds(rows)
        self.target_busy += seconds
        self.now += seconds


class InlineWorker(SameThreadWorker):
    """Runs the drafter on the simulated clock. Levels that reach the target before its pass ends are late candidates.

    A message or a level is under way for `clock.delay`, except the start of a request, which the drafter reads while
    the target reads the prompt. A forward that is running when a correction arrives is published at its end.
    """

    def __init__(self, drafter: Drafter, clock: SimulatedClock | None = None) -> None:
        super().__init__(drafter)
        self.clock = clock or SimulatedClock()
        self._sent = deque[tuple[float, Message]]()  # to the drafter, by time of arrival
        self._running: tuple[float, Levels] | None = None  # end of the forward, its levels
        self._arriving = deque[tuple[float, Levels]]()  # at the target

    @property
    def round_trip_seconds(self) -> float:
        return 2 * self.clock.delay

    def wrap_target(self, target: Any) -> Any:
        return ObservedModel(target, self._run_during)

    def _run_during(self, rows: int) -> None:
        """Move the clock over a target pass, and publish the levels that arrive during it."""
        clock, busy = self.clock, self.clock.draft_busy
        seconds = clock.target_seconds(rows)
        end = clock.now + seconds
        while self._publish_next(end):
            pass
        self._move_to(end)
        clock.target_busy += seconds
        if clock.shared:
            self._delay(clock.draft_busy - busy)

    def wait(self, cache: CandidateCache, levels: int, depth: int = 0) -> None:
        answer, left = self.clock.now + self.round_trip_seconds, 2 * max(levels, depth)
        # Levels for an older root or for other requests may come first; those before `answer` do not count.
        while left and not cache.has_grown(levels, depth) and self._publish_next():
            left -= self.clock.now >= answer

    def stop(self) -> None:
        self._running = None
        self._sent.clear()
        self._arriving.clear()

    def _post(self, message: Message) -> None:
        if isinstance(message, Open) or not (self.clock.delay or self._sent):
            super()._post(message)
        else:
            self._send(self._sent, message)

    def _send(self, queue: deque[tuple[float, Any]], message: Any) -> None:
        """Queue a message with the time of its arrival. Messages arrive in the order in which they are sent."""
        arrival = self.clock.now + self.clock.delay
        queue.append((max(arrival, queue[-1][0]) if queue else arrival, message))

    def _publish_next(self, end: float = math.inf) -> bool:
        """Move the clock to the next arrival of levels and publish them, unless that is after `end`; return whether
        there were any."""
        while not (self._arriving and self._arriving[0][0] <= self.clock.now):
            self._start()
            times = [queue[0][0] for queue in (self._arriving, () if self._running else self._sent) if queue]
            if self._running:
                times.append(self._running[0])
            if not times or min(times) > end:
                return False
            self._move_to(max(min(times), self.clock.now))
            if self._running and self._running[0] <= self.clock.now:
                self._send(self._arriving, self._running[1])
                self._running = None
        self._publish(self._arriving.popleft()[1])
        return True

    def _start(self) -> None:
        """Start a forward if the drafter has none under way and something to draft."""
        if self._running is not None:
            return
        while self._sent and self._sent[0][0] <= self.clock.now:
            super()._post(self._sent.popleft()[1])
        if levels := self._grow():
            seconds = self.clock.draft_seconds()
            self._count_step(seconds)
            self._loop.learn_time(seconds)
            self._running = (self.clock.now + seconds, levels)

    def _move_to(self, now: float) -> None:
        """Move the clock, and count the time of a forward under way."""
        if self._running:
            self.clock.draft_busy += now - self.clock.now
        self.clock.now = now

    def _delay(self, seconds: float) -> None:
        """Delay everything: both had half of the device for this long."""
        self.clock.now += seconds
        if self._running:
            self._running = (self._running[0] + seconds, self._running[1])


class ClockedDrafter(Drafter):
    """A drafter that alternates with the target: each `grow` moves the clock."""

    def __init__(self, inner: Drafter, clock: SimulatedClock) -> None:
        self._inner, self._clock, self.capabilities = inner, clock, inner.capabilities

    def open(self, request: Request) -> Any:
        return self._inner.open(request)

    def grow(self, states: Sequence[Any], trees: Sequence[TokenTree]) -> None:
        self._inner.grow(states, trees)
        seconds = self._clock.draft_seconds()
        self._clock.draft_busy += seconds
        self._clock.now += seconds

    def observe(self, state: Any, seen: Observation) -> None:
        self._inner.observe(state, seen)

    def close(self, state: Any) -> None:
        self._inner.close(state)
