"""The base of workers whose drafter runs in another process or on another machine, and may end before the worker does.

A thread of the worker runs one drafter after another. A new drafter receives each request with all committed tokens.
"""

from __future__ import annotations

import math
import statistics
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Protocol

from outpace.card.cache import CandidateCache
from outpace.card.loop import Close, Correct, Message, Open, SetDirectives
from outpace.card.worker import DraftWorker
from outpace.core.drafting import UNRESTRICTED, DraftDirectives
from outpace.core.types import Request

POLL_SECONDS = 0.5  # interval of checks whether the drafter answers and whether the program has ended
PATIENCE = 2.0  # longest wait, in average forwards per requested level
TRIP_SECONDS = 0.005  # plus a round trip of messages
_NUM_TRIPS = 9  # the latest round trips, whose median counts


class DistantDrafter(Protocol):
    """A drafter in another process or on another machine."""

    def post(self, message: Message) -> None:
        """Send a message; returns at once."""


class DrafterEnd(Protocol):
    """Why a drafter ended, and whether another one may do better."""

    @property
    def error(self) -> BaseException: ...

    @property
    def again(self) -> bool: ...


class DrafterTimes:
    """The times of a drafter in another process or on another machine, and waits that they bound."""

    def __init__(self) -> None:
        super().__init__()
        self.step_seconds = 0.01  # moving average of its draft steps
        self._trips = deque[float](maxlen=_NUM_TRIPS)
        self._num_received = 0  # messages from the drafter
        self._silent_since = -1  # value of `_num_received` when a wait timed out without a message

    @property
    def round_trip_seconds(self) -> float:
        """Median of the latest round trips; 0 if none was measured."""
        return statistics.median(self._trips) if self._trips else 0.0

    def note_trip(self, seconds: float) -> None:
        """Record the duration of a round trip."""
        self._trips.append(seconds)

    def _wait_for(self, cache: CandidateCache, levels: int, depth: int, longest: float = math.inf) -> bool | None:
        """Wait for levels in a cache, at most `longest` seconds; return whether they came.

        After a wait that timed out without any message, return None at once until a message comes.
        """
        received = self._num_received
        if received == self._silent_since:
            return None
        trip = TRIP_SECONDS + PATIENCE * self.round_trip_seconds
        cache.wait(levels, min(PATIENCE * self.step_seconds * (max(levels, depth) + 1) + trip, longest), depth)
        has_grown = cache.has_grown(levels, depth)
        if self._num_received == received and not has_grown:
            self._silent_since = received
        return has_grown


@dataclass
class _KnownRequest:
    """A request as the owner knows it, so that any drafter can take it over. `drafter`: the last one that knows the
    request; `tokens`: the committed ones."""

    request: Request
    cache: CandidateCache
    tokens: list[int] = field(default_factory=list)
    drafter: DistantDrafter | None = None
    directives: DraftDirectives = UNRESTRICTED


class RestartingWorker(DrafterTimes, DraftWorker):
    """Keeps a distant drafter running. The target decodes plainly while there is none.

    A request is handed to a new drafter at its next correction. `failure` is set from a drafter's end until the next
    one drafts; after the last one it stays.
    """

    _thread_name = "outpace-drafter-owner"

    def __init__(self, pauses: Sequence[float], is_endless: bool = False) -> None:
        """`pauses`: seconds before each restart; `is_endless`: repeat the last pause instead of giving the drafter up
        after it."""
        super().__init__()
        self._pauses, self._is_endless, self._num_failures = tuple(pauses), is_endless, 0
        self._requests: dict[int, _KnownRequest] = {}
        self._ready: DistantDrafter | None = None  # the drafter, once it drafts
        self._stopping = False
        self._wake_up: SimpleQueue[None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=self._thread_name)

    def _begin(self) -> None:
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """Whether the drafter takes requests."""
        return self._ready is not None

    @property
    def is_working(self) -> bool:
        return super().is_working and self.is_ready

    def wait(self, cache: CandidateCache, levels: int, depth: int = 0) -> None:
        """Wait for the drafter, but not for one that is not ready or does not know the request; see `_wait_for`."""
        ready = self._ready
        known = any(record.cache is cache and record.drafter is ready for record in self._requests.values())
        if ready is not None and known:
            self._wait_for(cache, levels, depth)

    def close(self) -> None:
        """End the drafter and wait for its end."""
        self.stop()
        if self._thread.ident is not None:
            self._thread.join()

    def stop(self) -> None:
        self._stopping = True
        self._wake_up.put(None)

    @abstractmethod
    def _run_drafter(self) -> DrafterEnd | None:
        """Run one drafter; return why it ended, or None after a requested stop."""

    def _set_ready(self, drafter: DistantDrafter) -> None:
        self.failure = None
        self._ready = drafter

    def _post(self, message: Message) -> None:
        """Send to a drafter that knows the request; at a correction, hand the request with all committed tokens to one
        that does not."""
        ready = self._ready
        if isinstance(message, Open):
            self._requests[message.key] = _KnownRequest(message.request, self._caches[message.key], drafter=ready)
        record = self._requests.get(message.key)
        if record is None:
            return
        if isinstance(message, Correct):
            record.tokens += message.correction.tokens
        elif isinstance(message, SetDirectives):
            record.directives = message.directives
        if ready is not None and record.drafter is ready:
            ready.post(message)
        elif ready is not None and isinstance(message, Correct):
            record.drafter = ready
            ready.post(Open(message.key, record.request, record.cache.next_id))
            ready.post(Correct(message.key, message.correction._replace(tokens=list(record.tokens))))
            ready.post(SetDirectives(message.key, record.directives))
        if isinstance(message, Close):
            del self._requests[message.key]

    def _run(self) -> None:
        """Run one drafter after another, all in this thread: a child dies with the thread that started it."""
        try:
            while (end := self._run_guarded()) is not None:
                pause = self._next_pause()
                self.will_restart = pause is not None and end.again
                self.failure = end.error
                if pause is None or not end.again or not self._sleep(pause):
                    return
        except BaseException as failure:
            self.will_restart = False
            self.failure = failure

    def _run_guarded(self) -> DrafterEnd | None:
        try:
            return self._run_drafter()
        finally:
            self._ready = None
            for cache in list(self._caches.values()):
                cache.give_up()

    def _next_pause(self) -> float | None:
        """Return the seconds before the next restart, None after the last one."""
        number, self._num_failures = self._num_failures, self._num_failures + 1
        if number < len(self._pauses):
            return self._pauses[number]
        return self._pauses[-1] if self._is_endless else None

    @property
    def _is_over(self) -> bool:
        """Whether the worker was closed, or the program is ending without closing it."""
        return self._stopping or not threading.main_thread().is_alive()

    def _sleep(self, seconds: float) -> bool:
        """Sleep; return False if the worker is to end."""
        while seconds > 0 and not self._is_over:
            with suppress(Empty):
                self._wake_up.get(timeout=min(seconds, POLL_SECONDS))
            seconds -= POLL_SECONDS
        return not self._is_over
