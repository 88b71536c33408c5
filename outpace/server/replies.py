"""Sending a response, streamed or whole. A client that disconnects ends its request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from outpace.server import logs
from outpace.server.choices import ChoiceGroup
from outpace.server.errors import ApiError, to_api_error
from outpace.server.response_formats import ResponseFormat, to_json
from outpace.server.service import Service

EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",
}


class JsonReply(Response):
    """A JSON value."""

    def __init__(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(to_json(value), status, dict(headers or {}), "application/json")


def error_reply(error: Exception, record: dict[str, Any], is_messages: bool) -> JsonReply:
    """Return an error in the format of the requested API, after `note_error`."""
    found = note_error(error, record)
    value = found.messages(record["id"]) if is_messages else found.openai()
    return JsonReply(value, found.status, found.headers)


def note_error(error: Exception, record: dict[str, Any]) -> ApiError:
    """Convert an error for the client, and note its code in the log record of the request; log a bug's traceback."""
    found = to_api_error(error)
    if found.status == 500:
        logs.fault(error, id=record["id"])
    if found.code:
        record["error"] = found.code
    return found


class ClientGone(BaseException):
    """The client has disconnected. No Exception, since it is not an error that the response could report."""


class Reply(Response):
    """A response that is being generated. However it ends, it ends the request in the engine."""

    def __init__(
        self, service: Service, group: ChoiceGroup, response_format: ResponseFormat, headers: Mapping[str, str]
    ) -> None:
        super().__init__()
        self._service, self._group, self._format, self._more_headers = service, group, response_format, dict(headers)
        self._is_complete = False  # all but the last bytes are sent: a disconnect does not matter any more
        self._sending_since: float | None = None
        self._is_too_slow = False  # the client does not read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._check_sending()
        watch = asyncio.create_task(self._watch_disconnect(receive))
        try:
            await self._respond(scope, receive, partial(self._send, send))
        except (ClientGone, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and not self._is_too_slow:
                raise
            self._group.is_gone = True
        finally:
            self._timer.cancel()
            self._group.cancel_timer()
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch
            self._fill_record(scope["state"]["record"])
            self._service.leave(self._group)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError

    async def _watch_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self._is_complete:
            self._group.is_gone = True
            self._group.wake()

    async def _wait(self, seconds: float) -> bool:
        """Wait for output; return whether there is some. Raises what ends the response."""
        changed = await self._group.wait(seconds)
        if self._group.is_gone:
            raise ClientGone
        if (error := self._group.error) is not None:
            raise error
        return changed

    async def _send(self, send: Send, message: Message) -> None:
        self._is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)
        self._sending_since = time.monotonic()
        try:
            await send(message)
        finally:
            self._sending_since = None

    def _check_sending(self) -> None:
        """Cancel a response whose client has not read for too long. One timer serves all messages."""
        now, most = time.monotonic(), self._service.limits.write_timeout
        left = most if self._sending_since is None else self._sending_since + most - now
        if left <= 0.0:
            self._is_too_slow = True
            self._task.cancel()
            return
        self._timer = asyncio.get_running_loop().call_later(left, self._check_sending)

    def _error_reply(self, scope: Scope, error: Exception) -> JsonReply:
        return error_reply(error, scope["state"]["record"], self._format.is_messages)

    def _fill_record(self, record: dict[str, Any]) -> None:
        choices = self._group.choices
        record["prompt_tokens"] = self._group.prompt_tokens
        record["completion_tokens"] = sum(choice.num_tokens for choice in choices)
        reasons = [choice.ended.reason if choice.ended else None for choice in choices]
        record["finish"] = "disconnect" if self._group.is_gone else reasons


class WholeReply(Reply):
    """A response of one JSON object."""

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            while not self._group.has_ended:
                await self._wait(60.0)
            if self._group.error is not None:
                raise self._group.error
            reply = JsonReply(self._format.whole(), headers=self._more_headers)
        except Exception as error:
            reply = self._error_reply(scope, error)
        await reply(scope, receive, send)


class EventStream(Reply):
    """A response of server-sent events: one a round and choice, and a sign of life after silence.

    The stream starts when the engine starts the request. An error before that is an HTTP status, by which clients
    decide whether to retry.
    """

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            while self._group.is_waiting:
                await self._wait(self._service.limits.ping / 2)
        except Exception as error:
            if not self._group.has_begun:  # otherwise the stream reports it
                await self._error_reply(scope, error)(scope, receive, send)
                return
        self._group.wake()  # for the output that came with the start
        pairs = {**self._more_headers, **EVENT_HEADERS}.items()
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await self._write(send, self._format.opening())
            await self._write_events(send)
        except Exception as error:
            record = scope["state"]["record"]
            await self._write(send, self._format.failed(note_error(error, record), record["id"]))
        await send({"type": "http.response.body", "body": b""})

    async def _write_events(self, send: Send) -> None:
        group, ended = self._group, set[int]()
        silent_since = time.monotonic()
        while len(ended) < len(group.choices):
            changed = await self._wait(self._service.limits.ping / 2)
            events: list[bytes] = []
            for number, choice in enumerate(group.choices if changed else ()):
                delta = choice.take()
                if delta is not None:
                    events += self._format.delta(choice, delta)
                if choice.ended is not None and number not in ended:
                    ended.add(number)
                    events += self._format.ended(choice, choice.ended)
            if not events and time.monotonic() - silent_since >= self._service.limits.ping:
                events = [self._format.ping()]
            if events:
                await self._write(send, events)
                silent_since = time.monotonic()
        await self._write(send, self._format.closing())

    async def _write(self, send: Send, events: Iterable[bytes]) -> None:
        body = b"".join(events)
        if body:
            await send({"type": "http.response.body", "body": body, "more_body": True})
