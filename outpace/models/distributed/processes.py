"""Connects the processes of a split model, which torch.distributed.run started: rank 0 leads, the others follow.

Every rank must perform the same operations in the same order, but what is drafted and when depends on clocks and
threads. So rank 0 decides: before each forward it sends the forward's arguments, and all changes to keys and values
since the last one. When a process ends, rank 0 cuts the connections to all others, so that those that wait for a tensor
end too.
"""

from __future__ import annotations

import os
import pickle
import secrets
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any, NoReturn, TypeVar
from weakref import finalize

import torch
import torch.distributed as dist

from outpace.core.errors import LostProcess, UserError

_PATIENCE = 30.0  # seconds in which the other ranks end
END = "end"
_CONNECT_SECONDS = 60.0  # in which all processes must start, and must connect after loading
_RETRY_SECONDS = 0.2  # between two attempts to reach rank 0
_SETTLE_SECONDS = 0.1  # in which torch's threads finish the last collective
_NOTICE_SECONDS = 2.0  # in which the end of another process is noticed
_GRACE = 0.5  # seconds that a rank has to exit by itself after rank 0 has ended
_LEADS = threading.Event()  # set once this process leads a split model

Message = list[tuple[str, tuple[Any, ...]]]
"""Names and arguments of operations, in order."""

T = TypeVar("T")


class Leader:
    """Rank 0's connections to the other ranks.

    `on_loss`, if set, is called with the error in another thread when a rank ends unexpectedly.
    """

    def __init__(self, followers: Sequence[Connection]) -> None:
        """`followers`: the connections to ranks 1, 2, ..."""
        self.on_loss: Callable[[LostProcess], None] | None = None
        self._followers = list(followers)
        self._queued: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._numbers = count(1)
        self._has_ended, self._is_lost, self._loss = False, threading.Event(), ""
        self._watcher = threading.Thread(target=self._watch, name="outpace-ranks", daemon=True)
        self._watcher.start()

    def number(self, session: object) -> int:
        """Assign a number by which the other ranks know the session until it is released."""
        number = next(self._numbers)
        finalize(session, self.queue, "close", number).atexit = False
        return number

    def queue(self, name: str, *arguments: Any) -> None:
        """Queue an operation that the other ranks perform before the next forward."""
        self._queued.append((name, arguments))

    def send(self) -> None:
        """Send all queued operations to the other ranks."""
        if self._has_ended or self._is_lost.is_set():
            raise self.loss()
        message: Message = []
        while self._queued:  # finalizers in other threads may append meanwhile
            message.append(self._queued.popleft())
        data = pickle.dumps(message)
        try:
            for follower in self._followers:
                follower.send_bytes(data)
        except OSError as error:
            raise self.loss() from error

    def loss(self) -> LostProcess:
        """Return the error that names the rank which ended first. Call it after a failure that this may have caused."""
        if not self._has_ended:
            self._is_lost.wait(_NOTICE_SECONDS)
        return LostProcess(f"{self._loss or 'the other processes of the split model have ended'}: load it anew")

    def end(self) -> None:
        """Let all other ranks exit."""
        self.queue(END)
        with suppress(UserError):  # they have already ended
            self.send()
        self._has_ended = True
        self._cut()
        self._watcher.join(_PATIENCE)
        for follower in self._followers:
            follower.close()
        self._followers.clear()
        _settle()

    def _watch(self) -> None:
        """Read what the other ranks report, and notice when one ends."""
        opened: dict[Any, int] = {follower: rank for rank, follower in enumerate(self._followers, 1)}
        failures: dict[int, str] = {}
        while opened:
            for follower in wait(list(opened)):
                rank = opened[follower]
                try:
                    failures[rank] = follower.recv_bytes().decode()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    del opened[follower]
                    how = f"failed: {failures[rank]}" if rank in failures else "ended without notice"
                    self._note_loss(f"rank {rank} of the split model has {how}")

    def _note_loss(self, reason: str) -> None:
        """Give the model up and end all other ranks, unless that was done before."""
        if self._has_ended or self._is_lost.is_set():
            return
        self._loss = reason
        self._is_lost.set()
        self._cut()
        if self.on_loss is not None:
            self.on_loss(self.loss())

    def _cut(self) -> None:
        """Cut the connections, so that all other ranks notice that this one stops."""
        for follower in list(self._followers):
            cut(follower)


def cut(connection: Connection) -> None:
    """Shut a connection down. Both sides notice, even if a thread is reading from it."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as connected:
        connected.shutdown(socket.SHUT_RDWR)


def join_processes() -> int:
    """Join the process group and return this process's rank. UserError if another process does not join in time, or if
    the others follow a model that was split before."""
    if _LEADS.is_set():
        raise UserError("this process has already split a model, which the other ranks follow: start anew for another")
    if dist.is_initialized():
        return int(dist.get_rank())
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    deadline = time.monotonic() + _CONNECT_SECONDS
    missing: list[str] = []
    try:
        if os.environ.get("RANK") != "0":
            _wait_for_store(deadline)
        store, rank, size = next(dist.rendezvous("env://", timeout=_until(deadline)))
        store = dist.PrefixStore(f"outpace-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        store.set(str(rank), "here")
        for other in range(size):
            missing = [str(other)]
            store.wait([str(other)], _until(deadline))
    except (RuntimeError, ValueError, OSError) as error:  # torch.distributed.DistError is a RuntimeError
        unseen = "another rank" if os.environ.get("RANK") == "0" else f"rank 0 at {os.environ.get('MASTER_ADDR')}"
        absent = f"rank {missing[0]}" if missing else unseen
        raise UserError(
            f"{absent} has not joined within {_CONNECT_SECONDS:.0f} seconds: start the command on every machine"
        ) from error
    dist.init_process_group(store=store, rank=rank, world_size=size)
    return int(rank)


def _until(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))


def _wait_for_store(deadline: float) -> None:
    """Wait until torch's store on rank 0 accepts connections; torch's own attempts may take twice their timeout."""
    address = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
    while True:
        try:
            socket.create_connection(address, timeout=_until(deadline).total_seconds()).close()
            return
        except OSError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_RETRY_SECONDS)


def leave_processes() -> None:
    """Leave the process group; torch may abort a process that ends while its threads wait for a dead peer."""
    _settle()
    dist.destroy_process_group()


def _settle() -> None:
    """Wait until gloo's threads have released a collective's tensors.

    They need the interpreter for that, and abort the process if it is already shutting down.
    """
    time.sleep(_SETTLE_SECONDS)


class _OtherFailed(UserError):
    """Raised if another rank could not load the model. That rank reports the failure itself."""


def gather(value: T) -> list[T]:
    """Return every rank's value. UserError if one has failed in `run_everywhere`."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (None, value))
    return [value for _, value in _checked(found)]


