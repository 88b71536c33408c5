"""The first process of a split model tells the others what to do: what happens to sessions, and each forward.

Tensor parallelism (Megatron-LM, arXiv:1909.08053) wants the same forwards in the same order in every process, while
what is drafted and when follows clocks and threads. So one process decides, and the others repeat: before each forward
they are sent its arguments, and what was done to keys and values since the last one.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing.connection import Connection
from typing import Any
from weakref import finalize

from outpace.core.errors import UserError

PATIENCE = 30.0  # seconds for the other side to say that a forward failed there too
FAILED = b"failed"
END = "end"

Message = list[tuple[str, tuple[Any, ...]]]


class Lead:
    """What rank 0 has of the others: a connection each."""

    def __init__(self, links: Sequence[Connection]) -> None:
        self._links = list(links)
        self._notes: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._numbers = count(1)

    def number(self, session: object) -> int:
        """A number for a session, by which the others know it until it is gone."""
        number = next(self._numbers)
        finalize(session, self.note, "close", number).atexit = False
        return number

    def note(self, name: str, *arguments: Any) -> None:
        """Something that the others are to do before the next forward."""
        self._notes.append((name, arguments))

    @contextmanager
    def passes(self, name: str, *arguments: Any) -> Iterator[None]:
        """A forward is made within, and by the others at the same time. Where it fails, it must have failed there too:
        else nothing is known of what they do, and the model is of no use any more."""
        self.note(name, *arguments)
        self._send()
        try:
            yield
        except Exception as error:
            if not all(map(_has_failed, self._links)):
                self._links.clear()
                raise RuntimeError(f"a process of the split model has ended or failed alone ({error})") from error
            self.note(FAILED.decode())
            raise

    def end(self) -> None:
        """The others need not wait any longer."""
        self.note(END)
        with suppress(UserError):  # they have ended already
            self._send()
        for link in self._links:
            link.close()
        self._links.clear()

    def _send(self) -> None:
        if not self._links:
            raise UserError("the other processes of the split model have ended: load it anew")
        message: Message = []
        while self._notes:
            message.append(self._notes.popleft())
        sent = pickle.dumps(message)
        try:
            for link in self._links:
                link.send_bytes(sent)
        except OSError as error:
            self._links.clear()
            raise UserError(f"a process of the split model has ended ({error}): load it anew") from error


def _has_failed(link: Connection) -> bool:
    """Whether the other side says so."""
    try:
        return link.poll(PATIENCE) and link.recv_bytes() == FAILED
    except (EOFError, OSError):
        return False
