"""The outermost part of the application: request ids, API keys, Host headers, refusals, and the request log."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outpace.card.link import match_key
from outpace.server import logs
from outpace.server.errors import ApiError
from outpace.server.options import ServerOptions
from outpace.server.replies import error_reply
from outpace.server.response_formats import new_id
from outpace.server.service import Service

KEYLESS_PATHS = ("/", "/docs", "/health", "/ready")
UNLOGGED_PATHS = ("/health", "/ready")
CLIENT_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|(?:[\w.~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(?::[0-9]*)?")  # RFC 3986, 3.2.2
SINGLE_HEADERS = (b"authorization", b"x-api-key", b"content-type")  # read here; several lines must be equal
SECURITY_HEADERS = ((b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"))
Headers = Iterable[tuple[bytes, bytes]]


class Middleware:
    """An ASGI application around another."""

    def __init__(self, app: ASGIApp, options: ServerOptions, queued: frozenset[str], service: Service) -> None:
        """`queued` are the paths whose requests go through the queue."""
        self._app, self._options, self._queued, self._service = app, options, queued, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # no websockets: the lifespan
            await self._app(scope, receive, send)
            return
        headers = _by_name(scope["headers"])
        record = _new_record(scope["method"], scope["path"], headers)
        scope.setdefault("state", {})["record"] = record
        began = time.perf_counter()

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.setdefault("status", message["status"])
                message = {**message, "headers": [*message["headers"], *_own_headers(record)]}
            await send(message)

        try:
            _check_head(scope["http_version"], scope["headers"])
            self._check(scope["path"], headers, record)
        except ApiError as error:
            reply = error_reply(error, record, is_messages_path(scope["path"]))
            await reply(scope, receive, send_with_headers)
        else:
            await self._app(scope, receive, send_with_headers)
        finally:
            record["seconds"] = round(time.perf_counter() - began, 4)
            if scope["path"] not in UNLOGGED_PATHS:
                logs.write("request", **record)

    def refuse_invalid(self, path: str, reason: str) -> Response:
        """Return the response to bytes that the HTTP parser refuses; `path` may be incomplete."""
        error = ApiError(400, f"the request is not valid HTTP: {reason}", code="invalid_http")
        record = _new_record("", path, {})
        reply = error_reply(error, record, is_messages_path(path))
        logs.write("request", **record, status=error.status, seconds=0.0)
        reply.raw_headers.extend(_own_headers(record))
        return reply

    def _check(self, path: str, headers: Mapping[bytes, str], record: dict[str, Any]) -> None:
        """Raise ApiError for a request that may not pass, or finds the queue full."""
        record["key"] = self._authenticate(path, headers)
        if path in self._queued:
            self._service.admission.check()

    def _authenticate(self, path: str, headers: Mapping[bytes, str]) -> str:
        """Return an id of the request's API key; raise ApiError for a wrong key or Host header."""
        allowed = self._options.allowed_hosts
        host = _without_port(headers.get(b"host", ""))
        if allowed and host not in allowed:
            raise ApiError(400, f"host {host[:100]!r} is not allowed; --allow-host adds it", code="invalid_host")
        if not self._options.keys or path in KEYLESS_PATHS:
            return ""
        given = [key for key in (_bearer(headers.get(b"authorization", "")), headers.get(b"x-api-key")) if key]
        for key in given:  # clients may send a key of another service too
            if (found := match_key(key, self._options.keys)) is not None:
                return found
        why = "the API key is wrong" if given else "an API key is needed, as Authorization: Bearer or x-api-key"
        raise ApiError(401, why, code="invalid_api_key")


def is_messages_path(path: str) -> bool:
    """Whether errors of this path have the format of the Messages API."""
    return path.startswith("/v1/messages")


def _check_head(version: str, pairs: Headers) -> None:
    """Raise ApiError for what RFC 9110 and RFC 9112 call errors and the HTTP parser accepts.

    Programs in between might read such a request differently. The parser itself checks the length of the body.
    """
    values: dict[bytes, list[bytes]] = {}
    for name, value in pairs:
        values.setdefault(name, []).append(value)
    hosts, codings = values.get(b"host", []), b", ".join(values.get(b"transfer-encoding", []))
    why = ""
    if version in ("0.9", "2.0"):
        raise ApiError(505, f"the version is HTTP/{version}, this server supports HTTP/1.1 and HTTP/1.0")
    if len(hosts) != 1 and (hosts or version == "1.1"):
        why = f"the request has {len(hosts)} Host headers, it must have one"
    elif hosts and not HOST.fullmatch(hosts[0]):
        why = f"the Host header is {_quoted(hosts[0])}, it must be a name or an address, and may have a port"
    elif codings and version == "1.0":
        why = f"the transfer-encoding is {_quoted(codings)}, HTTP/1.0 has none"
    for name in SINGLE_HEADERS:
        if len(set(values.get(name, []))) > 1:
            why = why or f"the request has different {name.decode()} headers, it may have one"
    if why:
        raise ApiError(400, why, code="invalid_http")
    if codings and codings.lower() != b"chunked":
        raise ApiError(501, f"the transfer-encoding is {_quoted(codings)}, it must be chunked", code="invalid_http")


def _quoted(value: bytes) -> str:
    return repr(value.decode("latin-1")[:100])


def _by_name(pairs: Headers) -> dict[bytes, str]:
    """Return headers by name, the first of each."""
    return {name: value.decode("latin-1") for name, value in reversed(list(pairs))}


def _new_record(method: str, path: str, headers: Mapping[bytes, str]) -> dict[str, Any]:
    """Return the log record of a request, with the client's request id if it has a valid one."""
    given = headers.get(b"x-request-id", "")
    request_id = given if CLIENT_ID.fullmatch(given) else new_id("req_")
    return {"id": request_id, "method": method, "path": path[:200]}


def _own_headers(record: Mapping[str, Any]) -> list[tuple[bytes, bytes]]:
    return [(b"x-request-id", record["id"].encode()), *SECURITY_HEADERS]


def _bearer(value: str) -> str:
    scheme, _, key = value.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0].lower() + "]"
    return host.partition(":")[0].lower()
