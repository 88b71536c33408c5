"""Client of a server with the OpenAI API, for `outpace chat --url`."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from outpace.cli import process
from outpace.core.errors import UserError

TIMEOUT = 600.0  # seconds without a byte
MAX_LINE = 1 << 20  # bytes of one event


class RemoteAnswer(NamedTuple):
    """An answer's text, finish reason ("abort" after Ctrl-C), and llama.cpp's timings if the server sends them."""

    text: str
    finish_reason: str
    timings: Mapping[str, Any]


class RemoteModel:
    """A model on a server. The address may end with /v1; without `model` it is the first one that the server lists."""

    def __init__(self, url: str, key: str | None, model: str | None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"--url is {url!r}, it must be an address such as http://127.0.0.1:8000")
        try:
            self._port = parts.port
        except ValueError:
            raise UserError(f"--url is {url!r}, its port must be a number between 0 and 65535") from None
        self._is_secure, self._host = parts.scheme == "https", parts.hostname
        path = parts.path.rstrip("/")
        self._path = path if path.endswith("/v1") else f"{path}/v1"
        self._headers = {"Content-Type": "application/json", "Accept": "text/event-stream, application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self.model = model or self._first_model()

    def answer(
        self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any], show: Callable[[str], None]
    ) -> RemoteAnswer:
        """Request an answer and show it as it comes. Ctrl-C ends it, on the server too."""
        texts: list[str] = []
        reason, timings = "stop", dict[str, Any]()
        body = {"model": self.model, "messages": list(messages), "stream": True, **fields}
        with process.at_safe_points():
            try:
                with self._connection() as connection, process.stopping(partial(_shut_down, connection)):
                    for event in self._events(connection, body):
                        timings = event.get("timings") or timings
                        for choice in event.get("choices") or ():
                            reason = choice.get("finish_reason") or reason
                            text = (choice.get("delta") or {}).get("content") or ""
                            texts.append(text)
                            show(text)
            except UserError:
                if not process.take():
                    raise
                reason = "abort"
            else:
                reason = "abort" if process.take() else reason
        return RemoteAnswer("".join(texts), reason, timings)

    def _events(self, connection: http.client.HTTPConnection, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        response = self._request(connection, "POST", "/chat/completions", json.dumps(body).encode())
        while line := response.readline(MAX_LINE):
            data = line.decode("utf-8", "replace").strip()
            if not data.startswith("data:") or data == "data: [DONE]":
                continue
            event = _parse(data.removeprefix("data:"))
            if "error" in event:
                raise UserError(f"the server ended the answer: {_error_message(event)}")
            yield event

    def _first_model(self) -> str:
        with self._connection() as connection:
            response = self._request(connection, "GET", "/models")
            listed = _parse(response.read(MAX_LINE).decode("utf-8", "replace")).get("data")
        names = [entry.get("id") for entry in listed or () if isinstance(entry, Mapping)]
        if not names or not isinstance(names[0], str):
            raise UserError(f"{self._host} lists no model, name one by --target")
        return names[0]

    @contextmanager
    def _connection(self) -> Iterator[http.client.HTTPConnection]:
        """Yield a connection; UserError if it fails in the block."""
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=TIMEOUT)
        try:
            yield connection
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            raise UserError(f"--url: no answer from {self._host} ({why})") from None
        finally:
            connection.close()

    def _request(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None = None
    ) -> http.client.HTTPResponse:
        """Return the response; UserError for any status but 200."""
        connection.request(method, f"{self._path}{path}", body, self._headers)
        response = connection.getresponse()
        if response.status == 200:
            return response
        try:
            message = _error_message(_parse(response.read(MAX_LINE).decode("utf-8", "replace")))
        except UserError:
            message = response.reason
        raise UserError(f"{self._host} answers with status {response.status}: {message}")


def _shut_down(connection: http.client.HTTPConnection) -> None:
    with suppress(OSError):
        if connection.sock is not None:
            connection.sock.shutdown(socket.SHUT_RDWR)


def _parse(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UserError(f"the server does not have the OpenAI API: it sent {text[:80]!r}")
    return found


def _error_message(event: Mapping[str, Any]) -> str:
    error = event.get("error")
    message = error.get("message") if isinstance(error, Mapping) else error
    return str(message)[:500]
