"""Running the server until a signal: the first lets running answers finish, a second one ends it at once.

Connections have bounds: their number, and the time and size of a request's head.
"""

from __future__ import annotations

import asyncio
import errno
import select
import selectors
import socket
import ssl
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import uvicorn
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from outpace.api.llm import LLM
from outpace.core.errors import UserError
from outpace.server import logs
from outpace.server.app import build_app
from outpace.server.errors import unavailable
from outpace.server.middleware import Middleware
from outpace.server.options import ServerLimits, ServerOptions
from outpace.server.service import Service

GRACE_SECONDS = 3.0  # for sending the last events
SWITCH_INTERVAL = 0.0005  # seconds that the engine's thread may keep the interpreter lock from the event loop
BATCHING_SECONDS = 0.02  # by which a refusal may be delayed, or by twice that on a new connection


class Server(uvicorn.Server):
    """uvicorn's server, but it drains before it closes, and ending by a signal is not an error."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._service.is_draining:
            self.force_exit = self.should_exit = True
            return
        self._service.is_draining = True

    async def on_tick(self, counter: int) -> bool:
        """Start draining after a signal. uvicorn calls this ten times a second."""
        if self._service.is_draining and self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        return await super().on_tick(counter)

    async def _drain(self) -> None:
        service = self._service
        logs.write("drain", requests=len(service.admission.groups))
        await self._wait_for_requests(service.limits.drain)
        service.fail_all(unavailable("the server is shutting down", "draining"))
        await self._wait_for_requests(GRACE_SECONDS)
        self.should_exit = True

    async def _wait_for_requests(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self._service.admission.groups and time.monotonic() < end:
            await asyncio.sleep(0.02)


class BatchingSelector(selectors.DefaultSelector):
    """An event loop's selector. While `is_full`, events of connections wait for a wake-up by another thread.

    The event loop shares the CPU with the engine's threads. Woken for each refusal in a flood of requests, it would
    interrupt them as often. So it wakes up once a step, when the engine has output anyway, and refuses many at once.
    """

    is_full: Callable[[], bool] = staticmethod(lambda: False)
    _waker: Any = None  # by which other threads wake the loop: the first one that the loop registers

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = super().register(fileobj, events, data)
        self._waker = self._waker or key
        return key

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        began = time.monotonic()
        found = super().select(timeout)
        if timeout == 0 or not found or any(key is self._waker for key, _ in found) or not self.is_full():
            return found  # with timeout 0 the loop has other work
        left = BATCHING_SECONDS if timeout is None else min(BATCHING_SECONDS, timeout - (time.monotonic() - began))
        select.select([self._waker.fd], [], [], max(left, 0.0))
        return super().select(0)


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
        self._read_target()
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

    def send_400_response(self, msg: str) -> None:
        """Name what the parser refuses. uvicorn calls this while it handles the parser's error."""
        path = self.url.partition(b"?")[0].decode("ascii", "replace") if self.scope else ""
        reply = self.middleware.refuse_invalid(path, str(sys.exc_info()[1] or msg))
        self._close(_encode(reply, self.server_state.default_headers, False))

    def _read_target(self) -> None:
        """Split an absolute target of a request. Its host replaces that of the Host header (RFC 9112, 3.2.2)."""
        scheme, mark, rest = self.url.partition(b"://")
        if mark and b"/" not in scheme:
            host, slash, path = rest.partition(b"/")
            self.url = (slash or b"/") + path
            self.headers[:] = [(name, host if name == b"host" else value) for name, value in self.headers]

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


def run_loop(main: Callable[[BatchingSelector], Any]) -> None:
    """Run a coroutine as asyncio.run does, on a loop with a BatchingSelector, which is passed to `main`."""
    selector = BatchingSelector()
    loop = asyncio.SelectorEventLoop(selector)
    try:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(main(selector))
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def listen(options: ServerOptions) -> socket.socket:
    """Return a bound socket; raise UserError if the address is not available."""
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio checks the protocol
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((options.host, options.port))
    except OSError as error:
        why = error.strerror or str(error)
        why += f"; try --port {options.port + 1}" if error.errno == errno.EADDRINUSE else ""
        raise UserError(f"cannot listen on {options.host} port {options.port}: {why}") from None
    return listener


def serve(llm: LLM, options: ServerOptions, listener: socket.socket, on_started: Callable[[Service], None]) -> None:
    """Serve until a signal. `on_started` is called when requests are accepted."""
    sys.setswitchinterval(SWITCH_INTERVAL)
    service = Service(llm, options)
    server = make_server(build_app(service), service)

    async def run(selector: BatchingSelector) -> None:
        selector.is_full = lambda: service.admission.is_full
        task = asyncio.create_task(server.serve([listener]))
        while not server.started and not task.done():
            await asyncio.sleep(0.01)
        if server.started:
            on_started(service)
        await task

    run_loop(run)


def make_server(app: Middleware, service: Service) -> Server:
    """Return a server for an application, with our connections instead of uvicorn's, and none of its logs. UserError if
    the port for drafting clients is not available."""
    options = service.options
    if options.draft_port is not None:
        from outpace.server.drafting import ClientListener

        service.clients = ClientListener(service)
    config = uvicorn.Config(
        app,
        http=type("Connection", (BoundedConnection,), {"limits": options.limits, "middleware": app}),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=5,
        ssl_certfile=options.certificate,
        ssl_keyfile=options.certificate_key,
        ssl_ca_certs=options.client_authorities and str(options.client_authorities),
        ssl_cert_reqs=ssl.CERT_REQUIRED if options.client_authorities else ssl.CERT_NONE,
    )
    return Server(config, service)
