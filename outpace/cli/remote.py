"""A server with the OpenAI API as `outpace chat --url` sees it: messages there, pieces of text back."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from outpace.cli import process
from outpace.core.errors import UserError

PATIENCE = 600.0  # seconds without a byte
MOST_LINE = 1 << 20  # bytes of one event


class Told(NamedTuple):
    """One answer: its text, why it ended ("abort" after Ctrl-C), and llama.cpp's timings where the server has them."""

    text: str
    finish_reason: str
    timings: Mapping[str, Any]


class Remote:
    """One server, by its address with or without /v1; `model` None: the first that it lists."""

    def __init__(self, url: str, key: str | None, model: str | None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"--url is {url!r}, it must be an address such as http://127.0.0.1:8000")
        self._is_secure, self._host, self._port = parts.scheme == "https", parts.hostname, _port(parts, url)
        path = parts.path.rstrip("/")
        self._path = path if path.endswith("/v1") else f"{path}/v1"
        self._headers = {"Content-Type": "application/json", "Accept": "text/event-stream, application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self.model = model or self._first_model()

    def answer(
        self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any], show: Callable[[str], None]
    ) -> Told:
        """Asks for an answer and shows it as it comes; Ctrl-C ends it, and the server's work on it."""
        connection = self._connect()
        texts: list[str] = []
        reason, timings = "stop", dict[str, Any]()

        def stop() -> None:
            with suppress(OSError):
                if connection.sock is not None:
                    connection.sock.shutdown(socket.SHUT_RDWR)

        with process.at_safe_points():
            try:
                with process.stopping(stop):
                    body = {"model": self.model, "messages": list(messages), "stream": True, **fields}
                    for event in self._events(connection, body):
                        timings = event.get("timings") or timings
                        for choice in event.get("choices") or ():
                            reason = choice.get("finish_reason") or reason
                            text = (choice.get("delta") or {}).get("content") or ""
                            texts.append(text)
                            show(text)
            except (UserError, OSError, http.client.HTTPException) as error:
                if not process.taken():
                    raise error if isinstance(error, UserError) else self._broken(error) from None
                reason = "abort"
            else:
                reason = "abort" if process.taken() else reason
            finally:
                connection.close()
        return Told("".join(texts), reason, timings)

    def _events(self, connection: http.client.HTTPConnection, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        connection.request("POST", f"{self._path}/chat/completions", json.dumps(body).encode(), self._headers)
        response = connection.getresponse()
        if response.status != 200:
            raise self._refused(response)
        while line := response.readline(MOST_LINE):
            data = line.decode("utf-8", "replace").strip()
            if not data.startswith("data:") or data == "data: [DONE]":
                continue
            event = _parsed(data.removeprefix("data:"))
            if "error" in event:
                raise UserError(f"the server ended the answer: {_said(event)}")
            yield event

    def _first_model(self) -> str:
        connection = self._connect()
        try:
            connection.request("GET", f"{self._path}/models", headers=self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise self._refused(response)
            listed = _parsed(response.read(MOST_LINE).decode("utf-8", "replace")).get("data")
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(error) from None
        finally:
            connection.close()
        names = [entry.get("id") for entry in listed or () if isinstance(entry, Mapping)]
        if not names or not isinstance(names[0], str):
            raise UserError(f"{self._host} lists no model, name one by --target")
        return names[0]

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=PATIENCE)

    def _broken(self, error: Exception) -> UserError:
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        return UserError(f"--url: no answer from {self._host} ({why})")

    def _refused(self, response: http.client.HTTPResponse) -> UserError:
        try:
            said = _said(_parsed(response.read(MOST_LINE).decode("utf-8", "replace")))
        except UserError:
            said = response.reason
        return UserError(f"{self._host} answers with status {response.status}: {said}")


def _port(parts: Any, url: str) -> int | None:
    try:
        port: int | None = parts.port
    except ValueError:
        raise UserError(f"--url is {url!r}, its port must be a number between 0 and 65535") from None
    return port


def _parsed(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        raise UserError(f"the server does not speak the OpenAI API: {text[:80]!r}") from None
    if not isinstance(found, dict):
        raise UserError(f"the server does not speak the OpenAI API: {text[:80]!r}")
    return found


def _said(event: Mapping[str, Any]) -> str:
    """The message of an error."""
    error = event.get("error")
    message = error.get("message") if isinstance(error, Mapping) else error
    return str(message)[:500]
