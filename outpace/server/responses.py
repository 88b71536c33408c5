"""`/v1/responses`: its request body and its response format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from outpace.models.text.template_form import merged
from outpace.server.choices import Choice, ChoiceDelta, ChoiceEnd, ChoiceGroup
from outpace.server.content import ContentPart, TypedTurn, refuse_media, template_message
from outpace.server.errors import ApiError
from outpace.server.generation_request import (
    Conversation,
    GenerationRequest,
    TemplateBody,
    chat_request,
    template_values,
)
from outpace.server.replies import ItemFormat, new_id, sse
from outpace.server.request_body import MAX_LOGPROBS, Body, MaxTokens, SamplingBody, StreamOptions, Whole
from outpace.server.service import Service
from outpace.server.tool_calls import template_call, tool_options
from outpace.tools.calls import CallBegin

ID_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}
PART_TYPES = {"message": "output_text", "reasoning": "reasoning_text"}


class InputItem(TypedTurn):
    """A message, a function call, its output, or reasoning.

    An item of another type is a call if it has a name and an input, as those of custom tools have.
    """

    known = ("message", "function_call", "function_call_output")
    id: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None

    @classmethod
    def _kind(cls, given: Mapping[str, Any]) -> Any:
        is_reference = given.get("type") is None and given.keys() - {"type"} == {"id"}
        return "item_reference" if is_reference else given.get("type")

    @classmethod
    def _reduced(cls, given: Mapping[str, Any], kind: str, text: str) -> dict[str, Any]:
        item = {name: value for name in ("call_id", "name") if isinstance(value := given.get(name), str)}
        asked = given.get("arguments", given.get("input"))
        if len(item) == 2 and asked is not None:
            is_json = "arguments" in given and isinstance(asked, str)
            arguments = asked if is_json else json.dumps(asked if isinstance(asked, dict) else {"input": asked})
            return {**item, "type": "function_call", "arguments": arguments, "output": text}
        role = "user" if kind.startswith("input_") else given.get("role")
        known = role in ("system", "developer", "user")
        return {**item, "type": kind, "role": role if known else "assistant", "content": text, "output": text}


class TextOptions(Body):
    """The format and the length of the text."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesBody(SamplingBody, TemplateBody):
    """The request body of a response."""

    tool_type = "function"
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: MaxTokens | None = Field(default=None, ge=1)
    text: TextOptions | None = None
    top_logprobs: Whole | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    store: bool | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    truncation: Literal["disabled", "auto"] | None = None
    include: list[str] | None = None
    stream_options: StreamOptions | None = None
    parallel_tool_calls: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None


def template_messages(body: ResponsesBody) -> list[dict[str, Any]]:
    """Convert input items for chat templates."""
    first: list[dict[str, Any]] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if isinstance(body.input, str):
        return [*first, {"role": "user", "content": body.input}]
    found, called = first, set[str | None]()
    for number, item in enumerate(body.input):
        if item.type == "function_call":
            called.add(item.call_id)
            call = template_call(item.call_id, item.name, item.arguments)
            found.append({"role": "assistant", "content": "", "tool_calls": [call]})
            if item.unknown_type and item.output:  # another server has run it
                found.append({**template_message("tool", item.output, ""), "tool_call_id": item.call_id or ""})
        elif item.type == "function_call_output" or (item.unknown_type and item.call_id in called):
            result = template_message("tool", item.output, f"input.{number}.output")
            found.append({**result, "tool_call_id": item.call_id or ""})
        elif item.is_thought:
            found += [{"role": "assistant", "content": "", "reasoning_content": item.content}] if item.content else []
        elif item.role is None:
            raise ApiError(400, f"input.{number}.role is missing", param="input", code="missing_field")
        else:
            refuse_media(item.role, item, f"input.{number}")
            role = "system" if item.role == "developer" else item.role
            message = template_message(role, item.content, f"input.{number}.content")
            found += [message] if message["content"] or not item.unknown_type else []
    return merged(found, ["assistant"])  # in this API, the thoughts, texts and calls of one answer are separate items


def to_request(body: ResponsesBody, service: Service) -> GenerationRequest:
    """Convert a request body."""
    for name in ("store", "previous_response_id", "background"):
        if value := getattr(body, name):
            message = f"{name} is {value!r:.60}, but this server stores no responses: leave it out"
            raise ApiError(400, message, param=name)
    messages = template_messages(body)
    if not messages:
        what = "has no item that this server can show the model" if body.input else "is an empty list"
        raise ApiError(400, f"input {what}, it must be a string or a list of items", param="input")
    tools = tool_options(service.chat_model, _chat_tools(body.tools), body.tool_choice, body.parallel_tool_calls)
    return chat_request(
        body,
        Conversation(tools, messages, template_values(body, verbosity=body.text.verbosity if body.text else None)),
        body.max_output_tokens,
        shortens=body.truncation == "auto",
        response_format=body.text.format if body.text else None,
        logprobs=(body.top_logprobs or 0) if _wants_logprobs(body) else None,
    )


