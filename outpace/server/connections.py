"""Connections within bounds: how many there are, and how long and large a request's head may be."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from outpace.server.options import Limits

HEAD_BYTES = 64 << 10
FULL = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


def bounded(limits: Limits) -> type[HttpToolsProtocol]:
    """uvicorn's protocol with these limits."""

    class Bounded(HttpToolsProtocol):
        """One connection. A head is being read from the first byte of a request, or from the connection's beginning, to
        its empty line."""

        _timer: asyncio.TimerHandle | None = None
        _head: int | None = 0  # bytes of the head that is being read; None: none is

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                self._end(FULL)
            else:
                self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
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
            self._stop_timer()
            self._head = None
            super().on_headers_complete()

        def _expect_head(self) -> None:
            self._head = 0
            self._stop_timer()
            self._timer = self.loop.call_later(limits.body_seconds, self._end, LATE)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _end(self, reply: bytes) -> None:
            if not self.transport.is_closing():
                self.transport.write(reply)
                self.transport.close()

    return Bounded


def settings(limits: Limits) -> dict[str, Any]:
    """uvicorn's settings beside: no log of its own, no server header, no websockets."""
    return {
        "http": bounded(limits),
        "ws": "none",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
        "timeout_keep_alive": 30,
        "timeout_graceful_shutdown": 5,
        "backlog": 2048,
    }
