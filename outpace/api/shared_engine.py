"""One engine for several threads: whoever waits for text steps it for all requests, when it is its turn."""

from __future__ import annotations

import atexit
import sys
import threading
from collections import deque
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import FrameType, ModuleType
from typing import Any
from weakref import WeakSet

from outpace.api.text import TextAssembler
from outpace.core.types import Request
from outpace.engine.engine import Engine
from outpace.engine.sequence import TokenSequence, Watch

_POLL_SECONDS = 0.05  # a wake-up that an interrupt swallowed costs its waiter this long


class FairLock:
    """A lock that is given out in the order of asking, and that no interrupt can lose.

    Who holds it is not noted but seen: the first place in the line, as long as the function that asked for it is on its
    thread's stack. A place that a KeyboardInterrupt left behind, between any two bytecodes, is removed by the next
    that waits. So a function that catches an interrupt must leave the `with hold()` to a function that it calls.
    """

    def __init__(self) -> None:
        self._line: deque[_Ticket] = deque()  # each operation on it is one step for all threads

    def __len__(self) -> int:
        """Who holds the lock and who waits for it, together."""
        return len(self._line)

    @property
    def is_wanted(self) -> bool:
        """Whether others wait for it, asked by who holds it."""
        return len(self._line) > 1

    def hold(self) -> _Ticket:
        """`with lock.hold():` waits for the lock and has it for the block. RuntimeError if this thread has it."""
        return _Ticket(self._line, sys._getframe(1), waits=True)

    def try_hold(self) -> _Ticket:
        """`with lock.try_hold() as is_mine:` has the lock for the block if nobody else has or waits for it."""
        return _Ticket(self._line, sys._getframe(1), waits=False)


class _Ticket:
    """A place in the line, from the block's beginning to its end."""

    def __init__(self, line: deque[_Ticket], asker: FrameType, waits: bool) -> None:
        self._line, self._asker, self._waits = line, asker, waits
        self._thread = threading.get_ident()
        self._called: SimpleQueue[None] = SimpleQueue()

    def __enter__(self) -> bool:
        try:
            self._line.append(self)
            while (first := self._line[0]) is not self:
                if first._is_lost():
                    first._leave()
                elif not self._waits:
                    self._leave()
                    return False
                elif first._thread == self._thread:
                    raise RuntimeError("this thread has the lock already, to wait for it would take for ever")
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
            self._line.remove(self)
        with suppress(IndexError):
            self._line[0]._called.put(None)

    def _is_lost(self) -> bool:
        """Whether the function that asked for this place has ended, so that its block cannot be running."""
        frame = sys._current_frames().get(self._thread)
        while frame is not None and frame is not self._asker:
            frame = frame.f_back
        return frame is None


class SharedEngine:
    """An engine with the lock that its threads step it under. There is no thread of its own."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.lock = FairLock()
        _engines.add(self)

    def submit(
        self, request: Request, decoder: ModuleType, options: Any, watch: Watch, drafter: str | None
    ) -> TokenSequence:
        """Hands a request in; UserError where it can never run."""
        with self.lock.hold():
            return self.engine.submit(request, decoder, options, watch, drafter)

    def drive(self, run: TokenSequence, text: TextAssembler | None) -> None:
        """Steps the engine, in turn with other threads, until this request is over, or has more `text` where that is
        waited for."""
        while not self._turn(run, text):
            if _ends_elsewhere():
                threading.Event().wait()  # in a daemon thread, until the process is gone

    def _turn(self, run: TokenSequence, text: TextAssembler | None) -> bool:
        """Steps the engine until that is so, or until others wait for their turn; whether it is so."""
        with self.lock.hold():
            while run.finish_reason is None and (text is None or not text.has_news):
                if _ends_elsewhere():
                    return False
                self.engine.step()
                if self.lock.is_wanted:
                    return False
            return True

    def abort(self, run: TokenSequence) -> None:
        """Ends a request without a turn, so from anywhere; what it holds goes with the next step."""
        self.engine.abort(run)

    def drop(self, run: TokenSequence) -> None:
        """Ends a request; what it holds goes at once, or with the next step of the thread that has the turn."""
        self.engine.abort(run)
        with self.lock.try_hold() as is_mine:
            if is_mine:
                self.engine.sweep()


_engines: WeakSet[SharedEngine] = WeakSet()
_ending_thread: int | None = None  # the one that ends the interpreter: no other begins a round any more


def _ends_elsewhere() -> bool:
    """Whether another thread ends the interpreter."""
    return _ending_thread is not None and _ending_thread != threading.get_ident()


@atexit.register
def _wait_for_daemon_threads() -> None:
    """Lets them end the rounds that they are in. Where a daemon thread comes back from native code while the
    interpreter ends, Python ends the thread, which C++ takes for a fault: it aborts the whole program."""
    global _ending_thread
    _ending_thread = threading.get_ident()
    for shared in list(_engines):
        with shared.lock.hold():
            pass
