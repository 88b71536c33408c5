"""The drafter in a process of its own, so that its Python code runs in parallel with the target's too.

Both ends of the pipe are in this module: `ProcessWorker` and `ChildProcess` are the owner's, `ChildLoop` is the
child's. The owner starts a new interpreter with one end of a socket pair as standard input; nothing else is shared.
`multiprocessing.Process` would run the user's main script again in the child, load the models there a second time, and
start a resource tracker. In the child one thread reads, so that messages arrive while the drafter works; it ends the
process when the owner is gone.
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
from contextlib import AbstractContextManager
from dataclasses import replace
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NamedTuple

from outpace.card.cache import CandidateLevel
from outpace.card.loop import DraftLoop, Message, Open
from outpace.card.restarting import POLL_SECONDS, RestartingWorker
from outpace.core import child_process
from outpace.core.arrays import set_num_threads
from outpace.core.errors import UserError, check_whole
from outpace.core.types import Drafter, Rule

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux


class Start(NamedTuple):
    """The owner's first message: the pickled function that builds the drafter, and the CPU threads of a forward."""

    recipe: bytes
    threads: int


class Ping(NamedTuple):
    """The owner asks for a sign of life; the child answers at once with Ready or Pong."""


class Pong(NamedTuple):
    """The child still reads messages."""


class Ready(NamedTuple):
    """The drafter is built."""


class Grown(NamedTuple):
    """New levels by request, and the seconds that they took."""

    levels: Sequence[tuple[int, CandidateLevel]]
    seconds: float


class Failed(NamedTuple):
    """The child's last message: the exception, its traceback as text, and whether another process may do better."""

    error: BaseException
    traceback: str = ""
    again: bool = True


ChildMessage = Pong | Ready | Grown | Failed


class ChildLoop:
    """The child's two threads: one reads messages, the other drafts."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._send_lock = threading.Lock()
        self._loop: DraftLoop | None = None  # the owner sends no requests before it exists
        self._rules: dict[bytes, Rule] = {}

    def run(self) -> None:
        """Build the drafter and draft until the owner goes; an exception is reported and ends the process."""
        try:
            start: Start = pickle.loads(self._pipe.recv_bytes())
            threading.Thread(target=self._read, name="outpace-reader", daemon=True).start()
            set_num_threads(start.threads)
            build: Callable[[], Drafter] = pickle.loads(start.recipe)
            loop = DraftLoop(build())
            self._loop = loop
            self._send_message(Ready())
            self._draft(loop)
        except BaseException as error:
            self._send_message(Failed(picklable_error(error), traceback.format_exc(), again=self._loop is not None))

    def _draft(self, loop: DraftLoop) -> None:
        while True:
            began = time.perf_counter()
            levels = loop.grow()
            if levels:
                seconds = time.perf_counter() - began
                self._send_message(Grown(levels, seconds))
                loop.learn_time(seconds)
            elif not loop.has_work:
                loop.wait()

    def _read(self) -> None:
        try:
            while True:
                message = pickle.loads(self._pipe.recv_bytes())
                if isinstance(message, Ping):
                    self._send_message(Pong())
                elif self._loop is not None:
                    self._loop.post(self._with_known_rule(message))
        except (EOFError, OSError):
            pass  # the owner is gone
        except Exception as error:  # a message with classes that cannot be imported here
            self._send_message(Failed(picklable_error(error), traceback.format_exc(), again=False))
        finally:
            signal.raise_signal(signal.SIGTERM)

    def _with_known_rule(self, message: Message) -> Message:
        """Give requests of one rule the same instance, as in the owner's process, so that their rows share batches."""
        if not isinstance(message, Open):
            return message
        rule = message.request.rule
        known = self._rules.setdefault(pickle.dumps(rule), rule)
        return message._replace(request=replace(message.request, rule=known))

    def _send_message(self, reply: ChildMessage) -> None:
        with self._send_lock:
            self._pipe.send_bytes(pickle.dumps(reply))


