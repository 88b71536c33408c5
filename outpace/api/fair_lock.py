"""Several threads, one engine: each steps it when it is its turn, for all requests, until its own answer is there."""

from __future__ import annotations

import sys
import threading
from collections import deque
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import FrameType

_POLL_SECONDS = 0.05  # a wake-up that an interrupt swallowed costs its waiter this long


class FairLock:
    """A lock that is given out in the order of asking, and that no interrupt can lose.

    Who holds it is not noted but seen: the first place in the line, as long as the function that asked for it is on its
    thread's stack. A place that a KeyboardInterrupt left behind, between any two bytecodes, is removed by the next
    that waits. So a function that catches an interrupt must leave the `with hold()` to a function that it calls.
    """

    def __init__(self) -> None:
        self._line: deque[_Place] = deque()  # each operation on it is one step for all threads

    def __len__(self) -> int:
        """Who holds the lock and who waits for it, together."""
        return len(self._line)

    @property
    def is_wanted(self) -> bool:
        """Whether others wait for it, asked by who holds it."""
        return len(self._line) > 1

    def hold(self) -> _Place:
        """`with lock.hold():` waits for the lock and has it for the block. RuntimeError if this thread has it."""
        return _Place(self._line, sys._getframe(1), waits=True)

    def try_hold(self) -> _Place:
        """`with lock.try_hold() as is_mine:` has the lock for the block if nobody else has or waits for it."""
        return _Place(self._line, sys._getframe(1), waits=False)


class _Place:
    """A place in the line, from the block's beginning to its end."""

    def __init__(self, line: deque[_Place], asker: FrameType, waits: bool) -> None:
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
