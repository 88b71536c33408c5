"""How `/v1/messages` answers: the Messages API's events and message."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from outpace.server.choices import Choice, Delta, Ended, Group
from outpace.server.errors import ApiError
from outpace.server.jobs import Job
from outpace.server.messages_body import MessagesBody
from outpace.server.parts import CallBegin, Part, Thought
from outpace.server.service import Service
from outpace.server.shapes import Shape, cached_tokens, event, new_id, speculation


class MessagesShape(Shape):
    """Blocks of content, one open at a time."""

    in_messages = True

    def __init__(self, service: Service, body: MessagesBody, job: Job) -> None:
        super().__init__(service, "msg_")
        self._body, self._job = body, job
        self._splitter = job.splitter()
        self._blocks: list[dict[str, Any]] = []  # the last one is open
        self._written = 0

    def opening(self, group: Group) -> Iterator[bytes]:
        message = self._message([], None, None, _usage(group, 0))
        yield _told("message_start", message=message)

    def delta(self, choice: Choice, delta: Delta) -> Iterator[bytes]:
        self._written += len(delta.tokens)
        for part in self._splitter.push(delta.text):
            yield from self._events(part)

    def ended(self, choice: Choice, ended: Ended) -> Iterator[bytes]:
        for part in self._splitter.finish():
            yield from self._events(part)
        yield from self._close()
        reason, sequence = self._reason(ended)
        usage = {"output_tokens": ended.tokens}
        yield _told("message_delta", delta={"stop_reason": reason, "stop_sequence": sequence}, usage=usage)

    def closing(self, group: Group) -> Iterator[bytes]:
        yield _told("message_stop", seed=self._job.params.seed, **speculation(group))

    def failed(self, error: ApiError, request_id: str) -> Iterator[bytes]:
        yield event(error.messages(request_id), "error")

    def ping(self, group: Group) -> bytes:
        return _told("ping")

    def whole(self, group: Group) -> dict[str, Any]:
        (choice,) = group.choices
        delta = choice.take() or Delta()
        assert choice.ended is not None
        for part in [*self._splitter.push(delta.text), *self._splitter.finish()]:
            for _ in self._events(part):
                pass
        for _ in self._close():
            pass
        reason, sequence = self._reason(choice.ended)
        message = self._message(self._blocks, reason, sequence, _usage(group, choice.ended.tokens))
        return {**message, "seed": self._job.params.seed, **speculation(group)}

    def _events(self, part: Part) -> Iterator[bytes]:
        """Opens the block that a part belongs to, if it is not the open one, and adds the part."""
        kind = {"Text": "text", "Thought": "thinking"}.get(type(part).__name__, "tool_use")
        if not self._blocks or self._blocks[-1]["type"] != kind or isinstance(part, CallBegin):
            yield from self._close()
            self._blocks.append(self._new_block(kind, part))
            empty = {**self._blocks[-1], **({"input": {}} if kind == "tool_use" else {})}
            yield _told("content_block_start", index=len(self._blocks) - 1, content_block=empty)
        if isinstance(part, CallBegin):
            return
        field, delta_type, key = {
            "text": ("text", "text_delta", "text"),
            "thinking": ("thinking", "thinking_delta", "thinking"),
            "tool_use": ("input", "input_json_delta", "partial_json"),
        }[kind]
        self._blocks[-1][field] += part.text
        yield _told("content_block_delta", index=len(self._blocks) - 1, delta={"type": delta_type, key: part.text})

    def _new_block(self, kind: str, part: Part) -> dict[str, Any]:
        if isinstance(part, CallBegin):
            return {"type": kind, "id": new_id("toolu_"), "name": part.name, "input": ""}
        if isinstance(part, Thought):
            return {"type": kind, "thinking": "", "signature": ""}
        return {"type": kind, "text": ""}

    def _close(self) -> Iterator[bytes]:
        """Ends the open block; the input of a call is read as JSON by now."""
        if not self._blocks:
            return
        last = self._blocks[-1]
        if last["type"] == "tool_use" and isinstance(last["input"], str):
            try:
                last["input"] = json.loads(last["input"] or "{}")
            except ValueError:
                last["input"] = {}
        yield _told("content_block_stop", index=len(self._blocks) - 1)

    def _reason(self, ended: Ended) -> tuple[str, str | None]:
        if isinstance(ended.stop, str):
            return "stop_sequence", ended.stop
        if ended.reason == "length":
            return "max_tokens", None
        return ("tool_use" if self._splitter.calls else "end_turn"), None

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, sequence: str | None, usage: dict[str, Any]
    ) -> dict[str, Any]:
        model = self._body.model or self.service.names[0]
        head = {"id": self.id, "type": "message", "role": "assistant", "model": model, "content": content}
        return {**head, "stop_reason": reason, "stop_sequence": sequence, "usage": usage}


def _usage(group: Group, written: int) -> dict[str, Any]:
    """`input_tokens` are those of the whole prompt; which of them were cached stands beside."""
    details = {"cached_tokens": cached_tokens(group)}
    cache = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": group.prompt_tokens, "output_tokens": written, **cache, "input_tokens_details": details}


def _told(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)
