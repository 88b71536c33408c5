"""The drafter in a process of its own: its Python, too, then runs beside the target's.

A new interpreter and a socket pair: `multiprocessing.Process` would run the user's main script again in the child, load
the models there a second time, and leave a process behind that tracks resources.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from outpace.card.cache import CandidateCache, CandidateLayer, Correction
from outpace.card.loop import Close, Configure, Correct, DraftLoop, Message, Open
from outpace.card.worker import DraftWorker
from outpace.core import child_process
from outpace.core.drafting import UNRESTRICTED, DraftDirectives
from outpace.core.errors import UserError, check_whole
from outpace.core.lazy import set_num_threads
from outpace.core.types import Drafter, Request, Rule

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

    layers: Sequence[tuple[int, CandidateLayer]]
    seconds: float


class Failed(NamedTuple):
    """The last message: what was raised, with its traceback as text; `again`: another process may do better."""

    error: BaseException
    traceback: str = ""
    again: bool = True


ChildMessage = Pong | Ready | Grown | Failed


class ChildLoop:
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
            set_num_threads(start.threads)
            build: Callable[[], Drafter] = pickle.loads(start.recipe)
            loop = DraftLoop(build())
            loop.begin_concurrent()
            self._loop = loop
            self._say(Ready())
            self._draft(loop)
        except BaseException as error:
            self._say(Failed(picklable_error(error), traceback.format_exc(), again=self._loop is not None))

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
            self._say(Failed(picklable_error(error), traceback.format_exc(), again=False))
        finally:
            signal.raise_signal(signal.SIGTERM)

    def _with_known_rule(self, message: Message) -> Message:
        """Requests of one rule get one instance of it, as their owner's have: then their rows go together."""
        if not isinstance(message, Open):
            return message
        rule = message.request.rule
        known = self._rules.setdefault(pickle.dumps(rule), rule)
        return message._replace(request=replace(message.request, rule=known))

    def _say(self, said: ChildMessage) -> None:
        with self._saying:
            self._pipe.send_bytes(pickle.dumps(said))


def picklable_error(error: BaseException) -> BaseException:
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
    ChildLoop(pipe).run()


_CODE = "import os; os.environ['OMP_NUM_THREADS'] = sys.argv[1]; from outpace.card.process import main; main()"
_POLL_SECONDS = 0.5  # how often a silent child is asked whether it reads, and whether the program has ended
_STARTING = 10  # a child that imports and loads may be silent for so many times the patience
_PAUSES = (0.2, 1.0, 5.0)  # seconds before each new start; then the drafter is given up
_PATIENCE = 2.0  # a wait lasts at most this many times what the drafter's forwards take on average
_TRIP_SECONDS = 0.005  # and a way to and fro
_GRACE_SECONDS = 1.0  # for a child that was asked to end


class DraftProcessError(RuntimeError):
    """The drafter's process ended by itself, or does not answer."""


@dataclass
class _Told:
    """A request as its owner knows it, so that any child can take it up: `child` is the last that was told of it."""

    request: Request
    cache: CandidateCache
    tokens: list[int] = field(default_factory=list)  # committed
    child: ChildProcess | None = None
    orders: DraftDirectives = UNRESTRICTED


