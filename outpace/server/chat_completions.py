"""`/v1/chat/completions`: its request body and its response format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from pydantic import Field

from outpace.server.choices import Choice, ChoiceDelta, ChoiceEnd, ChoiceGroup
from outpace.server.content import ContentPart, Turn, template_message
from outpace.server.errors import ApiError
from outpace.server.generation_request import (
    Conversation,
    GenerationRequest,
    TemplateBody,
    chat_request,
    template_values,
)
from outpace.server.replies import ChunkFormat, new_id
from outpace.server.request_body import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    Body,
    DetailsBody,
    MaxTokens,
    StreamOptions,
    Whole,
    agreed,
)
from outpace.server.service import Service
from outpace.server.tool_calls import AnswerPart, template_call, tool_options
from outpace.tools.calls import CallArguments, CallBegin, TextDelta
from outpace.tools.reasoning import ThoughtDelta


class ChatMessage(Turn):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    reasoning_text: str | None = None  # Copilot's name
    thinking: Any = None  # Ollama's, a text
    thinking_blocks: list[ContentPart] | None = None  # LiteLLM's form of reasoning
    reasoning_details: list[ContentPart] | None = None  # OpenRouter's
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None  # the earlier form of tool_calls
    prefix: bool | None = None  # whether the answer continues this message, which must be the last one


class PredictedOutput(Body):
    """The answer that the client expects."""

    type: Literal["content"]
    content: str | list[ContentPart]


class PromptBody(TemplateBody):
    """The messages of a chat, and what else changes its prompt."""

    tool_type = "function"
    messages: list[ChatMessage] | None = Field(default=None, min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    continue_final_message: bool | None = None


class ChatBody(PromptBody, DetailsBody):
    """The request body of a chat completion."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: MaxTokens | None = Field(default=None, ge=1)
    max_tokens: MaxTokens | None = Field(default=None, ge=1)
    n: Whole | None = Field(default=None, ge=1, le=MAX_CHOICES)
    logprobs: bool | None = None
    top_logprobs: Whole | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    stream_options: StreamOptions | None = None
    store: bool | None = None
    modalities: list[Literal["text"]] | None = None
    prediction: PredictedOutput | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None


def to_request(body: ChatBody, service: Service) -> GenerationRequest:
    """Convert a request body."""
    if body.store:
        raise ApiError(400, "store is true, but this server stores nothing: leave it out", param="store")
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    guess = body.prediction.content if body.prediction else ""
    return chat_request(
        body,
        conversation(body, service),
        agreed({"max_completion_tokens": body.max_completion_tokens, "max_tokens": body.max_tokens}),
        n=body.n or 1,
        rounds=bool(body.return_rounds),
        response_format=body.response_format,
        structured_outputs=body.structured_outputs,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prediction=guess if isinstance(guess, str) else "".join(part.text for part in guess),
    )


def conversation(body: PromptBody, service: Service) -> Conversation:
    """Convert a body's messages, tools and template arguments; raise ApiError for contradictions."""
    messages = body.messages or []
    continues = bool(body.continue_final_message or messages[-1].prefix)
    if continues and body.add_generation_prompt:
        why = "continue_final_message and add_generation_prompt are both true, set only one of them"
        raise ApiError(400, why, param="continue_final_message", code="invalid_value")
    return Conversation(
        tool_options(service.chat_model, body.tools, body.tool_choice, body.parallel_tool_calls),
        template_messages(messages),
        template_values(body),
        continues,
    )


