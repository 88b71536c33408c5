"""Runs the drafter in the thread of a target on a GPU: it takes draft steps on the CPU while a launched pass runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from outpace.card.cache import CandidateCache
from outpace.card.worker import ObservedModel, SameThreadWorker
from outpace.core.arrays import torch
from outpace.core.types import Drafter


class PassEvent(Protocol):
    """Marks the end of the work launched before it, as a CUDA event does."""

    def query(self) -> bool:
        """Return whether that work is done."""


class PolledWorker(SameThreadWorker):
    """Takes draft steps after the target's pass was launched, until the pass is done.

    No second thread competes for the interpreter, and the drafter may use all cores. A pass is collected at most one
    draft step late; what that step adds arrives as late children.
    """

    def __init__(self, drafter: Drafter, record: Callable[[], PassEvent], threads: int = 1) -> None:
        """`record` returns an event that is done when everything launched so far is. `threads`: CPU threads of a draft
        step."""
        super().__init__(drafter)
        self._record, self._threads = record, threads

    def wrap_target(self, target: Any) -> ObservedModel:
        return ObservedModel(target, self._draft_during)

    def wait(self, cache: CandidateCache, levels: int, depth: int = 0) -> None:
        for _ in range(2 * max(levels, depth)):  # steps for other requests may come first
            if cache.has_grown(levels, depth) or not self._step():
                break

    def _draft_during(self, rows: int) -> None:
        event = self._record()
        while not event.query() and self._step():
            pass

    def _step(self) -> bool:
        """Take one draft step; return whether there was one to take."""
        start = time.perf_counter()
        self._loop.drafter.capabilities.limit_threads(self._threads)  # of the thread that steps the engine now
        levels = self._grow()
        if levels:
            self._publish(levels)
            self._count_step(seconds := time.perf_counter() - start)
            self._loop.learn_time(seconds)
        return bool(levels)


def cuda_recorder(device: Any) -> Callable[[], PassEvent]:
    """Return a function that records an event on the device's current stream."""

    def record() -> PassEvent:
        event: PassEvent = torch.cuda.current_stream(device).record_event()
        return event

    return record
