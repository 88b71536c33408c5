"""A drafter that runs in a thread and sends its levels to other machines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from outpace.card.cache import CandidateLevel
from outpace.card.loop import DraftLoop, Message
from outpace.card.protocol_pb2 import FromDrafter
from outpace.card.wire import level_message
from outpace.core.types import Drafter

_POLL_SECONDS = 0.2  # interval in which an idle thread checks whether to end


class NewLevel(NamedTuple):
    """A level to send, by the receiver's key, and the seconds of the draft step."""

    key: int
    level: CandidateLevel
    seconds: float


class DraftThread:
    """Runs a drafter's loop until `stop`. If the drafter raises, `failure` is set and `on_failure` is called."""

    def __init__(
        self,
        drafter: Drafter,
        send: Callable[[int, CandidateLevel, float], None],
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """`send` is called in the thread with the key, the new level, and the seconds of each draft step."""
        self._loop, self._send, self._on_failure = DraftLoop(drafter), send, on_failure
        self._stopping = False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="outpace-drafter")
        self._thread.start()

    def post(self, message: Message) -> None:
        """Send the drafter a message; returns at once."""
        if self.failure is None:
            self._loop.post(message)

    def stop(self) -> None:
        """End the thread after its current draft step."""
        self._stopping = True
        self._loop.inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping and threading.main_thread().is_alive():
                began = time.perf_counter()
                if levels := self._loop.grow():
                    seconds = time.perf_counter() - began
                    for key, level in levels:
                        self._send(key, level, seconds)
                    self._loop.learn_time(seconds)
                elif not self._loop.has_work:
                    self._loop.wait(_POLL_SECONDS)
        except BaseException as failure:
            self.failure = failure
            self._loop.drop(failure)
            self._on_failure()


def add_level(whole: FromDrafter, new: NewLevel) -> None:
    """Append a level to a FromDrafter."""
    whole.levels.append(level_message(new.key, new.level))
    whole.seconds = new.seconds