def template_messages(given: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Convert messages for chat templates."""
    return [_template_message(message, f"messages.{number}") for number, message in enumerate(given)]


def _template_message(given: ChatMessage, place: str) -> dict[str, Any]:
    if given.role == "user" and not given.content and given.content != "":
        raise ApiError(400, "a user message has no content, it must be a string or a list of parts", param="messages")
    role = {"developer": "system", "function": "tool"}.get(given.role, given.role)
    message = template_message(role, given.content, f"{place}.content", keeps_parts=True)
    message["content"] = message["content"] or given.refusal or ""
    earlier = {"id": "", "type": "function", "function": given.function_call}
    if calls := given.tool_calls or ([earlier] if given.function_call else None):
        message["tool_calls"] = [_template_call(call) for call in calls]
    more = {"name": given.name, "tool_call_id": "" if given.role == "function" else given.tool_call_id}
    blocks = [part.text for part in given.thinking_blocks or given.reasoning_details or () if part.text]
    thoughts = (given.reasoning_content, given.reasoning, given.reasoning_text, given.thinking, "\n".join(blocks))
    more["reasoning_content"] = next((one for one in thoughts if one and isinstance(one, str)), None)
    return message | {name: value for name, value in more.items() if value is not None}


def _template_call(given: dict[str, Any]) -> dict[str, Any]:
    """Convert a call of another type, such as one of a custom tool, to a function call."""
    function, kind = given.get("function"), given.get("type")
    if not isinstance(function, dict) and isinstance(kind, str) and kind != "function":
        inner = given[kind] if isinstance(given.get(kind), dict) else {}
        arguments = {name: value for name, value in inner.items() if name != "name"}
        return template_call(given.get("id"), inner.get("name", kind), arguments)
    return given


class ChatFormat(ChunkFormat):
    """Writes chat completions and their chunks."""

    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    content_field, empty = "delta", {"content": ""}

    def __init__(self, service: Service, body: ChatBody, request: GenerationRequest, group: ChoiceGroup) -> None:
        super().__init__(service, body, request, group)
        self._splitters = [request.splitter() for _ in range(request.n)]
        self._prompt_ids = {"prompt_token_ids": list(group.prompts[0])} if body.return_token_ids else {}

    def opening(self) -> Iterator[bytes]:
        for index in range(self.request.n):
            yield self._chunk([self._choice(index, {"role": "assistant", "content": ""})], **self._prompt_ids)

    def _output(self, index: int, choice: Choice, delta: ChoiceDelta) -> tuple[dict[str, Any], dict[str, Any]]:
        return _message_delta(self._splitters[index].push(delta.text)), self._more(delta)

    def _rest(self, index: int) -> dict[str, Any]:
        return _message_delta(self._splitters[index].finish())

    def _end(self, index: int, ended: ChoiceEnd) -> dict[str, Any]:
        has_called = self._splitters[index].has_called and ended.reason == "stop"
        return super()._end(index, ended) | ({"finish_reason": "tool_calls"} if has_called else {})

    def whole(self) -> dict[str, Any]:
        choices = []
        for choice in self.group.choices:  # in the order of their indices
            delta = choice.take() or ChoiceDelta()
            assert choice.ended is not None
            choices += [self._whole_choice(index, delta, choice.ended) for index in choice.indices]
        return self._whole(choices, **self._prompt_ids)

    def _whole_choice(self, index: int, delta: ChoiceDelta, ended: ChoiceEnd) -> dict[str, Any]:
        splitter = self._splitters[index]
        found = _message_delta([*splitter.push(delta.text), *splitter.finish()])
        for call in found.get("tool_calls", ()):
            del call["index"]
        content = found.pop("content", None if "tool_calls" in found else "")
        message = {"role": "assistant", "content": content, "refusal": None, **found}
        choice = {"index": index, "message": message, "logprobs": None, **self._more(delta)}
        return {**choice, **self._end(index, ended)}

    def _more(self, delta: ChoiceDelta) -> dict[str, Any]:
        more = self.token_fields(delta)
        if self.body.logprobs and delta.tokens:
            content = [self.logprob_entry(record, self.body.top_logprobs or 0) for record in delta.logprobs]
            more["logprobs"] = {"content": content, "refusal": None}
        return more


def _message_delta(parts: Iterable[AnswerPart]) -> dict[str, Any]:
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
