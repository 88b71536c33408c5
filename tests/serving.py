"""A real server in a thread, on a free port, and a client that uses http.client."""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import outpace
from outpace.server.app import build_app
from outpace.server.options import ServerLimits, ServerOptions
from outpace.server.run import Server, listen, make_server
from outpace.server.service import Service

HELLO = [{"role": "user", "content": "hello world"}]
CHAT = "/v1/chat/completions"
LONG = {"max_tokens": 100, "ignore_eos": True, "temperature": 0}
PATIENCE = 300.0  # seconds: a busy machine may be suspended for a minute or two


@dataclass
class Answered:
    """Status, headers and body of a response."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error in the format of the OpenAI API."""
        found: dict[str, Any] = self.json["error"]
        assert set(found) == {"message", "type", "param", "code"}
        return found

    @property
    def events(self) -> list[Any]:
        """The data of all events, without the final [DONE]."""
        *data, last = re.findall(r"^data: (.*)$", self.body.decode(), re.MULTILINE)
        assert last == "[DONE]"
        return [json.loads(one) for one in data]

    @property
    def choice(self) -> Any:
        """The first choice of a whole answer."""
        return self.json["choices"][0]


@dataclass
class Served:
    """A running server."""

    llm: outpace.LLM
    service: Service
    port: int
    server: Server = field(repr=False)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)

    def socket(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def ask(self, path: str, body: Any = None, **headers: str) -> Answered:
        """Send a POST request with a body, or a GET request. A body that is not bytes is sent as JSON."""
        connection = self.connect()
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json"} if data is not None else {}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            connection.request("GET" if data is None else "POST", path, data, sent)
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answered(response.status, found, response.read())
        finally:
            connection.close()

    def chat(self, content: Any = "hello world", **fields: Any) -> Answered:
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        return self.ask(CHAT, {"messages": messages, **fields})

    def complete(self, prompt: Any = "hello world", **fields: Any) -> Answered:
        return self.ask("/v1/completions", {"prompt": prompt, **fields})

    def figure(self, name: str, **labels: str) -> float:
        """Return a metric's value."""
        value = self.service.metrics.registry.get_sample_value(f"outpace:{name}", labels)
        assert value is not None, name
        return value

    def is_idle(self) -> bool:
        """Return whether no request runs or waits."""
        engine = self.llm.engine
        return not (self.service.admission.groups or engine.running or engine.waiting)

    def wait_idle(self) -> None:
        wait_for(self.is_idle)

    def wait_requests(self, count: int) -> None:
        """Wait until that many requests run or wait."""
        wait_for(lambda: len(self.service.admission.groups) == count)


def wait_for(condition: Any) -> None:
    """Wait until a condition is true; raise AssertionError after PATIENCE seconds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "the condition never became true"
        time.sleep(0.01)


@contextmanager
def served(llm: outpace.LLM, limits: ServerLimits | None = None, **options: Any) -> Iterator[Served]:
    """Serve a model until the block ends."""
    settings = ServerOptions(port=0, limits=limits or ServerLimits(), **options)
    service = Service(llm, settings)
    server = make_server(build_app(service), service)
    with listen(settings) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        wait_for(lambda: server.started or not thread.is_alive())
        assert server.started
        try:
            yield Served(llm, service, port, server)
        finally:
            server.handle_exit(15, None)
            thread.join(PATIENCE)
            assert not thread.is_alive(), "the server does not stop"


class Brake:
    """Blocks the engine before each step, except `left` steps, until `release`."""

    def __init__(self, llm: outpace.LLM) -> None:
        self._step, self._go = llm.engine.step, threading.Event()
        self.left = 0
        llm.engine.step = self._braked  # type: ignore[method-assign]

    def _braked(self, *arguments: Any) -> Any:
        while self.left == 0 and not self._go.wait(0.002):
            pass
        self.left = max(self.left - 1, 0)
        return self._step(*arguments)

    def release(self) -> None:
        self._go.set()


@contextmanager
def loaded(llm: outpace.LLM, brake: Brake, requests: int, key: str = "", **options: Any) -> Iterator[Served]:
    """Serve a model with braked requests, which are answered when the block ends. Options are also those of limits."""
    limits = {name: options.pop(name) for name in list(options) if name in ServerLimits.__dataclass_fields__}
    with served(llm, ServerLimits(**limits), **options) as site:
        asked = [send(site, {"messages": HELLO, **LONG}, key=key) for _ in range(requests)]
        site.wait_requests(requests)
        yield site
        brake.release()
        assert [one.makefile("rb").read(15) for one in asked] == [b"HTTP/1.1 200 OK"] * requests
        site.wait_idle()


def head(path: str = CHAT, length: int = 0, *more: str) -> bytes:
    """Return the head of a POST request."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {length}"]
    return "\r\n".join([*lines, *more, "", ""]).encode()


def send(site: Served, body: dict[str, Any], path: str = CHAT, room: int | None = None, key: str = "") -> socket.socket:
    """Send a request without reading the response; `room` is the size of the receive buffer in bytes."""
    data = json.dumps(body).encode()
    connection = socket.socket()
    if room is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    connection.settimeout(PATIENCE)
    connection.connect(("127.0.0.1", site.port))
    connection.sendall(head(path, len(data), f"X-Api-Key: {key}") + data)
    return connection
