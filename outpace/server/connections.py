"""HTTP connections with bounds: their number, and the time and size of a request's head."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from outpace.server.middleware import Middleware
from outpace.server.options import ServerLimits

MAX_HEAD_BYTES = 64 << 10
TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's connection with limits. The head of a request lasts from its first byte, or from the connection's
    start, to its empty line. The body of a refused request is read and dropped."""

    limits: ServerLimits
    middleware: Middleware
    _timer: asyncio.TimerHandle | None = None  # of the current deadline
    _is_refused = False
    _keeps_alive = True  # after a refusal
    _head_bytes: int | None = 0  # received so far; None: no head is expected

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self._close(TOO_MANY)
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes is not None and self._head_bytes > MAX_HEAD_BYTES:
            self._close(TOO_LONG)

    def on_message_begin(self) -> None:
        if self._head_bytes is None:
            self._expect_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._cancel_timer()
        self._head_bytes = None
        if not self._refuse():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_refused:
            super().on_message_complete()
            if not self.pipeline and not self.cycle.response_complete:  # its task is going to run
                self.scope["state"]["reservation"] = self.middleware.reserve(*self._request_line())
        elif not self._keeps_alive:
            self.transport.close()

    def _refuse(self) -> bool:
        """Refuse the request if the queue is full; return whether it was. Pipelined requests are not refused here."""
        self._is_refused = False
        if self.cycle is not None and not self.cycle.response_complete:
            return False
        reply = self.middleware.refuse(*self._request_line())
        if reply is None:
            return False
        self._is_refused = True
        skips_body = self.expect_100_continue  # the client sends the body only after a 100
        self._keeps_alive = self.parser.should_keep_alive() and not skips_body
        self.transport.write(_encode(reply, self.server_state.default_headers, self._keeps_alive))
        if skips_body:
            self.transport.close()
        self._expect(b"", self.limits.body_seconds)  # the rest of the body, or another request
        return True

    def _request_line(self) -> tuple[str, str, Sequence[tuple[bytes, bytes]]]:
        path = self.url.partition(b"?")[0].decode("ascii", "replace")
        return self.parser.get_method().decode("ascii"), path, self.headers

    def _expect_head(self) -> None:
        self._head_bytes = 0
        self._expect(TOO_LATE, self.limits.body_seconds)

    def _expect(self, timeout_reply: bytes, seconds: float) -> None:
        """Set the connection's deadline, at which it is closed with a reply."""
        self._cancel_timer()
        self._timer = self.loop.call_later(seconds, self._close, timeout_reply)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _close(self, reply: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(reply)
            self.transport.close()


def _encode(reply: Response, default_headers: Sequence[tuple[bytes, bytes]], keeps_alive: bool) -> bytes:
    headers = [*default_headers, *reply.raw_headers, *([] if keeps_alive else [(b"connection", b"close")])]
    lines = [b"%b: %b\r\n" % pair for pair in headers]
    return b"".join([STATUS_LINE[reply.status_code], *lines, b"\r\n", reply.body])