def run_everywhere(work: Callable[[], T]) -> T:
    """Run `work` in every process. If it fails in one, all processes raise an error, so that none waits for another.

    `work` may call `gather`.
    """
    result, failure = None, None
    try:
        result = work()
    except _OtherFailed:
        raise
    except Exception as error:
        failure = error
    is_plain = failure is None or isinstance(failure, UserError)
    reason = failure and (str(failure) if is_plain else f"{type(failure).__name__}: {failure}")
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (reason, None))
    if failure is not None:
        raise failure
    _checked(found)
    return result  # type: ignore[return-value]  # None only if `work` returns it


def _checked(found: Sequence[tuple[str | None, T]]) -> Sequence[tuple[str | None, T]]:
    for rank, (reason, _) in enumerate(found):
        if reason is not None:
            raise _OtherFailed(f"rank {rank} of the split model could not load it: {reason}")
    return found


def connect_followers() -> Leader:
    """Accept connections from all other ranks (on rank 0)."""
    _LEADS.set()
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    secret = secrets.token_bytes(16)
    with socket.create_server((host, 0)) as server:
        server.settimeout(_CONNECT_SECONDS)
        dist.broadcast_object_list([(server.getsockname()[:2], secret)], src=0)
        followers: dict[int, Connection] = {}
        while len(followers) < dist.get_world_size() - 1:
            follower = _connection(server.accept()[0])
            with suppress(EOFError, OSError):  # a connection from outside
                if follower.poll(_CONNECT_SECONDS):
                    said = follower.recv_bytes(64)
                    if secrets.compare_digest(said[: len(secret)], secret):
                        followers[int(said[len(secret) :])] = follower
    return Leader([followers[rank] for rank in sorted(followers)])


def connect_to_leader() -> Connection:
    """Connect to rank 0 (on all other ranks)."""
    found: list[Any] = [None]
    dist.broadcast_object_list(found, src=0)
    address, secret = found[0]
    connection = _connection(socket.create_connection(address, timeout=_CONNECT_SECONDS))
    connection.send_bytes(secret + str(dist.get_rank()).encode())
    return connection


def _connection(opened: socket.socket) -> Connection:
    opened.settimeout(None)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # send messages at once
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 2)):  # a machine that is gone
        if hasattr(socket, name):
            opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
    return Connection(opened.detach())


def follow(perform: Callable[..., None], leader: Connection) -> None:
    """Perform rank 0's operations until it ends. Interrupts are ignored, as rank 0 handles them.

    A failure is reported to rank 0 and raised. Raises LostProcess if rank 0 ends unexpectedly.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    messages: SimpleQueue[Message | None] = SimpleQueue()
    is_over = threading.Event()
    threading.Thread(target=_read, args=(leader, messages, is_over), name="outpace-leader", daemon=True).start()
    try:
        while (message := messages.get()) is not None:
            for name, arguments in message:
                if name == END:
                    return
                try:
                    perform(name, *arguments)
                except Exception as error:
                    with suppress(OSError):
                        leader.send_bytes(_sentence(error).encode())
                    raise
        raise LostProcess("rank 0 of the split model has ended without notice")
    finally:
        is_over.set()


def follow_and_exit(perform: Callable[..., None]) -> NoReturn:
    """Follow rank 0 until it ends, then exit. After a failure, print it and exit at once with status 1, because torch's
    threads may wait long for a dead peer."""
    try:
        follow(perform, connect_to_leader())
    except Exception as error:
        print(f"outpace, rank {dist.get_rank()}: {_sentence(error)}", file=sys.stderr, flush=True)
        os._exit(1)
    leave_processes()
    raise SystemExit(0)


def _sentence(error: Exception) -> str:
    said = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return said.partition("\n")[0]


def _read(leader: Connection, messages: SimpleQueue[Message | None], is_over: threading.Event) -> None:
    """Read rank 0's messages. If rank 0 ends, end this process, even if it is waiting for a tensor."""
    try:
        while True:
            messages.put(pickle.loads(leader.recv_bytes()))
    except (EOFError, OSError):
        messages.put(None)
    is_follower = dist.is_initialized() and dist.get_rank() > 0  # this whole process follows rank 0
    if not is_over.wait(_GRACE) and threading.main_thread().is_alive() and is_follower:
        print("outpace: rank 0 of the split model has ended or cut the connection", file=sys.stderr, flush=True)
        os._exit(1)
