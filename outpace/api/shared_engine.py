"""One engine for several threads: each thread that waits for text steps the engine for all requests when it holds the
lock. There is no thread for the engine alone.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections import deque
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any
from weakref import WeakSet

from outpace.api.text import TextAssembler
from outpace.core.types import Request
from outpace.decoders.base import Decoder
from outpace.engine.engine import Engine
from outpace.engine.sequence import StopCheck, TokenSequence

_POLL_SECONDS = 0.05  # delay of a waiter whose wake-up was swallowed by an interrupt


class FairLock:
    """A first-come, first-served lock that survives a KeyboardInterrupt between any two bytecodes.

    The holder is not recorded but found: it is the first ticket of the queue, for as long as the function that took the
    ticket is on its thread's stack. A ticket that an interrupt leaves in the queue is removed by the next waiter.
    Therefore a function that catches an interrupt must leave the `with hold()` to a function that it calls.
    """

    def __init__(self) -> None:
        self._queue: deque[_Ticket] = deque()  # every operation on it is atomic

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def is_wanted(self) -> bool:
        """Whether other threads wait; for the holder to ask."""
        return len(self._queue) > 1

    def hold(self) -> _Ticket:
        """`with lock.hold():` waits for the lock and holds it in the block. RuntimeError if this thread holds it."""
        return _Ticket(self._queue, sys._getframe(1), waits=True)

    def try_hold(self) -> _Ticket:
        """`with lock.try_hold() as is_mine:` holds the lock in the block if no other thread holds or wants it."""
        return _Ticket(self._queue, sys._getframe(1), waits=False)


class _Ticket:
    """A place in the lock's queue, from the beginning of a `with` block to its end."""

    def __init__(self, queue: deque[_Ticket], owner: FrameType, waits: bool) -> None:
        self._queue, self._owner, self._waits = queue, owner, waits
        self._thread = threading.get_ident()
        self._called: SimpleQueue[None] = SimpleQueue()

    def __enter__(self) -> bool:
        try:
            self._queue.append(self)
            while (first := self._queue[0]) is not self:
                if first._is_lost():
                    first._leave()
                elif not self._waits:
                    self._leave()
                    return False
                elif first._thread == self._thread:
                    raise RuntimeError("this thread holds the lock already and would wait for itself forever")
                else:
                    with suppress(Empty):
                        self._called.get(timeout=_POLL_SECONDS)
        except BaseException:
            self._leave()
            raise
        return True

    def __exit__(self, *error: object) -> None:
        self._leave()

    def _leave(self) -> None:
        with suppress(ValueError):
            self._queue.remove(self)
        with suppress(IndexError):
            self._queue[0]._called.put(None)

    def _is_lost(self) -> bool:
        """Whether the function that took this ticket has returned, so that its block cannot be running."""
        frame = sys._current_frames().get(self._thread)
        while frame is not None and frame is not self._owner:
            frame = frame.f_back
        return frame is None


class SharedEngine:
    """An engine, and the lock under which threads step it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.lock = FairLock()
        _engines.add(self)

    def create(
        self, request: Request, decoder: type[Decoder], options: Any, watch: StopCheck, drafter: str | None
    ) -> TokenSequence:
        """Create the sequence of a request, which `enqueue` queues. UserError if it can never run."""
        with self.lock.hold():
            return self.engine.create(request, decoder, options, watch, drafter)

    def enqueue(self, run: TokenSequence) -> None:
        with self.lock.hold():
            self.engine.enqueue(run)

    def drive(self, run: TokenSequence, text: TextAssembler | None) -> None:
        """Step the engine, alternating with other threads, until the request ends or, given `text`, until it has a new
        piece."""
        while not self._drive_until_wanted(run, text):
            if _is_shut_down_elsewhere():
                threading.Event().wait()  # in a daemon thread, until the process is gone

    def _drive_until_wanted(self, run: TokenSequence, text: TextAssembler | None) -> bool:
        """Step until the condition of `drive` holds (return True) or another thread waits for the lock (False)."""
        with self.lock.hold():
            while run.finish_reason is None and (text is None or not text.has_news):
                if _is_shut_down_elsewhere():
                    return False
                self.engine.step()
                if self.lock.is_wanted:
                    return False
            return True

    def abort(self, run: TokenSequence) -> None:
        """End a request without taking the lock, so from anywhere; the next step releases what it holds."""
        self.engine.abort(run)

    def drop(self, run: TokenSequence) -> None:
        """End a request and release what it holds: now if the lock is free, otherwise in its holder's next step."""
        self.engine.abort(run)
        with self.lock.try_hold() as is_mine:
            if is_mine:
                self.engine.sweep()


_engines: WeakSet[SharedEngine] = WeakSet()
_exiting_thread: int | None = None  # the thread that shuts the interpreter down; no other thread starts a round then


def _is_shut_down_elsewhere() -> bool:
    """Whether another thread is shutting the interpreter down."""
    return _exiting_thread is not None and _exiting_thread != threading.get_ident()


@atexit.register
def _wait_for_daemon_threads() -> None:
    """Let daemon threads finish their current rounds. If one returned from native code while the interpreter shuts
    down, Python would end that thread, which C++ takes for a fault and aborts the program."""
    global _exiting_thread
    _exiting_thread = threading.get_ident()
    for shared in list(_engines):
        with shared.lock.hold():
            pass
