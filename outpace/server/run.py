"""Running the server until a signal: the first lets running answers finish, a second one ends it at once.

Connections have bounds: their number, and the time and size of a request's head.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import sys
import time
from collections.abc import Callable
from types import FrameType

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from outpace.api.llm import LLM
from outpace.core.errors import UserError
from outpace.server import logs
from outpace.server.app import Middleware, build_app
from outpace.server.errors import unavailable
from outpace.server.options import ServerLimits, ServerOptions
from outpace.server.service import Service

GRACE_SECONDS = 3.0  # for sending the last events
SWITCH_INTERVAL = 0.0005  # seconds that the engine's thread may keep the interpreter lock from the event loop


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


MAX_HEAD_BYTES = 64 << 10
TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's connection with limits. The head of a request lasts from its first byte, or from the connection's
    start, to its empty line."""

    limits: ServerLimits
    middleware: Middleware
    _timer: asyncio.TimerHandle | None = None  # of the current deadline
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
        self._head_bytes = None
        self._read_target()
        self._expect(b"", 2 * self.limits.body_seconds)  # a handler that reads the body waits half as long
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._cancel_timer()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Name what the parser refuses. uvicorn calls this while it handles the parser's error."""
        path = self.url.partition(b"?")[0].decode("ascii", "replace") if self.scope else ""
        reply = self.middleware.refuse_invalid(path, str(sys.exc_info()[1] or msg))
        headers = [*self.server_state.default_headers, *reply.raw_headers, (b"connection", b"close")]
        lines = [b"%b: %b\r\n" % pair for pair in headers]
        self._close(b"".join([STATUS_LINE[reply.status_code], *lines, b"\r\n", reply.body]))

    def _read_target(self) -> None:
        """Split an absolute target of a request. Its host replaces that of the Host header (RFC 9112, 3.2.2)."""
        scheme, mark, rest = self.url.partition(b"://")
        if mark and b"/" not in scheme:
            host, slash, path = rest.partition(b"/")
            self.url = (slash or b"/") + path
            self.headers[:] = [(name, host if name == b"host" else value) for name, value in self.headers]

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


def listen(options: ServerOptions) -> socket.socket:
    """Return a bound socket; raise UserError if the address is not available."""
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio checks the protocol
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((options.host, options.port))
        listener.listen()  # else another server that is loading its model could have the port too
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

    async def run() -> None:
        task = asyncio.create_task(server.serve([listener]))
        while not server.started and not task.done():
            await asyncio.sleep(0.01)
        if server.started:
            on_started(service)
        await task

    asyncio.run(run())


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
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
        ssl_ca_certs=options.ssl_ca_certs and str(options.ssl_ca_certs),
        ssl_cert_reqs=ssl.CERT_REQUIRED if options.ssl_ca_certs else ssl.CERT_NONE,
    )
    return Server(config, service)
