"""One engine for several threads: whoever waits for text steps it for all requests, when it is its turn."""

from __future__ import annotations

import atexit
import threading
from types import ModuleType
from typing import Any
from weakref import WeakSet

from outpace.api.fair_lock import FairLock
from outpace.api.text import TextAssembler
from outpace.core.types import Request
from outpace.engine.engine import Engine
from outpace.engine.sequence import Running, Watch


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

    def drive(self, run: Running, text: TextAssembler | None) -> None:
        """Steps the engine, in turn with other threads, until this request is over, or has more `text` where that is
        waited for."""
        while not self._turn(run, text):
            if _ends_elsewhere():
                threading.Event().wait()  # in a daemon thread, until the process is gone

    def _turn(self, run: Running, text: TextAssembler | None) -> bool:
        """Steps the engine until that is so, or until others wait for their turn; whether it is so."""
        with self.lock.hold():
            while run.finish_reason is None and (text is None or not text.has_news):
                if _ends_elsewhere():
                    return False
                self.engine.step()
                if self.lock.is_wanted:
                    return False
            return True

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
