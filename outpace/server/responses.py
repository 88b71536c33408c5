"""How `/v1/responses` answers: events in the Responses API's order, and the response that they add up to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from outpace.server.choices import Choice, Delta, Ended, Group
from outpace.server.errors import ApiError
from outpace.server.jobs import Job
from outpace.server.parts import CallBegin, Part, Thought
from outpace.server.responses_body import ResponsesBody, wants_logprobs
from outpace.server.service import Service
from outpace.server.shapes import Shape, TokenTexts, best, cached_tokens, event, finite, new_id, speculation

ITEMS = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}


class ResponsesShape(Shape):
    """Items of output, one open at a time; streamed and final items have the same ids."""

    def __init__(self, service: Service, body: ResponsesBody, job: Job) -> None:
        super().__init__(service, "resp_")
        self._body, self._job = body, job
        self._splitter = job.splitter()
        self._texts = TokenTexts(service)
        self._items: list[dict[str, Any]] = []  # the last one is open
        self._sequence = 0
        self._group: Group | None = None
        self._end: Ended | None = None

    def opening(self, group: Group) -> Iterator[bytes]:
        self._group = group
        for name in ("response.created", "response.in_progress"):
            yield self._told(name, response=self._response("in_progress"))

    def delta(self, choice: Choice, delta: Delta) -> Iterator[bytes]:
        logprobs = self._logprobs(delta)
        for part in self._splitter.push(delta.text):
            yield from self._events(part, logprobs)
            logprobs = []

    def ended(self, choice: Choice, ended: Ended) -> Iterator[bytes]:
        self._end = ended
        for part in self._splitter.finish():
            yield from self._events(part, [])
        if not self._items:
            yield from self._open("message", None)
        yield from self._close("incomplete" if ended.reason == "length" else "completed")

    def closing(self, group: Group) -> Iterator[bytes]:
        assert self._end is not None
        status = "incomplete" if self._end.reason == "length" else "completed"
        yield self._told(f"response.{status}", response=self._response(status))

    def failed(self, error: ApiError, request_id: str) -> Iterator[bytes]:
        told = {"code": error.code or "server_error", "message": error.message}
        yield self._told("error", param=error.param, **told)
        yield self._told("response.failed", response={**self._response("failed"), "error": told})

    def whole(self, group: Group) -> dict[str, Any]:
        self._group = group
        (choice,) = group.choices
        assert choice.ended is not None
        for _ in self.delta(choice, choice.take() or Delta()):
            pass
        for _ in self.ended(choice, choice.ended):
            pass
        return self._response("incomplete" if choice.ended.reason == "length" else "completed")

    def _events(self, part: Part, logprobs: list[Any]) -> Iterator[bytes]:
        """Opens the item that a part belongs to, if it is not the open one, and adds the part."""
        kind = {"Text": "message", "Thought": "reasoning"}.get(type(part).__name__, "function_call")
        if not self._items or self._items[-1]["type"] != kind or isinstance(part, CallBegin):
            yield from self._close("completed")
            yield from self._open(kind, part)
        if isinstance(part, CallBegin):
            return
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        if kind == "function_call":
            self._items[-1]["arguments"] += part.text
            yield self._told("response.function_call_arguments.delta", **place, delta=part.text)
            return
        content = self._items[-1]["content"][0]
        content["text"] += part.text
        if isinstance(part, Thought):
            yield self._told("response.reasoning_text.delta", **place, content_index=0, delta=part.text)
            return
        content["logprobs"] += logprobs
        yield self._told("response.output_text.delta", **place, content_index=0, delta=part.text, logprobs=logprobs)

    def _open(self, kind: str, part: Part | None) -> Iterator[bytes]:
        item: dict[str, Any] = {"type": kind, "id": new_id(ITEMS[kind]), "status": "in_progress"}
        contents: dict[str, Any] = {
            "message": {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
            "reasoning": {"type": "reasoning_text", "text": ""},
        }
        if isinstance(part, CallBegin):
            item |= {"call_id": new_id("call_"), "name": part.name, "arguments": ""}
        elif kind == "message":
            item |= {"role": "assistant", "content": []}
        else:
            item |= {"summary": [], "content": []}
        self._items.append(item)
        place = {"output_index": len(self._items) - 1}
        yield self._told("response.output_item.added", **place, item=item)
        if kind in contents:
            item["content"] = [contents[kind]]
            place = {"item_id": item["id"], **place, "content_index": 0}
            yield self._told("response.content_part.added", **place, part=contents[kind])

    def _close(self, status: str) -> Iterator[bytes]:
        """Ends the open item."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return
        item = self._items[-1]
        item["status"] = status
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._told("response.function_call_arguments.done", **place, **done)
        else:
            (part,) = item["content"]
            name = "output_text" if item["type"] == "message" else "reasoning_text"
            more = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            yield self._told(f"response.{name}.done", **place, content_index=0, text=part["text"], **more)
            yield self._told("response.content_part.done", **place, content_index=0, part=part)
        yield self._told("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _logprobs(self, delta: Delta) -> list[dict[str, Any]]:
        if not wants_logprobs(self._body):
            return []
        count = self._body.top_logprobs or 0
        return [
            {
                **self._entry(record.token, finite(record.logprob)),
                "top_logprobs": [self._entry(*pair) for pair in best(record, count)],
            }
            for record in delta.logprobs
        ]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._texts.text(token), "logprob": logprob, "bytes": list(self._texts.bytes_of(token))}

    def _response(self, status: str) -> dict[str, Any]:
        body, is_over = self._body, status in ("completed", "incomplete")
        assert self._group is not None
        told: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": body.model or self.service.names[0],
            "output": self._items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": _usage(self._group) if is_over else None,
            "user": body.user,
            "metadata": body.metadata or {},
        }
        return {**told, "seed": self._job.params.seed, **speculation(self._group)} if is_over else told

    def _told(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        return event({"type": kind, "sequence_number": self._sequence - 1, **fields}, kind)


def _usage(group: Group) -> dict[str, Any]:
    written = sum(choice.ended.tokens if choice.ended else 0 for choice in group.choices)
    return {
        "input_tokens": group.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens(group)},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": group.thought_tokens},
        "total_tokens": group.prompt_tokens + written,
    }
