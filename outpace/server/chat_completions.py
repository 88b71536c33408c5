"""`/v1/chat/completions`: its request body and its response format."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from pydantic import Field

from outpace.server.choices import Choice, ChoiceDelta, ChoiceEnd, ChoiceGroup
from outpace.server.errors import ApiError
from outpace.server.generation_request import GenerationRequest, chat_request
from outpace.server.request_body import MAX_CHOICES, MAX_LOGPROBS, Body, SamplingBody, StreamOptions
from outpace.server.response_formats import ChunkFormat, finish_reason, new_id
from outpace.server.service import Service
from outpace.server.tool_calls import AnswerPart, tool_options
from outpace.tools.calls import CallArguments, CallBegin, TextDelta
from outpace.tools.reasoning import ThoughtDelta


class TextPart(Body):
    """A text part of a message. Images, audio and files are not supported."""

    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class PredictedOutput(Body):
    """The answer that the client expects."""

    type: Literal["content"]
    content: str | list[TextPart]


class ChatBody(SamplingBody):
    """The request body of a chat completion."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    stream_options: StreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    store: bool | None = None
    modalities: list[Literal["text"]] | None = None
    prediction: PredictedOutput | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None


def to_request(body: ChatBody, service: Service) -> GenerationRequest:
    """Convert a request body."""
    if body.store:
        raise ApiError(400, "store is true, but this server stores nothing: leave it out", param="store")
    values = body.chat_template_kwargs or {}
    reserved = {"messages", "add_generation_prompt", "tools", "documents"} & values.keys()
    if reserved:
        raise ApiError(400, f"chat_template_kwargs may not have {min(reserved)}", param="chat_template_kwargs")
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    return chat_request(
        body,
        service.llm,
        service.options.methods,
        tool_options(service.chat_model, body.tools, body.tool_choice, body.parallel_tool_calls),
        template_messages(body.messages),
        body.max_completion_tokens or body.max_tokens,
        n=body.n or 1,
        template_values=values,
        response_format=body.response_format,
        structured_outputs=body.structured_outputs,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prediction=_text(body.prediction.content, "") if body.prediction else "",
    )


def template_messages(given: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Convert messages for chat templates: content to text, arguments of calls to objects."""
    return [_template_message(message) for message in given]


def _template_message(given: ChatMessage) -> dict[str, Any]:
    role = "system" if given.role == "developer" else given.role
    if given.role == "user" and not given.content and given.content != "":
        raise ApiError(400, "a user message has no content, it must be a text or a list of parts", param="messages")
    message: dict[str, Any] = {"role": role, "content": _text(given.content)}
    if given.tool_calls:
        message["tool_calls"] = [_template_call(call) for call in given.tool_calls]
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(given, name)
        if value is not None:
            message[name] = value
    return message


def _text(content: str | list[TextPart] | None, separator: str = "\n") -> str:
    return separator.join(part.text for part in content) if isinstance(content, list) else content or ""


def _template_call(given: dict[str, Any]) -> dict[str, Any]:
    function = given.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return given
    try:
        return {**given, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except (ValueError, RecursionError):
        return given


class ChatFormat(ChunkFormat):
    """Writes chat completions and their chunks."""

    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, service: Service, body: ChatBody, request: GenerationRequest) -> None:
        super().__init__(service, body, request)
        self._splitters = [request.splitter() for _ in range(request.n)]

    def _first_chunks(self, group: ChoiceGroup) -> Iterator[bytes]:
        for index in range(self.request.n):
            yield self._chunk([_choice(index, {"role": "assistant", "content": ""})], **self._prompt_ids(group))

    def delta(self, choice: Choice, delta: ChoiceDelta) -> Iterator[bytes]:
        more = self._more(delta)
        for index in choice.indices:
            message = _message_delta(self._splitters[index].push(delta.text))
            if message or more:
                yield self._chunk([_choice(index, message or {"content": ""}, **more)])

    def _last(self, index: int, ended: ChoiceEnd) -> dict[str, Any]:
        message = _message_delta(self._splitters[index].finish())
        return _choice(index, message, finish_reason=self._finish_reason(index, ended), stop_reason=ended.stop)

    def _finish_reason(self, index: int, ended: ChoiceEnd) -> str:
        has_called = self._splitters[index].num_calls and ended.reason == "stop"
        return "tool_calls" if has_called else finish_reason(ended)

    def whole(self, group: ChoiceGroup) -> dict[str, Any]:
        choices = []
        for choice in group.choices:
            delta = choice.take() or ChoiceDelta()
            assert choice.ended is not None
            choices += [self._whole_choice(index, delta, choice.ended) for index in choice.indices]
        choices.sort(key=lambda choice: choice["index"])
        body = {**self._head(self.kind), "choices": choices, "usage": self._usage(group)}
        return {**body, **self._prompt_ids(group), **self.statistics(group)}

    def _whole_choice(self, index: int, delta: ChoiceDelta, ended: ChoiceEnd) -> dict[str, Any]:
        splitter = self._splitters[index]
        found = _message_delta([*splitter.push(delta.text), *splitter.finish()])
        message: dict[str, Any] = {"role": "assistant", "content": found.get("content"), "refusal": None}
        if "reasoning" in found:
            message["reasoning"] = found["reasoning"]
        if "tool_calls" in found:
            names = ("id", "type", "function")
            message["tool_calls"] = [{name: call[name] for name in names} for call in found["tool_calls"]]
        elif message["content"] is None:
            message["content"] = ""
        choice = {"index": index, "message": message, "logprobs": None, **self._more(delta)}
        return {**choice, "finish_reason": self._finish_reason(index, ended), "stop_reason": ended.stop}

    def _prompt_ids(self, group: ChoiceGroup) -> dict[str, Any]:
        return {"prompt_token_ids": list(group.prompts[0])} if self.body.return_token_ids else {}

    def _more(self, delta: ChoiceDelta) -> dict[str, Any]:
        """Return the optional fields of a choice."""
        more = self.token_fields(delta)
        if self.body.logprobs and delta.tokens:
            content = [self.logprob_entry(record, self.body.top_logprobs or 0) for record in delta.logprobs]
            more["logprobs"] = {"content": content, "refusal": None}
        return more


def _choice(index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}


def _message_delta(parts: Iterable[AnswerPart]) -> dict[str, Any]:
    """Convert parts of a choice to the delta of its message."""
    message: dict[str, Any] = {}
    for part in parts:
        if isinstance(part, TextDelta):
            message["content"] = message.get("content", "") + part.text
        elif isinstance(part, ThoughtDelta):
            message["reasoning"] = message.get("reasoning", "") + part.text
        else:
            _add_call(message.setdefault("tool_calls", []), part)
    return message


def _add_call(calls: list[dict[str, Any]], part: CallBegin | CallArguments) -> None:
    if isinstance(part, CallBegin):
        function = {"name": part.name, "arguments": ""}
        calls.append({"index": part.number, "id": new_id("call_"), "type": "function", "function": function})
        return
    if not calls or calls[-1]["index"] != part.number:
        calls.append({"index": part.number, "function": {"arguments": ""}})
    calls[-1]["function"]["arguments"] += part.text