def _chat_tools(given: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Convert functions to the format of chat completions; raise ApiError for other kinds of tools."""
    other = next((tool for tool in given or () if tool.get("type") != "function"), None)
    if other is not None:
        message = f"a tool has type {other.get('type')!r:.60}, this server supports functions only"
        raise ApiError(400, message, param="tools", code="invalid_value")
    names = ("name", "description", "parameters", "strict")
    return given and [
        {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}
        for tool in given
    ]


def _wants_logprobs(body: ResponsesBody) -> bool:
    return body.top_logprobs is not None or "message.output_text.logprobs" in (body.include or ())


class ResponsesFormat(ItemFormat):
    """Writes a response: its items are output items. Streamed and final items have the same ids."""

    prefix = "resp_"
    text_kind, thought_kind, call_kind = "message", "reasoning", "function_call"

    def __init__(self, service: Service, body: ResponsesBody, request: GenerationRequest, group: ChoiceGroup) -> None:
        super().__init__(service, body, request, group)
        self._sequence_number = 0
        self._status = "in_progress"
        self._incomplete: dict[str, str] | None = None  # why the response, or its last call, is incomplete
        self._logprobs: list[dict[str, Any]] = []  # of the current delta, sent with its first text

    def opening(self) -> Iterator[bytes]:
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=self._response(self._status))

    def delta(self, choice: Choice, delta: ChoiceDelta) -> Iterator[bytes]:
        records = delta.logprobs if _wants_logprobs(self.body) else ()
        self._logprobs = [self.logprob_entry(record, self.body.top_logprobs or 0) for record in records]
        yield from super().delta(choice, delta)

    def ended(self, choice: Choice, ended: ChoiceEnd) -> Iterator[bytes]:
        self._logprobs = []
        yield from self._add(self._splitter.finish())
        if not self._items:
            yield from self._open("message", None)
        if ended.reason == "length" or self._splitter.is_cut:
            self._status = "incomplete"
            self._incomplete = {"reason": "max_output_tokens" if ended.reason == "length" else "stop"}
        else:
            self._status = "completed"
        yield from self._close()

    def closing(self) -> Iterator[bytes]:
        yield self._event(f"response.{self._status}", response=self._response(self._status))

    def failed(self, error: ApiError, request_id: str) -> Iterator[bytes]:
        fields = {"code": error.code or "server_error", "message": error.message}
        yield self._event("error", param=error.param, **fields)
        yield self._event("response.failed", response={**self._response("failed"), "error": fields})

    def whole(self) -> dict[str, Any]:
        self._fill()
        return self._response(self._status)

    def _open(self, kind: str, call: CallBegin | None) -> Iterator[bytes]:
        item: dict[str, Any] = {"type": kind, "id": new_id(ID_PREFIXES[kind]), "status": "in_progress"}
        if call is not None:
            item |= {"call_id": new_id("call_"), "name": call.name, "arguments": ""}
        else:
            item |= {"role": "assistant", "content": []} if kind == "message" else {"summary": [], "content": []}
        self._items.append(item)
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)
        if call is None:
            part: dict[str, Any] = {"type": PART_TYPES[kind], "text": ""}
            item["content"] = [part | {"annotations": [], "logprobs": []} if kind == "message" else part]
            yield self._item_event("content_part.added", content_index=0, part=item["content"][0])

    def _append(self, kind: str, text: str) -> Iterator[bytes]:
        item = self._items[-1]
        if kind == "function_call":
            item["arguments"] += text
            yield self._item_event("function_call_arguments.delta", delta=text)
            return
        content, more = item["content"][0], {}
        content["text"] += text
        if kind == "message":
            content["logprobs"] += self._logprobs
            more, self._logprobs = {"logprobs": self._logprobs}, []
        yield self._item_event(f"{PART_TYPES[kind]}.delta", content_index=0, delta=text, **more)

    def _close(self) -> Iterator[bytes]:
        if not self._items or self._items[-1]["status"] != "in_progress":
            return
        item = self._items[-1]
        item["status"] = "incomplete" if self._status == "incomplete" else "completed"
        if item["type"] == "function_call":
            yield self._item_event("function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        else:
            (part,) = item["content"]
            more = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            yield self._item_event(f"{part['type']}.done", content_index=0, text=part["text"], **more)
            yield self._item_event("content_part.done", content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return self._event(f"response.{kind}", **place, **fields)

    def _response(self, status: str) -> dict[str, Any]:
        body, params, is_over = self.body, self.request.params, status in ("completed", "incomplete")
        response: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": self._incomplete,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.model,
            "output": self._items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": params.temperature if body.temperature is None else body.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": params.top_p if body.top_p is None else body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": self._usage() if is_over else None,
            "user": body.user,
            "metadata": body.metadata or {},
        }
        return {**response, **self.statistics()} if is_over else response

    def _usage(self) -> dict[str, Any]:
        group, written = self.group, self.group.choices[0].num_tokens
        return {
            "input_tokens": group.prompt_tokens,
            "input_tokens_details": {"cached_tokens": group.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": group.thought_tokens},
            "total_tokens": group.prompt_tokens + written,
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence_number += 1
        return sse({"type": kind, "sequence_number": self._sequence_number - 1, **fields}, kind)
