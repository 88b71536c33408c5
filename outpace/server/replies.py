"""Responses, streamed or whole: common parts of their formats, and sending them.

The parts are server-sent events, usage, speculation statistics, and log-probabilities. A client that disconnects ends
its request.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from outpace.core.stats import RoundStats
from outpace.core.types import TokenLogprobs
from outpace.engine.sequence import RoundRecord
from outpace.server import logs
from outpace.server.choices import Choice, ChoiceDelta, ChoiceEnd, ChoiceGroup
from outpace.server.errors import ApiError, to_api_error
from outpace.server.generation_request import GenerationRequest
from outpace.server.request_body import StreamOptions
from outpace.server.service import Service
from outpace.server.tool_calls import AnswerPart
from outpace.tools.calls import CallBegin, TextDelta
from outpace.tools.reasoning import ThoughtDelta

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
MIN_LOGPROB = -9999.0  # replaces minus infinity, which JSON does not have
DONE = b"data: [DONE]\n\n"


def new_id(prefix: str) -> str:
    """Return a random id."""
    return prefix + secrets.token_hex(12)


def to_json(value: Any) -> bytes:
    """Encode compact JSON."""
    return _encode(value).encode("utf-8", "replace")


def sse(value: Any, name: str = "") -> bytes:
    """Encode a server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: ".encode() + to_json(value) + b"\n\n"


