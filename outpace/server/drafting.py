"""Clients that draft for themselves, over the call `Join` of `card/protocol.proto`. The API keys, queue, limits
and metrics of the server apply to their requests as to those over HTTP; their method is card."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from outpace.api.llm import PreparedRequest
from outpace.api.text import StopStrings, TextAssembler
from outpace.card.clients import ClientWorker, DraftingClient
from outpace.card.link import HELLO_SECONDS, SILENT_SECONDS, Listener, Outbox, authenticator
from outpace.card.loop import Close, Message
from outpace.card.protocol_pb2 import Close as CloseMessage
from outpace.card.protocol_pb2 import Event, FromDrafter, FromTarget, Ping
from outpace.card.wire import (
    LevelLimit,
    check,
    event_message,
    identity_of,
    parser,
    read_level,
    read_request,
    read_seconds,
)
from outpace.core.types import Request
from outpace.decoders.card import Card
from outpace.models.base import check_decoder_only
from outpace.server import logs
from outpace.server.choices import Choice, ChoiceGroup
from outpace.server.errors import ApiError
from outpace.server.replies import new_id, note_error
from outpace.server.service import Service

PING_SECONDS = 1.0  # between two measurements of the round trip
WAIT_SECONDS = 60.0  # longest time between two looks at a request


class ClientListener:
    """Listens for drafting clients. Streams are read in threads; requests belong to the event loop."""

    def __init__(self, service: Service) -> None:
        """Bind to the server's host and `draft_port`. UserError if that fails."""
        target = service.llm.target
        check_decoder_only(target.model, target.name, "draft_port")
        self._service, self.own = service, identity_of(target)
        self.worker = ClientWorker()
        self._listener = Listener(
            "Join", self.own, parser(FromDrafter), self._begin, authenticator(service.options.keys)
        )
        options = service.options
        assert options.draft_port is not None
        self.port = self._listener.bind(options.host, options.draft_port, options.read_tls())

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Accept clients; their requests are answered in this event loop."""
        self._loop = loop
        self._service.llm.engine.drafting.clients = self.worker
        self._listener.start()

    def close(self) -> None:
        """End all streams."""
        self._listener.__exit__()
        self._service.llm.engine.drafting.clients = None

    def _begin(self, key: str) -> tuple[Outbox[Any], Callable[[Any], None], Callable[[], None]]:
        stream = ClientStream(self, key)
        stream.outbox.put(FromTarget(hello=self.own.hello))
        return stream.outbox, stream.take, stream.end

    def answer(self, stream: ClientStream, request: Request) -> None:
        """Answer a request; thread-safe."""
        asyncio.run_coroutine_threadsafe(self._answer(stream, request), self._loop)

    def wake(self, group: ChoiceGroup) -> None:
        """Wake the coroutine that waits for a request; thread-safe."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(group.wake)

    async def _answer(self, stream: ClientStream, request: Request) -> None:
        """Answer a request until it ends or its client is gone."""
        service, began = self._service, time.perf_counter()
        record: dict[str, Any] = {"id": new_id("req_"), "method": "Join", "path": "/grpc", "key": stream.key}
        try:
            (choice,), group = await service.submit(lambda: self._prepare(stream, request))
            stream.group = group
            try:
                while not (group.has_ended or stream.has_left):
                    await group.wait(WAIT_SECONDS)
                    if group.error is not None:
                        raise group.error
                    choice.take()
                group.is_gone = not group.has_ended
                record |= {"prompt_tokens": group.prompt_tokens, "completion_tokens": choice.num_tokens}
                record["finish"] = [choice.ended.reason] if choice.ended else "disconnect"
                if choice.ended is not None:
                    stream.finish(CloseMessage(finish_reason=choice.ended.reason, num_tokens=choice.ended.tokens))
            finally:
                group.cancel_timer()
                service.leave(group)
        except Exception as error:
            found = note_error(error, record)
            stream.finish(CloseMessage(finish_reason="error", error=found.message))
            record["status"] = found.status
        finally:
            logs.write("request", **record, seconds=round(time.perf_counter() - began, 4))

    def _prepare(self, stream: ClientStream, request: Request) -> tuple[tuple[Choice], ChoiceGroup]:
        """Build the choice of a request; ApiError if its context is full."""
        if len(request.prompt) >= self.own.max_positions:
            most = self.own.max_positions
            raise ApiError(400, f"the prompt has {len(request.prompt)} tokens, the context holds {most}")
        tokenizer = self._service.llm.tokenizer
        text = TextAssembler(tokenizer.stream(True), StopStrings((), False), ())
        request = replace(request, client=stream.number, cache_salt=stream.key or None)
        choice = Choice(PreparedRequest(request, Card, Card.Options(), text, Card.name, ""), (0,))
        return (choice,), ChoiceGroup((choice,), (request.prompt,), stream.key)


class ClientStream(DraftingClient):
    """One client's stream, with one request."""

    def __init__(self, listener: ClientListener, key: str) -> None:
        super().__init__()
        self._listener, self.key = listener, key
        self.number = listener.worker.join(self)
        self.group: ChoiceGroup | None = None
        self._request: Request | None = None
        self._limit = LevelLimit()
        self._num_pings, self._last_ping = 0, 0.0
        self.outbox: Outbox[Message | FromTarget] = Outbox(FromTarget, _add_message)
        self.outbox.deadline = time.monotonic() + HELLO_SECONDS  # of the request

    def post(self, message: Message) -> None:
        self._limit.reset(0)
        if not isinstance(message, Close):  # `finish` says how it ended
            self.outbox.put(message._replace(key=0))

    def finish(self, close: CloseMessage) -> None:
        """Send the end of the answer."""
        self.outbox.deadline = time.monotonic() + SILENT_SECONDS
        self.outbox.put(FromTarget(events=[Event(close=close)]))
        self.outbox.close()

    def take(self, message: FromDrafter) -> None:
        """Take a message after the hello; ProtocolError for an invalid one."""
        own = self._listener.own
        check(not message.HasField("hello"), "a second hello was sent")
        if message.HasField("request"):
            check(self._request is None, "a second request was sent")
            self._request = read_request(message.request, own)
            self.outbox.deadline = math.inf  # the answer has an end
            self._listener.answer(self, self._request)
        if message.HasField("pong"):
            check(0 < message.pong.number == self._num_pings, f"pong {message.pong.number} answers no ping")
            self.note_trip(time.monotonic() - self._last_ping)
        if not message.levels:
            return
        levels = [read_level(level, own.num_tokens) for level in message.levels]
        for level in levels:
            self._limit.count(0, level)
        self.insert(levels, read_seconds(message.seconds))
        if time.monotonic() > self._last_ping + PING_SECONDS:
            self._num_pings, self._last_ping = self._num_pings + 1, time.monotonic()
            self.outbox.put(FromTarget(ping=Ping(number=self._num_pings)))

    def end(self) -> None:
        """End the request, because the stream has ended."""
        self._listener.worker.leave(self.number)
        if self.group is not None:
            self._listener.wake(self.group)


def _add_message(whole: FromTarget, message: Message) -> None:
    """Append a message to the events of a FromTarget, without the request, which the client knows."""
    whole.events.append(event_message(message, sends_request=False))
