"""Several threads, one engine: each steps it when it is its turn, for all requests, until its own answer is there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """A lock that is given out in the order of asking, so that no thread waits while another takes turn after turn."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._serving = 0
        self._asked = 0  # tickets given out
        self._left: set[int] = set()  # tickets of those who stopped waiting

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Waits for a turn and has it for the block."""
        with self._changed:
            ticket = self._asked
            self._asked += 1
            try:
                self._changed.wait_for(lambda: self._serving == ticket)
            except BaseException:  # an interrupt while waiting
                self._left.add(ticket)
                self._pass_on(0)
                raise
        try:
            yield
        finally:
            with self._changed:
                self._pass_on(1)

    @contextmanager
    def try_turn(self) -> Iterator[bool]:
        """Has a turn for the block if nobody else has or waits for one; says whether."""
        with self._changed:
            is_free = self._serving == self._asked
            self._asked += is_free
        try:
            yield is_free
        finally:
            if is_free:
                with self._changed:
                    self._pass_on(1)

    def _pass_on(self, count: int) -> None:
        self._serving += count
        while self._serving in self._left:
            self._left.remove(self._serving)
            self._serving += 1
        self._changed.notify_all()