class ResponseFormat:
    """Writes one response in the format of an API, as events or as one JSON object. It keeps what was sent so far."""

    prefix: ClassVar[str]  # of ids

    def __init__(self, service: Service, body: Any, request: GenerationRequest, group: ChoiceGroup) -> None:
        self.service, self.body, self.request, self.group = service, body, request, group
        self.id = new_id(self.prefix)
        self.created = int(time.time())
        self.model = body.model or service.names[0]
        self._spelled = service.llm.tokenizer.spelled

    def opening(self) -> Iterable[bytes]:
        """Return the events before the first token."""
        return ()

    def delta(self, choice: Choice, delta: ChoiceDelta) -> Iterable[bytes]:
        """Return the events for new output of a choice."""
        raise NotImplementedError

    def ended(self, choice: Choice, ended: ChoiceEnd) -> Iterable[bytes]:
        """Return the events at a choice's end."""
        raise NotImplementedError

    def closing(self) -> Iterable[bytes]:
        """Return the events after the last choice's end."""
        return ()

    def failed(self, error: ApiError, request_id: str) -> Iterable[bytes]:
        """Return the events that end a stream with an error."""
        yield sse(error.openai())

    def ping(self) -> bytes:
        """Return a comment that keeps the connection alive: how many of the first prompt's tokens were read."""
        run, total = self.group.choices[0].run, len(self.group.prompts[0])
        session = getattr(run.kv, "session", None) if run is not None else None  # only while the engine works on it
        read = min(session.length + 1, total) if session is not None else 0
        return f": ping {read}/{total}\n\n".encode()

    def whole(self) -> dict[str, Any]:
        """Return the response that is not streamed."""
        raise NotImplementedError

    def statistics(self) -> dict[str, Any]:
        """Return the seed, vLLM's speculation metrics and llama.cpp's timings."""
        metrics = {"speculative_decoding": _speculation(self.group)}
        return {"seed": self.request.params.seed, "metrics": metrics, "timings": _timings(self.group)}

    def token_text(self, token: int) -> str:
        """Return a token's text; bytes that are not whole characters are written as in the OpenAI API."""
        spelled = self._spelled(token)
        try:
            return spelled.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def logprob_entry(self, record: TokenLogprobs, count: int) -> dict[str, Any]:
        """Return a token's log-probability with those of the `count` best tokens, as in chat completions."""
        top = [self._entry(*pair) for pair in record.top[:count]]
        return {**self._entry(record.token, record.logprob), "top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.token_text(token), "logprob": finite(logprob), "bytes": list(self._spelled(token))}


class ChunkFormat(ResponseFormat):
    """Common parts of chat completions and completions: chunks, usage and `[DONE]`. Subclasses define a choice."""

    kind: ClassVar[str]  # the field `object` of a response
    chunk_kind: ClassVar[str]  # and of a chunk
    content_field: ClassVar[str]  # of a choice
    empty: ClassVar[Any]  # content of a chunk that has only other fields

    def __init__(self, service: Service, body: Any, request: GenerationRequest, group: ChoiceGroup) -> None:
        super().__init__(service, body, request, group)
        options: StreamOptions | None = body.stream_options
        self._has_usage = bool(options and options.include_usage)
        self._has_continuous_usage = bool(options and options.continuous_usage_stats)
        self._num_open = request.n * len(request.prompts)  # choices whose end was not sent
        self._chunk_start = b"data: " + to_json(self._head(self.chunk_kind))[:-1] + b","

    def delta(self, choice: Choice, delta: ChoiceDelta) -> Iterator[bytes]:
        for index in choice.indices:
            content, more = self._output(index, choice, delta)
            if content or more:
                yield self._chunk([self._choice(index, content or self.empty, **more)])

    def _output(self, index: int, choice: Choice, delta: ChoiceDelta) -> tuple[Any, dict[str, Any]]:
        """Return the content and the other fields of a choice for new output."""
        raise NotImplementedError

    def ended(self, choice: Choice, ended: ChoiceEnd) -> Iterator[bytes]:
        self._num_open -= len(choice.indices)
        for index in choice.indices:
            is_last = self._num_open == 0 and index == choice.indices[-1]
            more = self.statistics() if is_last and not self._has_usage else {}
            yield self._chunk([self._choice(index, self._rest(index), **self._end(index, ended))], **more)

    def closing(self) -> Iterable[bytes]:
        if self._has_usage:
            yield self._chunk([], **self.statistics(), usage=self._usage())
        yield DONE

    def _rest(self, index: int) -> Any:
        """Return the content that was held back until a choice's end."""
        raise NotImplementedError

    def _end(self, index: int, ended: ChoiceEnd) -> dict[str, Any]:
        return {"finish_reason": "length" if ended.reason == "length" else "stop", "stop_reason": ended.stop}

    def _choice(self, index: int, content: Any, **more: Any) -> dict[str, Any]:
        return {"index": index, self.content_field: content, "logprobs": None, "finish_reason": None, **more}

    def _whole(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self._head(self.kind), "choices": choices, "usage": self._usage(), **more, **self.statistics()}

    def _usage(self) -> dict[str, Any]:
        group, figures = self.group, self.group.figures
        written = sum(len(choice.indices) * choice.num_tokens for choice in group.choices)
        details = {
            "reasoning_tokens": group.thought_tokens,
            "accepted_prediction_tokens": figures.predicted_accepted,
            "rejected_prediction_tokens": figures.predicted_rejected,
        }
        return {
            "prompt_tokens": group.prompt_tokens,
            "completion_tokens": written,
            "total_tokens": group.prompt_tokens + written,
            "prompt_tokens_details": {"cached_tokens": group.cached_tokens},
            "completion_tokens_details": details,
        }

    def token_fields(self, delta: ChoiceDelta) -> dict[str, Any]:
        """Return the optional fields about tokens: ids, sources and rounds."""
        more: dict[str, Any] = {}
        if self.body.return_token_ids and delta.tokens:
            more["token_ids"] = list(delta.tokens)
        if self.body.return_sources and delta.tokens:
            more["sources"] = list(delta.sources)
            more["token_texts"] = [self.token_text(token) for token in delta.tokens]
        if self.body.return_rounds and delta.rounds:
            more["rounds"] = [self._round(found, step) for found, step in delta.rounds]
        return more

    def _round(self, found: RoundRecord, step: RoundStats) -> dict[str, Any]:
        """Describe a round's tree and times. The root's parent is null."""
        return {
            "tokens": [self.token_text(token) for token in found.tokens],
            "parents": [parent if parent >= 0 else None for parent in found.parents],
            "sources": list(found.sources),
            "path": list(found.path),
            "draft_ms": round(1000 * step.draft_seconds, 3),
            "target_ms": round(1000 * step.target_seconds, 3),
            "ms": round(1000 * step.seconds, 3),
            "plan": step.plan and step.plan.to_dict(),
            **({"experts": round(step.experts, 2)} if step.experts else {}),
        }

    def _head(self, kind: str) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "system_fingerprint": self.service.fingerprint}

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        chunk = {"choices": choices, **more}
        if self._has_continuous_usage:
            chunk.setdefault("usage", self._usage())
        elif self._has_usage:
            chunk.setdefault("usage", None)
        return self._chunk_start + to_json(chunk)[1:] + b"\n\n"


