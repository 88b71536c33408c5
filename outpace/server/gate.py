"""What every request passes first: its id, who asks and by which name, and its line in the log."""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outpace.server import logs
from outpace.server.errors import ApiError
from outpace.server.options import ServerOptions
from outpace.server.replies import error_reply
from outpace.server.shapes import new_id

OPEN = ("/", "/health", "/ready")  # need no key
GIVEN_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
HEADERS = ((b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"))


class Gate:
    """The outermost part of the application."""

    def __init__(self, app: ASGIApp, options: ServerOptions, check: Callable[[str], None]) -> None:
        """`check` gives an ApiError where a path cannot be served now, at little cost: before its body is read."""
        self._app, self._options, self._check = app, options, check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in reversed(scope["headers"])}
        record = _record(scope, headers)
        scope.setdefault("state", {})["record"] = record
        began = time.perf_counter()

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.setdefault("status", message["status"])
                own = [(b"x-request-id", record["id"].encode()), *HEADERS]
                message = {**message, "headers": [*message["headers"], *own]}
            await send(message)

        try:
            record["key"] = self._admit(scope["path"], headers)
            self._check(scope["path"])
        except ApiError as error:
            reply = error_reply(error, record["id"], is_messages(scope["path"]))
            await reply(scope, receive, send_marked)
        else:
            await self._app(scope, receive, send_marked)
        finally:
            record["seconds"] = round(time.perf_counter() - began, 4)
            if scope["path"] not in OPEN[1:]:
                logs.write("request", **record)

    def _admit(self, path: str, headers: dict[bytes, str]) -> str:
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


def _record(scope: Scope, headers: dict[bytes, str]) -> dict[str, Any]:
    given = headers.get(b"x-request-id", "")
    request_id = given if GIVEN_ID.fullmatch(given) else new_id("req_")
    return {"id": request_id, "method": scope["method"], "path": scope["path"][:200]}


def _bearer(value: str) -> str:
    scheme, _, key = value.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _host(value: str) -> str:
    """Without its port."""
    if value.startswith("["):
        return value.partition("]")[0].lower() + "]"
    return value.partition(":")[0].lower()
