"""What runs in the drafter's process: it reads messages, grows, says what is new, and ends with its owner.

One socket joins the two, given as standard input; nothing else is shared and nothing has a name. A thread reads, so
that messages are taken while the drafter works; where the owner is gone it ends the process, whatever that is doing.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from outpace.card.cache import Layer
from outpace.card.loop import DraftLoop, Message, Open
from outpace.core.lazy import set_threads
from outpace.core.types import Drafter, Rule

_DIE_WITH_PARENT = 1  # Linux: PR_SET_PDEATHSIG


class Start(NamedTuple):
    """The owner's first message: what builds the drafter, pickled; and how many cores a forward may use."""

    recipe: bytes
    threads: int


class Ping(NamedTuple):
    """The owner asks whether anybody reads; it is answered at once by Ready or Pong."""


class Pong(NamedTuple):
    """Somebody reads."""


class Ready(NamedTuple):
    """The drafter stands."""


class Grown(NamedTuple):
    """New layers by request, and how long they took."""

    layers: Sequence[tuple[int, Layer]]
    seconds: float


class Failed(NamedTuple):
    """The last message: what was raised, with its traceback as text; `again`: another process may do better."""

    error: BaseException
    traceback: str = ""
    again: bool = True


Said = Pong | Ready | Grown | Failed


class Child:
    """The process's two threads: one reads messages, the other drafts."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._saying = threading.Lock()
        self._loop: DraftLoop | None = None  # the owner sends no requests before it is there
        self._rules: dict[bytes, Rule] = {}

    def run(self) -> None:
        """Builds the drafter and drafts until the owner goes; an exception is told and ends it."""
        try:
            start: Start = pickle.loads(self._pipe.recv_bytes())
            threading.Thread(target=self._read, name="outpace-reader", daemon=True).start()
            set_threads(start.threads)
            build: Callable[[], Drafter] = pickle.loads(start.recipe)
            loop = DraftLoop(build())
            loop.work_beside()
            self._loop = loop
            self._say(Ready())
            self._draft(loop)
        except BaseException as error:
            self._say(Failed(portable(error), traceback.format_exc(), again=self._loop is not None))

    def _draft(self, loop: DraftLoop) -> None:
        while True:
            began = time.perf_counter()
            layers = loop.grow()
            if layers:
                self._say(Grown(layers, time.perf_counter() - began))
            elif not loop.has_work:
                loop.wait()

    def _read(self) -> None:
        try:
            while True:
                message = pickle.loads(self._pipe.recv_bytes())
                if isinstance(message, Ping):
                    self._say(Pong())
                elif self._loop is not None:
                    self._loop.post(self._with_known_rule(message))
        except (EOFError, OSError):
            pass  # the owner is gone
        except Exception as error:  # a message of classes that cannot be imported here
            self._say(Failed(portable(error), traceback.format_exc(), again=False))
        finally:
            signal.raise_signal(signal.SIGTERM)

    def _with_known_rule(self, message: Message) -> Message:
        """Requests of one rule get one instance of it, as their owner's have: then their rows go together."""
        if not isinstance(message, Open):
            return message
        rule = message.request.rule
        known = self._rules.setdefault(pickle.dumps(rule), rule)
        return message._replace(request=replace(message.request, rule=known))

    def _say(self, said: Said) -> None:
        with self._saying:
            self._pipe.send_bytes(pickle.dumps(said))


def portable(error: BaseException) -> BaseException:
    """The exception where it can be rebuilt elsewhere, else one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def main() -> None:
    """The process's whole life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's
    if sys.platform == "linux":  # reaches it even while it is stopped, and when another holds the owner's end
        prctl: Any = ctypes.CDLL(None).prctl
        prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    pipe = Connection(os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    Child(pipe).run()
