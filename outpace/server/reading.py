"""A request's body: read within bounds of size and time, and parsed as JSON within a bound of depth."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from outpace.server.errors import ApiError
from outpace.server.options import Limits
from outpace.server.timers import LoopClock


async def read_json(request: Request, limits: Limits, clock: LoopClock) -> dict[str, Any]:
    """The JSON object that a request carries; ApiError for anything else. `clock` measures how long its body takes."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"the content-type is {kind[:80]!r}, it must be application/json")
    return parse(await _read(request, limits, clock), limits.json_depth)


async def _read(request: Request, limits: Limits, clock: LoopClock) -> bytes:
    length = request.headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and int(length) > limits.body_bytes:
        raise _too_large(limits)
    chunks = bytearray()

    async def collect() -> None:
        async for chunk in request.stream():
            chunks.extend(chunk)
            if len(chunks) > limits.body_bytes:
                raise _too_large(limits)

    reading = asyncio.ensure_future(collect())
    timer = clock.after(limits.body_seconds, reading.cancel)
    try:
        await reading
    except asyncio.CancelledError:
        if not timer.is_over:
            raise
        raise ApiError(408, f"the body did not come within {limits.body_seconds:g} seconds", code="timeout") from None
    except ClientDisconnect:
        raise ApiError(499, "the client left before its body had come", code="client_disconnected") from None
    finally:
        timer.cancel()
    return bytes(chunks)


def _too_large(limits: Limits) -> ApiError:
    return ApiError(413, f"the body is larger than {limits.body_bytes} bytes", code="body_too_large")


def parse(body: bytes, depth: int) -> dict[str, Any]:
    """JSON of this depth at most, whose numbers are numbers and whose strings are text."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse)
    except RecursionError:
        raise _too_deep(depth) from None
    except (UnicodeDecodeError, ValueError) as error:
        raise ApiError(400, f"the body is not JSON ({str(error)[:200]})", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is a JSON {type(value).__name__}, it must be an object", code="invalid_json")
    _check(value, depth)
    return value


def _check(value: Any, depth: int) -> None:
    """Layer by layer, so that no depth can exhaust the stack."""
    layer = [value]
    for _ in range(depth + 1):
        inner: list[Any] = []
        for item in layer:
            if isinstance(item, dict):
                inner += [*item.keys(), *item.values()]
            elif isinstance(item, list):
                inner += item
            elif isinstance(item, str) and not item.isascii():
                _check_text(item)
        if not inner:
            return
        layer = inner
    raise _too_deep(depth)


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ApiError(400, "the body has half a character (a lone surrogate)", code="invalid_json") from None


def _too_deep(depth: int) -> ApiError:
    return ApiError(400, f"the body's JSON is nested more than {depth} levels deep", code="invalid_json")


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")
