"""Listens, until a signal ends it: the first one lets running answers end, a second one ends at once."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from outpace.api.llm import LLM
from outpace.core.errors import UserError
from outpace.server import logs, resting
from outpace.server.app import build
from outpace.server.connections import settings
from outpace.server.errors import unavailable
from outpace.server.gate import Gate
from outpace.server.options import ServerOptions
from outpace.server.resting import Resting
from outpace.server.service import Service

GRACE = 3.0  # seconds for the last events to be sent
_SWITCH = 0.0005  # seconds: so long may the engine's thread keep the interpreter from the event loop; by default 0.005


class Server(uvicorn.Server):
    """uvicorn's, but that it drains before it closes, and that a signal that was obeyed is no failure."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._drained: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal, and the second."""
        if self._service.is_draining:
            self.force_exit = self.should_exit = True
            return
        self._service.is_draining = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second."""
        if self._service.is_draining and self._drained is None:
            self._drained = asyncio.create_task(self._drain())
        return await super().on_tick(counter)

    async def _drain(self) -> None:
        service = self._service
        logs.write("drain", requests=len(service.admission.groups))
        end = service.clock.time() + service.limits.drain
        while service.admission.groups and service.clock.time() < end:
            await asyncio.sleep(0.02)
        service.end_all(unavailable("the server is shutting down", "draining"))
        end = service.clock.time() + GRACE
        while service.admission.groups and service.clock.time() < end:
            await asyncio.sleep(0.02)
        self.should_exit = True


def listen(options: ServerOptions) -> socket.socket:
    """The socket; UserError where the address cannot be had."""
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # named: asyncio looks for it
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((options.host, options.port))
    except OSError as error:
        raise UserError(f"cannot listen on {options.host} port {options.port}: {error.strerror or error}") from None
    return listener


def serve(llm: LLM, options: ServerOptions, listener: socket.socket, started: Callable[[], None]) -> None:
    """Serves until a signal comes; `started` is called once requests are answered."""
    sys.setswitchinterval(_SWITCH)
    service = Service(llm, options)
    server = make_server(build(service), service)

    async def run(selector: Resting) -> None:
        selector.is_full = lambda: service.admission.is_full
        task = asyncio.create_task(server.serve([listener]))
        while not server.started and not task.done():
            await asyncio.sleep(0.01)
        if server.started:
            started()
        await task

    resting.run(run)


def make_server(app: Gate, service: Service) -> Server:
    """uvicorn with our connections."""
    options = service.options
    tls: dict[str, Any] = {}
    if options.certificate is not None:
        tls = {"ssl_certfile": str(options.certificate), "ssl_keyfile": str(options.certificate_key)}
    return Server(uvicorn.Config(app, **settings(options.limits, app), **tls), service)