class ItemFormat(ResponseFormat):
    """Common parts of the Messages and Responses APIs: one choice as a list of items. Only the last item is open."""

    text_kind: ClassVar[str]  # the type of an item of text
    thought_kind: ClassVar[str]
    call_kind: ClassVar[str]

    def __init__(self, service: Service, body: Any, request: GenerationRequest, group: ChoiceGroup) -> None:
        super().__init__(service, body, request, group)
        self._splitter = request.splitter()
        self._items: list[dict[str, Any]] = []

    def delta(self, choice: Choice, delta: ChoiceDelta) -> Iterator[bytes]:
        yield from self._add(self._splitter.push(delta.text))

    def _add(self, parts: Iterable[AnswerPart]) -> Iterator[bytes]:
        """Append parts to the open item, or to a new one if they belong elsewhere."""
        kinds: dict[type, str] = {TextDelta: self.text_kind, ThoughtDelta: self.thought_kind}
        for part in parts:
            kind = kinds.get(type(part), self.call_kind)
            call = part if isinstance(part, CallBegin) else None
            if call or not self._items or self._items[-1]["type"] != kind:
                yield from self._close()
                yield from self._open(kind, call)
            if not isinstance(part, CallBegin):
                yield from self._append(kind, part.text)

    def _open(self, kind: str, call: CallBegin | None) -> Iterator[bytes]:
        """Open an item. `call` is the tool call that it holds."""
        raise NotImplementedError

    def _append(self, kind: str, text: str) -> Iterator[bytes]:
        """Append text to the open item."""
        raise NotImplementedError

    def _close(self) -> Iterator[bytes]:
        """Close the open item, if there is one."""
        raise NotImplementedError

    def _fill(self) -> ChoiceEnd:
        """Fill the items without sending events; return the choice's end."""
        (choice,) = self.group.choices
        assert choice.ended is not None
        deque(self.delta(choice, choice.take() or ChoiceDelta()), maxlen=0)
        deque(self.ended(choice, choice.ended), maxlen=0)
        return choice.ended


def _speculation(group: ChoiceGroup) -> dict[str, Any]:
    """Return speculation metrics as vLLM has them."""
    steps = [step for choice in group.choices if choice.ended for step in choice.ended.history.steps]
    drafted = [step for step in steps if step.drafted]
    counts = Counter(step.accepted for step in drafted)
    figures = group.figures
    return {
        "mean_acceptance_length": round(figures.mean_accepted_length, 4),
        "draft_acceptance_rate": round(figures.draft_acceptance or 0.0, 4),
        "acceptance_histogram": [counts[length] for length in range(max(counts, default=-1) + 1)],
        "num_spec_steps": len(drafted),
        "num_accepted_draft_tokens": figures.accepted,
        "num_draft_tokens": figures.drafted,
        "num_spec_tokens": max((step.depth_offered for step in drafted), default=0),
    }


def _timings(group: ChoiceGroup) -> dict[str, Any]:
    """Return timings as llama.cpp has them."""
    histories, figures = [choice.ended.history for choice in group.choices if choice.ended], group.figures
    written = sum(choice.ended.tokens for choice in group.choices if choice.ended)
    prompt_ms = 1000 * max((h.first_token - h.began for h in histories if h.first_token), default=0.0)
    predicted_ms = 1000 * max((h.ended - h.first_token for h in histories if h.first_token), default=0.0)
    read = max(group.prompt_tokens - group.cached_tokens, 0)
    after_first = max(written - sum(h.steps[0].emitted for h in histories if h.steps), 0)
    return {
        "cache_n": group.cached_tokens,
        "prompt_n": read,
        "prompt_ms": round(prompt_ms, 3),
        "prompt_per_second": round(1000 * read / prompt_ms, 3) if prompt_ms else 0.0,
        "predicted_n": written,
        "predicted_ms": round(predicted_ms, 3),
        "predicted_per_second": round(1000 * after_first / predicted_ms, 3) if predicted_ms else 0.0,
        "draft_n": figures.drafted,
        "draft_n_accepted": figures.accepted,
    }


def finite(value: float) -> float:
    """Return a log-probability that JSON can represent."""
    return value if value > MIN_LOGPROB else MIN_LOGPROB


EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",
}


class JsonReply(Response):
    """A JSON value."""

    def __init__(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(to_json(value), status, dict(headers or {}), "application/json")


def error_reply(error: Exception, record: dict[str, Any]) -> JsonReply:
    """Return an error in the format of the requested API, after `note_error`."""
    found = note_error(error, record)
    value = found.messages(record["id"]) if record["path"].startswith("/v1/messages") else found.openai()
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
            reply = error_reply(error, scope["state"]["record"])
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
                await error_reply(error, scope["state"]["record"])(scope, receive, send)
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
