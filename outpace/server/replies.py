"""How an answer is sent: as a stream of events, or whole. Either way a client that leaves ends its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from outpace.server import logs
from outpace.server.choices import Group
from outpace.server.errors import ApiError, of
from outpace.server.service import Service
from outpace.server.shapes import Shape, encoded

EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",
}


class JsonReply(Response):
    """A JSON value with a status."""

    def __init__(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(encoded(value), status, dict(headers or {}), "application/json")


def error_reply(error: ApiError, record: dict[str, Any], in_messages: bool) -> JsonReply:
    """An error in the shape of the API that was asked; its code is noted in the request's line of the log."""
    note_error(error, record)
    value = error.messages(record["id"]) if in_messages else error.openai()
    return JsonReply(value, error.status, error.headers)


def note_error(error: ApiError, record: dict[str, Any]) -> None:
    """For the log."""
    if error.code:
        record["error"] = error.code


class Gone(Exception):
    """The client has left."""


class Reply(Response):
    """An answer that is being written. What ends it, ends it for the engine too."""

    def __init__(self, service: Service, group: Group, shape: Shape, headers: Mapping[str, str]) -> None:
        super().__init__()
        self._service, self._group, self._shape, self._beside = service, group, shape, dict(headers)
        self._is_told = False  # all but the last bytes: from now on nobody leaves
        self._sends_since: float | None = None  # by the server's clock
        self._is_late = False  # the client takes nothing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._look_at_sending()
        watch = asyncio.create_task(self._watch(receive))
        try:
            await self._reply(scope, send)
        except (Gone, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and not self._is_late:
                raise
            self._group.is_gone = True
        finally:
            self._timer.cancel()
            self._group.let_go()
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch
            self._note(scope["state"]["record"])
            self._service.leave(self._group)

    async def _reply(self, scope: Scope, send: Send) -> None:
        raise NotImplementedError

    async def _watch(self, receive: Receive) -> None:
        """Waits for the client to leave."""
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self._is_told:
            self._group.is_gone = True
            self._group.wake()

    async def _next(self, seconds: float) -> bool:
        """Whether something came; raises what ends the answer."""
        came = await self._group.next(seconds)
        if self._group.is_gone:
            raise Gone
        error = self._group.error
        if error is not None:
            raise error
        return came

    async def _send(self, send: Send, message: Message) -> None:
        """A client that takes nothing for too long is held to have left."""
        self._is_told = message["type"] == "http.response.body" and not message.get("more_body", False)
        self._sends_since = self._service.clock.time()
        try:
            await send(message)
        finally:
            self._sends_since = None

    def _refusal(self, scope: Scope, error: Exception) -> Response:
        """An answer that is nothing but an error."""
        return error_reply(self._known(error), scope["state"]["record"], self._shape.in_messages)

    @staticmethod
    def _known(error: Exception) -> ApiError:
        """As it is told; a bug is logged."""
        known = of(error)
        if known.status == 500:
            logs.fault(error)
        return known

    async def _send_whole(self, scope: Scope, send: Send, reply: Response) -> None:
        scope["state"]["record"]["status"] = reply.status_code
        for message in _messages(reply):
            await self._send(send, message)

    def _look_at_sending(self) -> None:
        """One timer for all that is sent; it breaks off what takes too long."""
        now, most = self._service.clock.time(), self._service.limits.write_timeout
        left = most if self._sends_since is None else self._sends_since + most - now
        if left <= 0.0:
            self._is_late = True
            self._task.cancel()
            return
        self._timer = self._service.clock.after(left, self._look_at_sending)

    def _note(self, record: dict[str, Any]) -> None:
        """For the log."""
        choices = self._group.choices
        record["prompt_tokens"] = self._group.prompt_tokens
        record["completion_tokens"] = sum(choice.ended.tokens if choice.ended else choice.written for choice in choices)
        record["finish"] = (
            "disconnect" if self._group.is_gone else [c.ended.reason if c.ended else None for c in choices]
        )


class Whole(Reply):
    """One JSON value at the end."""

    async def _reply(self, scope: Scope, send: Send) -> None:
        try:
            while not self._group.has_ended:
                await self._next(60.0)
            if self._group.error is not None:
                raise self._group.error
            reply: Response = JsonReply(self._shape.whole(self._group), headers=self._beside)
        except Gone:
            raise
        except Exception as error:
            reply = self._refusal(scope, error)
        await self._send_whole(scope, send, reply)


def _messages(reply: Response) -> Iterable[Message]:
    yield {"type": "http.response.start", "status": reply.status_code, "headers": reply.raw_headers}
    yield {"type": "http.response.body", "body": reply.body}


class EventStream(Reply):
    """Server-sent events: one a round and choice, and a sign of life in silence. They begin when the engine does: what
    ends a request in the queue is told by its status, by which clients know whether to ask again."""

    async def _reply(self, scope: Scope, send: Send) -> None:
        try:
            while self._group.is_waiting:
                await self._next(self._service.limits.ping / 2)
        except Gone:
            raise
        except Exception as error:
            if not self._group.has_begun:  # else it is told below, however soon it came
                await self._send_whole(scope, send, self._refusal(scope, error))
                return
        self._group.wake()  # what came is still to be looked at
        pairs = {**self._beside, **EVENT_HEADERS}.items()
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs]
        await self._send(send, {"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await self._write(send, self._shape.opening(self._group))
            await self._events(send)
        except Gone:
            raise
        except Exception as error:
            record, known = scope["state"]["record"], self._known(error)
            note_error(known, record)
            await self._write(send, self._shape.failed(known, record["id"]))
        await self._send(send, {"type": "http.response.body", "body": b""})

    async def _events(self, send: Send) -> None:
        group, shape = self._group, self._shape
        told: set[int] = set()
        silent_since = time.monotonic()
        while len(told) < len(group.choices):
            came = await self._next(self._service.limits.ping / 2)
            events: list[bytes] = []
            for number, choice in enumerate(group.choices if came else ()):
                delta = choice.take()
                if delta is not None:
                    events += shape.delta(choice, delta)
                if choice.ended is not None and number not in told:
                    told.add(number)
                    events += shape.ended(choice, choice.ended)
            if not events and time.monotonic() - silent_since >= self._service.limits.ping:
                events = [shape.ping(group)]
            if events:
                await self._write(send, events)
                silent_since = time.monotonic()
        await self._write(send, shape.closing(group))

    async def _write(self, send: Send, events: Iterable[bytes]) -> None:
        body = b"".join(events)
        if body:
            await self._send(send, {"type": "http.response.body", "body": body, "more_body": True})