def picklable_error(error: BaseException) -> BaseException:
    """Return the exception if it can be pickled, otherwise a RuntimeError with its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def main() -> None:
    """Run the child process from start to end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the owner
    if sys.platform == "linux":  # works even while the process is stopped, or another process holds the owner's end
        prctl: Any = ctypes.CDLL(None).prctl
        prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    pipe = Connection(os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    ChildLoop(pipe).run()


_CODE = "import os; os.environ['OMP_NUM_THREADS'] = sys.argv[1]; from outpace.card.process import main; main()"
_STARTING = 10  # patience factor for a child that is still importing and loading
_PAUSES = (0.2, 1.0, 5.0)  # seconds before each restart; after the last one the drafter is given up
_GRACE_SECONDS = 1.0  # time for a child to end by itself


class DraftProcessError(RuntimeError):
    """The drafter's process ended by itself, or does not answer."""


class ProcessWorker(RestartingWorker):
    """Keeps a drafting process running. The target decodes plainly until the child is ready, and while a dead child is
    replaced."""

    def __init__(
        self,
        build: Callable[[], Drafter],
        threads: int = 1,
        *,
        patience: float = 15.0,
        pauses: Sequence[float] = _PAUSES,
    ) -> None:
        """`build` is called in the child and must be picklable: a module's function, or a partial of one. `threads`:
        CPU threads of a forward. A child that reads nothing for `patience` seconds is ended. `pauses`: seconds before
        each restart. UserError for a `build` that cannot be pickled."""
        super().__init__(pauses)
        check_whole("draft_threads", threads, 1)
        self._start = Start(_pickled(build), threads)
        self._patience = patience
        self._child: ChildProcess | None = None

    @property
    def pid(self) -> int | None:
        """The process id of the child, if there is one."""
        return self._child.process.pid if self._child else None

    def stop(self) -> None:
        super().stop()
        if child := self._child:
            child.process.terminate()

    def _run_drafter(self) -> Failed | None:
        try:
            with ChildProcess(self._start) as child:
                self._child = child
                return self._listen(child)
        finally:
            self._child = None

    def _listen(self, child: ChildProcess) -> Failed | None:
        silence = 0.0  # counted in polls, because the whole program may have been stopped
        while not self._is_over:
            reply = child.receive(POLL_SECONDS)
            if isinstance(reply, Failed):
                return None if self._is_over else reply
            if reply is not None:
                self._handle(child, reply)
            silence = silence + POLL_SECONDS if reply is None and self._requests else 0.0
            if silence > self._patience * (1 if self._ready else _STARTING):
                return Failed(DraftProcessError(f"its process read nothing for {silence:g} seconds"))
            if silence:
                child.post(Ping())
        return None

    def _handle(self, child: ChildProcess, reply: ChildMessage) -> None:
        self._num_received += 1
        if isinstance(reply, Ready):
            self._set_ready(child)
        elif isinstance(reply, Grown):
            self._publish(reply.levels)
            self._count_step(reply.seconds)


class ChildProcess(AbstractContextManager["ChildProcess"]):
    """The owner's end of a child process. A thread of its own sends, because a stopped process reads nothing."""

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
        self._sender = threading.Thread(target=self._send, name="outpace-drafter-sender")
        self._sender.start()
        self.post(start)

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        child_process.stop(self.process, _GRACE_SECONDS)
        self.post(None)
        self._sender.join()
        self._pipe.close()

    def post(self, message: Message | Ping | Start | None) -> None:
        """Send a message as soon as the child reads it; returns at once."""
        self._outbox.put(message)

    def receive(self, seconds: float) -> ChildMessage | None:
        """Return the child's next message, None if none comes within `seconds`; its end is a Failed."""
        try:
            if not self._pipe.poll(seconds):
                return None if self.process.poll() is None else self._cause()
            reply: ChildMessage = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            return self._cause()
        if isinstance(reply, Failed):
            reply.error.__cause__ = DraftProcessError(f"\n\nin the drafter's process:\n{reply.traceback}")
        return reply

    def _cause(self) -> Failed:
        """Return why a child that is silent has ended."""
        if self._unsent is not None:
            return Failed(self._unsent, again=False)
        status = child_process.stop(self.process, _GRACE_SECONDS)
        return Failed(DraftProcessError(f"its process {child_process.describe_exit(status)}"))

    def _send(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                self._pipe.send_bytes(pickle.dumps(message))
        except OSError:
            pass  # the child is gone: `receive` finds out
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
