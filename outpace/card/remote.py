"""A drafter on another machine, which `outpace draft-worker` runs there. The target never waits for the link.

A thread dials it, and again after each failure: a broken or silent link costs speed and never changes the text.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from outpace.card import link
from outpace.card.link import NO_HELLO, Address, DialedStream, LinkError, Outbox
from outpace.card.loop import Close, Correct, Message, Open
from outpace.card.protocol_pb2 import FromDrafter, FromTarget, Ping
from outpace.card.restarting import POLL_SECONDS, RestartingWorker
from outpace.card.wire import Identity, LevelLimit, ProtocolError, add_message, parser, read_level, read_seconds
from outpace.core.errors import UserError

_PAUSES = (0.2, 1.0, 5.0)  # seconds before each retry; the last one is repeated
_FIRST_SECONDS = 10.0  # longest wait for the first hello
_FATAL = ("UNAUTHENTICATED", "FAILED_PRECONDITION")  # a retry would fail too


class RemoteEnd(NamedTuple):
    """Why a connection ended."""

    error: BaseException

    @property
    def again(self) -> bool:
        """Whether another connection may do better: not if the user has to change something."""
        return not isinstance(self.error, UserError)


class RemoteWorker(RestartingWorker):
    """Drafts on another machine. The target decodes plainly while there is no connection."""

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
        """`own`: the target. A connection that is silent for `patience` seconds is replaced. `start` waits at most
        `first_seconds` for the first one."""
        super().__init__(pauses, is_endless=True)
        self.address, self._own, self._key, self._patience = address, own, key, patience
        self._limit = LevelLimit()
        self._first = threading.Event()  # set when the first connection is ready or has failed
        self._first_seconds = first_seconds
        link.grpc()

    def _begin(self) -> None:
        """Connect. UserError if the drafter refuses this target."""
        super()._begin()
        self._first.wait(self._first_seconds)
        if self.failure is not None and not self.will_restart:
            self.close()
            raise UserError(str(self.failure))

    def stop(self) -> None:
        super().stop()
        self._first.set()

    def _post(self, message: Message) -> None:
        if isinstance(message, Correct | Close):
            self._limit.reset(message.key)
        if not self._own.has_tokens(_tokens_of(message)):
            self._caches[message.key].give_up()
            message = Close(message.key)  # the drafter's model cannot read this text
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
        with DrafterConnection(self.address, self._own, self._key) as connection:
            return self._listen(connection)

    def _listen(self, connection: DrafterConnection) -> RemoteEnd | None:
        silence = 0.0  # counted in polls, because the whole program may have been stopped
        while not self._is_over:
            reply = connection.receive(POLL_SECONDS)
            if isinstance(reply, Exception):
                return None if self._is_over else RemoteEnd(reply)
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
                return RemoteEnd(LinkError(f"the drafter at {self.address} sent an invalid message: {error}"))
        return None

    def _handle(self, connection: DrafterConnection, reply: FromDrafter) -> RemoteEnd | None:
        self._num_received += 1
        if self._ready is None:
            if not reply.HasField("hello"):
                raise ProtocolError(NO_HELLO)
            if mismatch := self._own.mismatch(reply.hello):
                return RemoteEnd(UserError(f"the drafter at {self.address} does not fit: {mismatch}"))
            self._num_failures = 0
            connection.ping()
            self._set_ready(connection)
            self._first.set()
            return None
        levels = [(level.key, read_level(level, self._own.num_tokens)) for level in reply.levels]
        for key, level in levels:
            self._limit.count(key, level)
        self._publish(levels)
        if levels:
            self._count_step(read_seconds(reply.seconds))
        if reply.HasField("pong") and (seconds := connection.trip(reply.pong.number)) is not None:
            self.note_trip(seconds)
        elif connection.is_ping_due:
            connection.ping()
        return None


class DrafterConnection(DialedStream):
    """A stream to a drafter."""

    def __init__(self, address: Address, own: Identity, key: str | None) -> None:
        self._sent: dict[int, float] = {}  # by number of a ping: when it was sent
        self._num_pings, self._last_ping = 0, 0.0
        outbox: Outbox[Message | FromTarget] = Outbox(FromTarget, add_message)
        super().__init__(address, "Draft", FromTarget(hello=own.hello), parser(FromDrafter), outbox, key)

    def post(self, message: Message) -> None:
        """Queue a message to the drafter; returns at once."""
        self.outbox.put(message)

    @property
    def is_ping_due(self) -> bool:
        return time.monotonic() > self._last_ping + POLL_SECONDS

    def ping(self, padding: int = 0, answer_bytes: int = 0) -> None:
        """Ask for a pong. `padding`, `answer_bytes`: bytes to add to the ping and to the pong."""
        self._num_pings += 1
        self._last_ping = time.monotonic()
        self._sent[self._num_pings] = self._last_ping
        ping = Ping(number=self._num_pings, padding=bytes(padding), answer_bytes=answer_bytes)
        self.outbox.put(FromTarget(ping=ping))

    def trip(self, number: int) -> float | None:
        """Return the seconds since a ping, by its number; None for one that was never sent or is already answered."""
        began = self._sent.pop(number, None)
        return None if began is None else time.monotonic() - began

    def error_of(self, code: str, details: str) -> Exception:
        if code == "OK":
            return LinkError(f"the drafter at {self.address} ended the link")
        if code == "UNIMPLEMENTED":
            return UserError(f"no draft worker listens on {self.address}: start one by `outpace draft-worker`")
        if code in _FATAL:
            return UserError(f"the drafter at {self.address} refused this target: {details}")
        lower = details.lower()
        if "certificate" in lower or "ssl" in lower or "handshake" in lower:
            return UserError(f"no secure link to {self.address}: {details}")
        return LinkError(f"no link to {self.address} ({code.lower().replace('_', ' ')}: {details})")


def _tokens_of(message: Message) -> Sequence[int]:
    """Return the tokens in a message to the drafter."""
    if isinstance(message, Open):
        return message.request.prompt
    return message.correction.tokens if isinstance(message, Correct) else ()
