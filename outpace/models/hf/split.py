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
FAILED, END = "failed", "end"
_CONNECT_SECONDS = 60.0  # for all processes to connect, once all have loaded
_SETTLED = 0.1  # seconds for torch's threads to finish the last collective

Message = list[tuple[str, tuple[Any, ...]]]
"""Names and arguments of operations, in order."""

T = TypeVar("T")


class Leader:
    """Rank 0's connections to the other ranks."""

    def __init__(self, followers: Sequence[Connection]) -> None:
        self._followers = list(followers)
        self._queued: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._numbers = count(1)

    def number(self, session: object) -> int:
        """Assign a number by which the other ranks know the session until it is released."""
        number = next(self._numbers)
        finalize(session, self.queue, "close", number).atexit = False
        return number

    def queue(self, name: str, *arguments: Any) -> None:
        """Queue an operation that the other ranks perform before the next forward."""
        self._queued.append((name, arguments))

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
            if not all(map(_has_failed, self._followers)):
                self._followers.clear()
                raise RuntimeError(f"a process of the split model has ended or failed alone ({error})") from error
            self.queue(FAILED)
            raise

    def end(self) -> None:
        self.queue(END)
        with suppress(UserError):  # they have already ended
            self._send()
        for follower in self._followers:
            follower.close()
        self._followers.clear()
        _settle()

    def _send(self) -> None:
        if not self._followers:
            raise UserError("the other processes of the split model have ended: load it anew")
        message: Message = []
        while self._queued:  # finalizers in other threads may append meanwhile
            message.append(self._queued.popleft())
        data = pickle.dumps(message)
        try:
            for follower in self._followers:
                follower.send_bytes(data)
        except OSError as error:
            self._followers.clear()
            raise UserError(f"a process of the split model has ended ({error}): load it anew") from error


def _has_failed(follower: Connection) -> bool:
    """Return whether the other side reports a failure."""
    try:
        return follower.poll(PATIENCE) and follower.recv_bytes() == FAILED.encode()
    except (EOFError, OSError):
        return False


def join_processes() -> int:
    """Join the process group and return this process's rank."""
    if not dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group()
    return int(dist.get_rank())


def leave_processes() -> None:
    """Leave the process group: torch may abort a process that ends while its threads still wait for a dead peer."""
    _settle()
    dist.destroy_process_group()


def _settle() -> None:
    """Wait until gloo's threads have released a collective's tensors.

    They need the interpreter for that, and abort the process if it is already shutting down (seen in a debugger).
    """
    time.sleep(_SETTLED)


def run_everywhere(work: Callable[[], T]) -> T:
    """Run `work` in every process. If one fails, all raise UserError, so that none waits for another."""
    result, failure = None, None
    try:
        result = work()
    except Exception as error:
        failure = error
    is_plain = failure is None or isinstance(failure, UserError)
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, failure and (str(failure) if is_plain else f"{type(failure).__name__}: {failure}"))
    if failure is not None:
        raise failure
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise UserError(f"rank {rank} of the split model could not load it: {reason}")
    return result  # type: ignore[return-value]  # None only if `work` returns it


def check_tp_plan(config: Any, kind: Any, size: int, source: object) -> None:
    """Raise UserError for a model that transformers cannot split, or whose heads `size` processes cannot share.

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
        server.settimeout(_CONNECT_SECONDS)
        dist.broadcast_object_list([(server.getsockname()[:2], secret)], src=0)
        followers: list[Connection] = []
        while len(followers) < dist.get_world_size() - 1:
            follower = _connection(server.accept()[0])
            with suppress(EOFError, OSError):  # a connection from outside
                if follower.poll(_CONNECT_SECONDS) and secrets.compare_digest(follower.recv_bytes(64), secret):
                    followers.append(follower)
    return Leader(followers)


def connect_to_leader() -> Connection:
    """Connect to rank 0 (on all other ranks)."""
    found: list[Any] = [None]
    dist.broadcast_object_list(found, src=0)
    address, secret = found[0]
    connection = _connection(socket.create_connection(address, timeout=_CONNECT_SECONDS))
    connection.send_bytes(secret)
    return connection


def _connection(opened: socket.socket) -> Connection:
    opened.settimeout(None)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # send messages at once
    return Connection(opened.detach())


def follow(passes: Any, leader: Connection) -> None:
    """Repeat rank 0's operations until it ends. Interrupts are ignored, as rank 0 handles them.

    Raises UserError if rank 0 ends without notice, and exceptions of forwards that did not fail on rank 0.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    sessions: dict[int, Any] = {}
    failure: Exception | None = None
    while True:
        try:
            if failure is not None and not leader.poll(PATIENCE):
                raise failure
            message: Message = pickle.loads(leader.recv_bytes())
        except (EOFError, OSError) as error:
            raise UserError("rank 0 of the split model has ended without notice") from error
        for name, arguments in message:
            if failure is not None and name == FAILED:
                failure = None
                continue
            if failure is not None and name in ("plain", "call"):
                raise failure
            if name == END:
                return
            try:
                repeat(passes, sessions, name, *arguments)
            except Exception as error:
                failure = error
                leader.send_bytes(FAILED.encode())


def repeat(passes: Any, sessions: dict[int, Any], name: str, *arguments: Any) -> None:
    """Perform one operation of rank 0 on this rank; `sessions` holds those of rank 0 by number."""
    if name == "plain":
        passes.plain(*arguments)
        return
    number, *rest = arguments
    if name == "close":
        sessions.pop(number, None)
        return
    for one in (number, rest[0]) if name == "copy" else (number,):
        if one not in sessions:
            sessions[one] = passes.open(0, 0)
    if name == "copy":
        sessions[number].copy_layers(sessions[rest[0]], rest[1])
    elif name == "call":
        passes.call(sessions[number], *rest)
    else:
        sessions[number].on_layers(name, *rest)
