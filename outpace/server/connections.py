"""Connections within bounds: how many there are, and how long and large a request's head may be."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from outpace.server.options import Limits
from outpace.server.timers import LoopClock, Timer

HEAD_BYTES = 64 << 10
FULL = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class Doorkeeper(Protocol):
    """Is asked about each request by its method, path and headers. By its clock connections are timed."""

    clock: LoopClock

    def refusal(self, method: str, path: str, pairs: Sequence[tuple[bytes, bytes]]) -> Response | None:
        """What is sent as soon as a request's head is there."""

    def place(self, method: str, path: str, pairs: Sequence[tuple[bytes, bytes]]) -> Any:
        """What a request holds whose body is there too: its `state` has it as `place`, and gives it back."""


class Bounded(HttpToolsProtocol):
    """One connection. A head is being read from the first byte of a request, or from the connection's beginning, to
    its empty line. The body of a refused request is read and dropped."""

    limits: Limits
    door: Doorkeeper
    _timer: Timer | None = None  # one for all that is waited for, which looks at what is due
    _due: float | None = None
    _late = b""  # what is said then
    _is_refused = False
    _keeps_alive = True  # after a refusal
    _head: int | None = 0  # bytes of the head that is being read; None: none is

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            self._end(FULL)
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._head is not None:
            self._head += len(data)
        super().data_received(data)
        if self._head is not None and self._head > HEAD_BYTES:
            self._end(LONG)

    def on_message_begin(self) -> None:
        if self._head is None:
            self._expect_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._due = self._head = None
        if not self._refuse():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_refused:
            super().on_message_complete()
            if not self.pipeline and not self.cycle.response_complete:  # its task is sure to go on
                self.scope["state"]["place"] = self.door.place(*self._request())
        elif not self._keeps_alive:
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.timeout_keep_alive_task is not None:  # nothing is to be done: it goes by the server's clock instead
            self._unset_keepalive_if_required()
            if self._head is None:
                self._expect(b"", self.timeout_keep_alive)

    def _refuse(self) -> bool:
        """Whether the request was refused. One that stands behind another of its connection is not asked about."""
        self._is_refused = False
        if self.cycle is not None and not self.cycle.response_complete:
            return False
        reply = self.door.refusal(*self._request())
        if reply is None:
            return False
        self._is_refused = True
        skips_body = self.expect_100_continue  # who waits to be asked for it
        self._keeps_alive = self.parser.should_keep_alive() and not skips_body
        self.transport.write(_written(reply, self.server_state.default_headers, self._keeps_alive))
        if skips_body:
            self.transport.close()
        self._expect(b"", self.limits.body_seconds)  # the rest of its body, or another request
        return True

    def _request(self) -> tuple[str, str, Sequence[tuple[bytes, bytes]]]:
        """Its method, path and headers."""
        path = self.url.partition(b"?")[0].decode("ascii", "replace")
        return self.parser.get_method().decode("ascii"), path, self.headers

    def _expect_head(self) -> None:
        self._head = 0
        self._expect(LATE, self.limits.body_seconds)

    def _expect(self, late: bytes, seconds: float) -> None:
        """That something comes in time, or the connection ends with these words."""
        clock = self.door.clock
        self._due, self._late = clock.time() + seconds, late
        if self._timer is None:
            self._timer = clock.after(seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._due is None:
            return
        left = self._due - self.door.clock.time()
        if left > 0.0:
            self._timer = self.door.clock.after(left, self._look)
        else:
            self._end(self._late)

    def _end(self, reply: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(reply)
            self.transport.close()


def bounded(limits: Limits, door: Doorkeeper) -> type[Bounded]:
    """uvicorn's protocol with these limits."""
    return type("Bounded", (Bounded,), {"limits": limits, "door": door})


def _written(reply: Response, beside: Sequence[tuple[bytes, bytes]], keeps_alive: bool) -> bytes:
    """An answer in one piece."""
    headers = [*beside, *reply.raw_headers, *([] if keeps_alive else [(b"connection", b"close")])]
    lines = [b"%b: %b\r\n" % pair for pair in headers]
    return b"".join([STATUS_LINE[reply.status_code], *lines, b"\r\n", reply.body])


def settings(limits: Limits, door: Doorkeeper) -> dict[str, Any]:
    """uvicorn's settings beside: no log of its own, no server header, no websockets."""
    return {
        "http": bounded(limits, door),
        "ws": "none",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
        "timeout_keep_alive": 30,
        "timeout_graceful_shutdown": 5,
        "backlog": 2048,
    }
