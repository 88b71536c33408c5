"""The drafter on a simulated clock: deterministic, for tests and to simulate two devices on one machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from outpace.card.cache import CandidateCache, CandidateLayer
from outpace.card.worker import ObservedModel, SameThreadWorker
from outpace.core.tree import TokenTree
from outpace.core.types import Drafter, Observation, Request


@dataclass
class SimulatedClock:
    """Durations of a forward of the drafter and of a target pass over n rows, in seconds.

    `draft_seconds` is called after each forward, so it may depend on the forward's width. `shared`: target and drafter
    share one device and get half of it while both work. `target_busy`, `draft_busy`: seconds of work, as on a device
    alone.
    """

    draft_seconds: Callable[[], float] = lambda: 1.0
    target_seconds: Callable[[int], float] = lambda rows: 4.0
    now: float = 0.0
    shared: bool = False
    target_busy: float = 0.0
    draft_busy: float = 0.0

    def run_target(self, rows: int) -> None:
        """Move the clock over a target pass while no drafter works."""
        seconds = self.target_seconds(rows)
        self.target_busy += seconds
        self.now += seconds


class InlineWorker(SameThreadWorker):
    """Publishes the draft forwards that end before the clock reaches the end of the target pass during that pass.

    A forward that is running when a correction comes is still published at its end; its nodes are then dropped, because
    their parents are gone.
    """

    def __init__(self, drafter: Drafter, clock: SimulatedClock | None = None) -> None:
        super().__init__(drafter)
        self.clock = clock or SimulatedClock()
        self._running: tuple[float, list[tuple[int, CandidateLayer]]] | None = None  # end time, layers

    def wrap_target(self, target: Any) -> Any:
        return ObservedModel(target, self._run_during)

    def _run_during(self, rows: int) -> None:
        """Move the clock over a target pass, and publish the drafter's forwards that end during it."""
        clock, begin = self.clock, self.clock.now
        seconds = clock.target_seconds(rows)
        end = begin + seconds
        while self._is_running() and self._finish_time() <= end:
            self._finish()
        drafting = (end if self._running else clock.now) - begin
        clock.target_busy += seconds
        clock.draft_busy += drafting
        clock.now = end
        if clock.shared:
            self._delay(drafting)

    def wait(self, cache: CandidateCache, layers: int, depth: int = 0) -> None:
        before = self.clock.now
        for _ in range(2 * max(layers, depth)):  # forwards for an older tree or for other requests may come first
            if cache.has_grown(layers, depth) or not self._is_running():
                break
            self._finish()
        self.clock.draft_busy += self.clock.now - before

    def stop(self) -> None:
        self._running = None

    def _is_running(self) -> bool:
        """Whether the drafter has a forward under way; start one if possible."""
        if self._running is None:
            self._start()
        return self._running is not None

    def _finish_time(self) -> float:
        return self._running[0] if self._running else self.clock.now

    def _finish(self) -> None:
        """Publish the forward under way and move the clock to its end."""
        if self._running:
            finish, layers = self._running
            self._publish(layers)
            self._running = None
            self.clock.now = max(self.clock.now, finish)

    def _start(self) -> None:
        if layers := self._grow():
            seconds = self.clock.draft_seconds()
            self._count_step(seconds)
            self._loop.learn_time(seconds)
            self._running = (self.clock.now + seconds, layers)

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
