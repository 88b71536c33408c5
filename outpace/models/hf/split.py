"""Runs a model split over processes by transformers (`tp_plan`): rank 0 leads, the other ranks repeat its forwards.

Tensor parallelism (Megatron-LM, arXiv:1909.08053) needs the same forwards in the same order in every process, but what
is drafted and when depends on clocks and threads. So rank 0 decides; before each forward it sends the arguments, and
all changes to keys and values since the last one. torch.distributed.run starts the processes.
"""

from __future__ import annotations

import os
import pickle
import secrets
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing.connection import Connection
from typing import Any, TypeVar
from weakref import finalize

import torch
import torch.distributed as dist

from outpace.core.errors import UserError

PATIENCE = 30.0  # seconds to wait for the other side to report the same failure
FAILED = b"failed"
END = "end"

Message = list[tuple[str, tuple[Any, ...]]]


class Leader:
    """Rank 0's connections to the other ranks."""

    def __init__(self, links: Sequence[Connection]) -> None:
        self._links = list(links)
        self._notes: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._numbers = count(1)

    def number(self, session: object) -> int:
        """Assign a number by which the other ranks know the session until it is released."""
        number = next(self._numbers)
        finalize(session, self.queue, "close", number).atexit = False
        return number

    def queue(self, name: str, *arguments: Any) -> None:
        """Queue an operation that the other ranks perform before the next forward."""
        self._notes.append((name, arguments))

    @contextmanager
    def forward(self, name: str, *arguments: Any) -> Iterator[None]:
        """Run a forward here and on the other ranks at the same time.

        If it fails, it must fail on all ranks: otherwise their state is unknown and the model unusable.
        """
        self.queue(name, *arguments)
        self._send()
        try:
            yield
        except Exception as error:
            if not all(map(_has_failed, self._links)):
                self._links.clear()
                raise RuntimeError(f"a process of the split model has ended or failed alone ({error})") from error
            self.queue(FAILED.decode())
            raise

    def end(self) -> None:
        """End the other ranks."""
        self.queue(END)
        with suppress(UserError):  # they have already ended
            self._send()
        for connect_to_leader in self._links:
            connect_to_leader.close()
        self._links.clear()

    def _send(self) -> None:
        if not self._links:
            raise UserError("the other processes of the split model have ended: load it anew")
        message: Message = []
        while self._notes:
            message.append(self._notes.popleft())
        sent = pickle.dumps(message)
        try:
            for connect_to_leader in self._links:
                connect_to_leader.send_bytes(sent)
        except OSError as error:
            self._links.clear()
            raise UserError(f"a process of the split model has ended ({error}): load it anew") from error


def _has_failed(connect_to_leader: Connection) -> bool:
    """Return whether the other side reports a failure."""
    try:
        return connect_to_leader.poll(PATIENCE) and connect_to_leader.recv_bytes() == FAILED
    except (EOFError, OSError):
        return False


_SECONDS = 60.0  # for all processes to connect, once all have loaded
_SETTLED = 0.1  # seconds for torch's threads to finish the last collective

T = TypeVar("T")


def join_processes() -> int:
    """Join the process group and return this process's rank."""
    if not dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group()
    return int(dist.get_rank())


def leave_processes() -> None:
    """Leave the process group. torch may abort a process that ends before, while its threads still wait for a dead
    peer."""
    settle()
    dist.destroy_process_group()


def settle() -> None:
    """Wait before this process ends: gloo's threads release a collective's tensors shortly after it, need the
    interpreter for that, and abort the process if it is already shutting down (seen in a debugger)."""
    time.sleep(_SETTLED)


def run_everywhere(work: Callable[[], T]) -> T:
    """Run `work` in every process. If one fails, all raise UserError, so that none waits for another."""
    result, reason = None, None
    try:
        result = work()
    except Exception as error:
        reason, failure = f"{type(error).__name__}: {error}" if not isinstance(error, UserError) else str(error), error
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    if reason is not None:
        raise failure
    for rank, other in enumerate(reasons):
        if other is not None:
            raise UserError(f"rank {rank} of the split model could not load it: {other}")
    return result  # type: ignore[return-value]  # None only if `work` returns it


def check_tp_plan(config: Any, kind: Any, size: int, source: object) -> None:
    """Raise UserError for a model that transformers cannot split, or whose heads are not divisible by the process
    count.

    `kind` is the model's class, if known.
    """
    text = config.get_text_config(decoder=True)
    if not (getattr(text, "base_model_tp_plan", None) or getattr(kind, "_tp_plan", None)):
        raise UserError(f"transformers has no plan to split {source} ({type(config).__name__}): leave out tp_plan")
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, name, None)
        if isinstance(heads, int) and heads % size:
            raise UserError(f"{source} has {heads} {name}, which {size} processes cannot share alike: start fewer")


def connect_followers() -> Leader:
    """Accept connections from all other ranks (on rank 0)."""
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    secret = secrets.token_bytes(16)
    with socket.create_server((host, 0)) as server:
        server.settimeout(_SECONDS)
        dist.broadcast_object_list([(server.getsockname()[:2], secret)], src=0)
        links: list[Connection] = []
        while len(links) < dist.get_world_size() - 1:
            connection, _ = server.accept()
            connect_to_leader = _link_of(connection)
            with suppress(EOFError, OSError):  # a connection from outside
                if connect_to_leader.poll(_SECONDS) and secrets.compare_digest(
                    connect_to_leader.recv_bytes(64), secret
                ):
                    links.append(connect_to_leader)
    return Leader(links)


def connect_to_leader() -> Connection:
    """Connect to rank 0 (on all other ranks)."""
    found: list[Any] = [None]
    dist.broadcast_object_list(found, src=0)
    address, secret = found[0]
    connection = _link_of(socket.create_connection(address, timeout=_SECONDS))
    connection.send_bytes(secret)
    return connection


def _link_of(connection: socket.socket) -> Connection:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # send messages at once
    return Connection(connection.detach())


def follow(passes: Any, connection: Connection) -> None:
    """Repeat rank 0's operations until it ends. Interrupts are ignored, as rank 0 handles them.

    Raises UserError if rank 0 ends without notice, and exceptions of forwards that did not fail on rank 0.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    follower, failure = _Follower(passes), None
    while True:
        try:
            if failure is not None and not connection.poll(PATIENCE):
                raise failure
            message: Message = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise UserError("rank 0 of the split model has ended without notice") from error
        for name, arguments in message:
            if failure is not None and name == FAILED.decode():
                failure = None
                continue
            if failure is not None and name in _FORWARDS:
                raise failure
            if name == END:
                return
            try:
                follower.apply(name, *arguments)
            except Exception as error:
                failure = error
                connection.send_bytes(FAILED)


_FORWARDS = ("plain", "call")


class _Follower:
    """The sessions of another rank, controlled by rank 0."""

    def __init__(self, passes: Any) -> None:
        self._passes = passes
        self._sessions: dict[int, Any] = {}

    def apply(self, name: str, *arguments: Any) -> None:
        """Perform one operation of rank 0."""
        if name == "plain":
            self._passes.plain(*arguments)
            return
        number, *rest = arguments
        if name == "close":
            self._sessions.pop(number, None)
        elif name == "copy":
            self._session(number).copy_layers(self._session(rest[0]), rest[1])
        elif name == "call":
            self._passes.call(self._session(number), *rest)
        else:
            self._session(number).on_layers(name, *rest)

    def _session(self, number: int) -> Any:
        if number not in self._sessions:
            self._sessions[number] = self._passes.open(0, 0)
        return self._sessions[number]
