"""What every request passes first: its id, who asks and by which name, and its line in the log."""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outpace.server import logs
from outpace.server.admission import Place
from outpace.server.errors import ApiError
from outpace.server.options import ServerOptions
from outpace.server.replies import error_reply
from outpace.server.service import Service
from outpace.server.shapes import new_id

OPEN = ("/", "/health", "/ready")  # need no key
GIVEN_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
HEADERS = ((b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"))


class Gate:
    """The outermost part of the application."""

    def __init__(self, app: ASGIApp, options: ServerOptions, answering: frozenset[str], service: Service) -> None:
        """`answering`: the addresses whose requests need room in the queue."""
        self._app, self._options, self._answering, self._service = app, options, answering, service
        self.clock = service.clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        headers = _by_name(scope["headers"])
        record = _record(scope["method"], scope["path"], headers)
        state = scope.setdefault("state", {})
        state["record"] = record
        began = time.perf_counter()

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.setdefault("status", message["status"])
                message = {**message, "headers": [*message["headers"], *_own_headers(record)]}
            await send(message)

        try:
            self._pass(scope["path"], headers, record, state.get("place") is not None)
        except ApiError as error:
            reply = error_reply(error, record, is_messages(scope["path"]))
            await reply(scope, receive, send_marked)
        else:
            await self._app(scope, receive, send_marked)
        finally:
            if (place := state.get("place")) is not None:
                place.leave()
            record["seconds"] = round(time.perf_counter() - began, 4)
            if scope["path"] not in OPEN[1:]:
                logs.write("request", **record)

    def refusal(self, method: str, path: str, pairs: Iterable[tuple[bytes, bytes]]) -> Response | None:
        """The whole answer where the queue is full, by a request's head alone: told before a task is begun for it. None
        where there is room, and for all other addresses."""
        if path not in self._answering or method != "POST" or not self._service.admission.is_full:
            return None
        headers = _by_name(pairs)
        record = _record(method, path, headers)
        try:
            self._pass(path, headers, record, False)
            return None
        except ApiError as error:
            reply = error_reply(error, record, is_messages(path))
            logs.write("request", **record, status=error.status, seconds=0.0)
            reply.raw_headers.extend(_own_headers(record))
            return reply

    def place(self, method: str, path: str, pairs: Iterable[tuple[bytes, bytes]]) -> Place | None:
        """Held for a request whose body has come, before its task begins: of many that come in one moment those that
        are too many are refused by their heads. None where no room is needed, or there is none, or the request may not
        pass: that is found again, and told, by its task."""
        admission = self._service.admission
        if path not in self._answering or method != "POST" or admission.is_full:
            return None
        try:
            self._admit(path, _by_name(pairs))
        except ApiError:
            return None
        return admission.place()

    def _pass(self, path: str, headers: Mapping[bytes, str], record: dict[str, Any], has_place: bool) -> None:
        """ApiError where a request may not pass, or where there is no room for it: its body is not read then."""
        record["key"] = self._admit(path, headers)
        if path in self._answering and not has_place:
            self._service.check_room()

    def _admit(self, path: str, headers: Mapping[bytes, str]) -> str:
        """Whose request this is; ApiError where it may not pass."""
        allowed = self._options.allowed_hosts
        host = _host(headers.get(b"host", ""))
        if allowed and host not in allowed:
            raise ApiError(
                400, f"the Host {host[:100]!r} is not served here; --allow-host adds it", code="invalid_host"
            )
        if not self._options.keys or path in OPEN:
            return ""
        given = headers.get(b"x-api-key") or _bearer(headers.get(b"authorization", ""))
        found = hashlib.sha256(given.encode("latin-1", "replace")).digest()
        known = [hmac.compare_digest(found, key) for key in self._options.keys]  # all of them, whichever fits
        if not any(known):
            why = "the API key is wrong" if given else "an API key is needed, as Authorization: Bearer or x-api-key"
            raise ApiError(401, why, code="invalid_api_key")
        return found.hex()[:12]


def is_messages(path: str) -> bool:
    """Whether errors are told as the Messages API does."""
    return path.startswith("/v1/messages")


def _by_name(pairs: Iterable[tuple[bytes, bytes]]) -> dict[bytes, str]:
    """Headers by name, the first of each."""
    return {name: value.decode("latin-1") for name, value in reversed(list(pairs))}


def _record(method: str, path: str, headers: Mapping[bytes, str]) -> dict[str, Any]:
    given = headers.get(b"x-request-id", "")
    request_id = given if GIVEN_ID.fullmatch(given) else new_id("req_")
    return {"id": request_id, "method": method, "path": path[:200]}


def _own_headers(record: Mapping[str, Any]) -> list[tuple[bytes, bytes]]:
    """Of every answer."""
    return [(b"x-request-id", record["id"].encode()), *HEADERS]


def _bearer(value: str) -> str:
    scheme, _, key = value.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _host(value: str) -> str:
    """Without its port."""
    if value.startswith("["):
        return value.partition("]")[0].lower() + "]"
    return value.partition(":")[0].lower()
