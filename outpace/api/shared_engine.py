"""One engine for several threads: whoever waits for text steps it for all requests, when it is its turn."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any
from weakref import WeakSet

from outpace.api.fair_lock import FairLock
from outpace.core.types import Request
from outpace.engine.engine import Engine
from outpace.engine.request import Running, Watch


class SharedEngine:
    """An engine with the lock that its threads step it under. There is no thread of its own."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.lock = FairLock()
        _engines.add(self)

    def submit(self, request: Request, decoder: ModuleType, options: Any, watch: Watch, drafter: str | None) -> Running:
        """Hands a request in; UserError where it can never run."""
        with self.lock.hold():
            return self.engine.submit(request, decoder, options, watch, drafter)

    def drive(self, run: Running, pieces: Sequence[Any]) -> None:
        """Steps the engine, in turn with other threads, until this request has pieces or is over."""
        while True:
            with self.lock.hold():
                if pieces or run.finish_reason is not None:
                    return
                if _ending_thread in (None, threading.get_ident()):
                    self.engine.step()
                    continue
            threading.Event().wait()  # in a daemon thread, until the process is gone

    def abort(self, run: Running) -> None:
        """Ends a request without a turn, so from anywhere; what it holds goes with the next step."""
        self.engine.abort(run)

    def drop(self, run: Running) -> None:
        """Ends a request; what it holds goes at once, or with the next step of the thread that has the turn."""
        self.engine.abort(run)
        with self.lock.try_hold() as is_mine:
            if is_mine:
                self.engine.sweep()


_engines: WeakSet[SharedEngine] = WeakSet()
_ending_thread: int | None = None  # the one that ends the interpreter: no other begins a round any more


@atexit.register
def _wait_for_daemon_threads() -> None:
    """Lets them end the rounds that they are in. Where a daemon thread comes back from native code while the
    interpreter ends, Python ends the thread, which C++ takes for a fault: it aborts the whole program."""
    global _ending_thread
    _ending_thread = threading.get_ident()
    for shared in list(_engines):
        with shared.lock.hold():
            pass