class ProcessWorker(DraftWorker):
    """Started once; the target goes on plainly until the child is ready, and while one that died is started again.

    A request is handed to a new child at its next miss: then the cache holds nothing of the old one's. `failure` is
    set while there is no child that drafts after one failed, and stays when it is not started again.
    """

    def __init__(
        self,
        build: Callable[[], Drafter],
        threads: int = 1,
        *,
        patience: float = 15.0,
        pauses: Sequence[float] = _PAUSES,
    ) -> None:
        """`build` is called in the child and must be picklable: a module's function, or a partial of one. `threads`:
        cores that a forward may use. A child that reads nothing for `patience` seconds is ended. UserError for a
        `build` that cannot cross."""
        super().__init__()
        check_whole("draft_threads", threads, 1)
        self._start = Start(_pickled(build), threads)
        self._patience, self._pauses = patience, pauses
        self._told: dict[int, _Told] = {}
        self._child: ChildProcess | None = None
        self._ready: ChildProcess | None = None  # the same, once it drafts
        self._stopping = False
        self._bell: SimpleQueue[None] = SimpleQueue()  # ends a rest
        self.step_seconds = 0.01
        self._heard = 0  # messages of the child so far
        self._unanswered = -1  # what was heard when a wait was in vain
        self._thread = threading.Thread(target=self._run, name="outpace-drafter-owner")
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """The drafting process, if there is one."""
        return self._child.process.pid if self._child else None

    @property
    def is_ready(self) -> bool:
        """Whether the drafter stands and takes requests."""
        return self._ready is not None

    @property
    def is_working(self) -> bool:
        return super().is_working and self.is_ready

    def wait(self, cache: CandidateCache, layers: int, depth: int = 0) -> None:
        """Not for a child that is not ready, that does not know the request, or that let a wait pass in silence."""
        heard, ready = self._heard, self._ready
        known = any(told.cache is cache and told.child is ready for told in self._told.values())
        if ready is None or not known or heard == self._unanswered:
            return
        cache.wait(layers, _PATIENCE * self.step_seconds * (max(layers, depth) + 1) + _TRIP_SECONDS, depth)
        if self._heard == heard and not cache.has(layers, depth):
            self._unanswered = heard

    def close(self) -> None:
        """Ends the child and waits for its end."""
        self.stop()
        self._thread.join()

    def stop(self) -> None:
        self._stopping = True
        self._bell.put(None)
        if child := self._child:
            child.process.terminate()

    def _post(self, message: Message) -> None:
        """To a child that knows the request; to one that does not, at a miss, with all that was committed."""
        ready = self._ready
        if isinstance(message, Open):
            self._told[message.key] = _Told(message.request, self._caches[message.key], child=ready)
        told = self._told.get(message.key)
        if told is None:
            return
        if isinstance(message, Close):
            del self._told[message.key]
        elif isinstance(message, Correct):
            told.tokens += message.correction.tokens
        elif isinstance(message, Configure):
            told.orders = message.orders
        if ready is None:
            return
        if told.child is ready:
            ready.post(message)
        elif isinstance(message, Correct) and not message.correction.is_hit:
            told.child = ready
            ready.post(Open(message.key, told.request, told.cache.next_id))
            ready.post(Correct(message.key, Correction([0], list(told.tokens), message.correction.root_id, False)))
            ready.post(Configure(message.key, told.orders))

    def _run(self) -> None:
        """One child after another. Of this thread, because a child ends with the thread that started it."""
        try:
            for pause in (*self._pauses, None):
                end = self._live()
                if end is None:
                    return
                self.failure = end.error
                if pause is None or not end.again or not self._rest(pause):
                    return
        except BaseException as failure:
            self.failure = failure

    @property
    def _is_over(self) -> bool:
        """Closed, or the program ends without closing it: that is neither held up nor torn down."""
        return self._stopping or not threading.main_thread().is_alive()

    def _rest(self, seconds: float) -> bool:
        """Lets some time pass; False where the worker is to end."""
        while seconds > 0 and not self._is_over:
            with suppress(Empty):
                self._bell.get(timeout=min(seconds, _POLL_SECONDS))
            seconds -= _POLL_SECONDS
        return not self._is_over

    def _live(self) -> Failed | None:
        """One child's life: why it ended, or None where it was to."""
        try:
            with ChildProcess(self._start) as child:
                self._child = child
                return self._listen(child)
        finally:
            self._child = self._ready = None
            for cache in list(self._caches.values()):
                cache.give_up()

    def _listen(self, child: ChildProcess) -> Failed | None:
        silent = 0.0  # counted in polls: the whole program may have been stopped meanwhile
        while not self._is_over:
            said = child.on_root_moved(_POLL_SECONDS)
            if isinstance(said, Failed):
                return None if self._is_over else said
            if said is not None:
                self._take(child, said)
            silent = silent + _POLL_SECONDS if said is None and self._told else 0.0
            if silent > self._patience * (1 if self._ready else _STARTING):
                return Failed(DraftProcessError(f"its process read nothing for {silent:g} seconds"))
            if silent:
                child.post(Ping())
        return None

    def _take(self, child: ChildProcess, said: ChildMessage) -> None:
        self._heard += 1
        if isinstance(said, Ready):
            self.failure = None
            self._ready = child
        elif isinstance(said, Grown):
            self._publish(said.layers)
            self.step_seconds += 0.1 * (said.seconds - self.step_seconds)


class ChildProcess(AbstractContextManager["ChildProcess"]):
    """A process and the two ends of talk with it; a thread sends, because a stopped process takes nothing."""

    def __init__(self, start: Start) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self.process = child_process.start(
                    _CODE, str(start.threads), stdin=theirs.fileno(), stdout=subprocess.DEVNULL
                )
            except BaseException:
                ours.close()
                raise
        self._pipe = Connection(ours.detach())
        self._unsent: Exception | None = None
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        self._sender = threading.Thread(target=self._send, name="outpace-drafter-mail")
        self._sender.start()
        self.post(start)

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        child_process.stop(self.process, _GRACE_SECONDS)
        self.post(None)
        self._sender.join()
        self._pipe.close()

    def post(self, message: Message | Ping | Start | None) -> None:
        """Sends a message as soon as the child takes it; returns at once."""
        self._outbox.put(message)

    def on_root_moved(self, seconds: float) -> ChildMessage | None:
        """What the child says next, None where it says nothing for so long; its end is a Failed."""
        try:
            if not self._pipe.poll(seconds):
                return None if self.process.poll() is None else self._cause()
            said: ChildMessage = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            return self._cause()
        if isinstance(said, Failed):
            said.error.__cause__ = DraftProcessError(f"\n\nin the drafter's process:\n{said.traceback}")
        return said

    def _cause(self) -> Failed:
        """Why a child that says nothing more has ended."""
        if self._unsent is not None:
            return Failed(self._unsent, again=False)
        status = child_process.stop(self.process, _GRACE_SECONDS)
        return Failed(DraftProcessError(f"its process {child_process.describe_exit(status)}"))

    def _send(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                self._pipe.send_bytes(pickle.dumps(message))
        except OSError:
            pass  # the child is gone: who listens to it finds out
        except Exception as error:  # a request that cannot be pickled
            self._unsent = error
            self.process.kill()


def _pickled(build: Callable[[], Drafter]) -> bytes:
    if os.name != "posix":
        raise UserError("worker process needs Linux or macOS, use worker thread here")
    try:
        return pickle.dumps(build)
    except Exception as error:
        raise UserError(
            f"the drafter cannot be built in another process ({error}), name its model by a path or use worker thread"
        ) from error
