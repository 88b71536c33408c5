"""A drafter on another machine, which `outpace draft-worker` runs there. The target never waits for the link.

One thread dials, again and again: a link that is torn or silent costs speed, never text.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from outpace.card import link
from outpace.card.link import Address, Outbox
from outpace.card.loop import Close, Correct, Message
from outpace.card.protocol_pb2 import FromDrafter, FromTarget, Ping
from outpace.card.restarting import POLL_SECONDS, RestartingWorker
from outpace.card.wire import (
    Identity,
    LayerLimit,
    ProtocolError,
    event_message,
    metadata,
    parser,
    read_layer,
    read_seconds,
)
from outpace.core.errors import UserError

_PAUSES = (0.2, 1.0, 5.0)  # seconds before each new try; the last one is repeated
_FIRST_SECONDS = 10.0  # for which the program waits for the first hello
_FATAL = ("UNAUTHENTICATED", "FAILED_PRECONDITION", "UNIMPLEMENTED")  # a new try would end like the first
_NUM_TRIPS = 9  # round trips that are remembered


class LinkError(RuntimeError):
    """The link to another machine ended or is silent."""


class RemoteEnd(NamedTuple):
    """Why a connection ended. Another one may do better unless the two sides do not fit."""

    error: BaseException
    again: bool = True


class RemoteWorker(RestartingWorker):
    """Drafts on another machine. The target decodes plainly until the link is there, and while it is torn."""

    def __init__(
        self,
        address: Address,
        own: Identity,
        key: str | None = None,
        *,
        patience: float = 15.0,
        pauses: Sequence[float] = _PAUSES,
        first_seconds: float = _FIRST_SECONDS,
    ) -> None:
        """`own`: the target's tokens. A link that is silent for `patience` seconds is dialled anew. Wait at most
        `first_seconds` for the drafter; UserError if it refuses this target."""
        super().__init__(pauses, is_endless=True)
        self.address, self._own, self._key, self._patience = address, own, key, patience
        self._trips = deque[float](maxlen=_NUM_TRIPS)
        self._limit = LayerLimit()
        self._first = threading.Event()  # set when the first connection is ready or has failed
        self.drafter_name = ""
        link.grpc()
        self._begin()
        self._first.wait(first_seconds)
        if self.failure is not None and not self.will_restart:
            self.close()
            raise UserError(str(self.failure))

    @property
    def round_trip_seconds(self) -> float:
        return statistics.median(self._trips) if self._trips else 0.0

    def stop(self) -> None:
        super().stop()
        self._first.set()

    def _post(self, message: Message) -> None:
        if isinstance(message, Correct | Close):
            self._limit.reset(message.key)
        super()._post(message)

    def _run_guarded(self) -> Any:
        try:
            end = super()._run_guarded()
            if end is not None:
                self.will_restart, self.failure = end.again, end.error  # before the program may go on
            return end
        finally:
            self._first.set()

    def _run_drafter(self) -> RemoteEnd | None:
        with Connection(self.address, self._own, self._key) as connection:
            return self._listen(connection)

    def _listen(self, connection: Connection) -> RemoteEnd | None:
        silence = 0.0  # counted in polls, because the whole program may have been stopped
        while not self._is_over:
            reply = connection.receive(POLL_SECONDS)
            if isinstance(reply, RemoteEnd):
                return None if self._is_over else reply
            if reply is None:
                silence += POLL_SECONDS
                if silence > self._patience:
                    return RemoteEnd(LinkError(f"the link to {self.address} was silent for {silence:g} seconds"))
                if self._ready is not None:
                    connection.ping()
                continue
            silence = 0.0
            try:
                if (end := self._handle(connection, reply)) is not None:
                    return end
            except ProtocolError as error:
                return RemoteEnd(LinkError(f"the drafter at {self.address} sent what makes no sense: {error}"))
        return None

    def _handle(self, connection: Connection, reply: FromDrafter) -> RemoteEnd | None:
        self._num_received += 1
        if self._ready is None:
            if not reply.HasField("hello"):
                raise ProtocolError("a stream begins with a hello")
            if misfit := self._own.misfit(reply.hello):
                return RemoteEnd(UserError(f"the drafter at {self.address} does not fit: {misfit}"), again=False)
            self.drafter_name, self._num_failures = reply.hello.name, 0
            connection.ping()
            self._set_ready(connection)
            self._first.set()
            return None
        layers = [(layer.key, read_layer(layer, self._own.num_tokens)) for layer in reply.layers]
        for key, layer in layers:
            self._limit.count(key, layer)
        self._publish(layers)
        if layers:
            self._count_step(read_seconds(reply.seconds))
        if reply.HasField("pong") and (seconds := connection.trip(reply.pong.number)) is not None:
            self._trips.append(seconds)
        elif connection.is_ping_due:
            connection.ping()
        return None


class Connection(AbstractContextManager["Connection"]):
    """One stream to a drafter, with a thread that reads it. Messages to it are sent by a thread of gRPC."""

    def __init__(self, address: Address, own: Identity, key: str | None) -> None:
        self._address = address
        self._channel = link.open_channel(address)
        self._outbox: Outbox[Message | FromTarget] = Outbox(_joined)
        self._inbox: SimpleQueue[FromDrafter | RemoteEnd] = SimpleQueue()
        self._sent: dict[int, float] = {}  # by number of a ping: when it was sent
        self._num_pings, self._last_ping = 0, 0.0
        call = self._channel.stream_stream(f"/{link.SERVICE}/Draft", FromTarget.SerializeToString, parser(FromDrafter))
        self._outbox.put(FromTarget(hello=own.hello))
        self._call = call(iter(self._outbox), metadata=metadata(key))
        self._reader = threading.Thread(target=self._read, name="outpace-drafter-reader", daemon=True)
        self._reader.start()

    def __exit__(self, *error: object) -> None:
        self._outbox.close()
        self._call.cancel()
        self._channel.close()
        self._reader.join()

    def post(self, message: Message) -> None:
        """Send a message when the link is free; returns at once."""
        self._outbox.put(message)

    @property
    def is_ping_due(self) -> bool:
        return time.monotonic() > self._last_ping + POLL_SECONDS

    def ping(self, padding: int = 0, answer_bytes: int = 0) -> None:
        """Ask for a sign of life, by which the round trip is measured; for one of that many bytes, each way."""
        self._num_pings += 1
        self._last_ping = time.monotonic()
        self._sent[self._num_pings] = self._last_ping
        ping = Ping(number=self._num_pings, padding=bytes(padding), answer_bytes=answer_bytes)
        self._outbox.put(FromTarget(ping=ping))

    def trip(self, number: int) -> float | None:
        """Return the seconds since a ping; None if it was not sent, or answered before."""
        began = self._sent.pop(number, None)
        return None if began is None else time.monotonic() - began

    def receive(self, seconds: float) -> FromDrafter | RemoteEnd | None:
        """Return the next message, None if none comes within `seconds`."""
        try:
            return self._inbox.get(timeout=seconds)
        except Empty:
            return None

    def _read(self) -> None:
        module = link.grpc()
        try:
            for message in self._call:
                self._inbox.put(message)
            self._inbox.put(RemoteEnd(LinkError(f"the drafter at {self._address} ended the link")))
        except module.RpcError as error:
            self._inbox.put(_end_of(self._address, error.code().name, error.details() or ""))
        except Exception as error:
            self._inbox.put(RemoteEnd(error))


def _end_of(address: Address, code: str, details: str) -> RemoteEnd:
    """Return what the status of a call means."""
    if code in _FATAL:
        return RemoteEnd(UserError(f"the drafter at {address} refused this target: {details}"), again=False)
    lower = details.lower()
    if "certificate" in lower or "ssl" in lower or "handshake" in lower:
        return RemoteEnd(UserError(f"no secure link to {address}: {details}"), again=False)
    return RemoteEnd(LinkError(f"no link to {address} ({code.lower().replace('_', ' ')}: {details})"))


def _joined(waiting: list[Message | FromTarget]) -> FromTarget:
    """Join all that waits to be sent in one message."""
    whole = FromTarget()
    for item in waiting:
        if isinstance(item, FromTarget):
            whole.MergeFrom(item)
        else:
            whole.events.append(event_message(item))
    return whole
