"""`/v1/messages` (the Messages API of Anthropic) and its `count_tokens`: request bodies and the response format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from outpace.server.choices import Choice, ChoiceEnd
from outpace.server.content import TEXTS, ContentPart, Turn, TypedTurn, template_message
from outpace.server.errors import ApiError
from outpace.server.generation_request import (
    Conversation,
    GenerationRequest,
    TemplateBody,
    chat_request,
    template_values,
)
from outpace.server.replies import ItemFormat, new_id, sse
from outpace.server.request_body import Body, MaxTokens, SamplingBody, refuse_others
from outpace.server.service import Service
from outpace.server.tool_calls import ToolOptions, parse_arguments, template_call, tool_options
from outpace.tools.calls import CallBegin


class ContentBlock(TypedTurn):
    """A block of a message: text, thinking, a tool call, or its result."""

    known = (*TEXTS, "tool_use", "tool_result")
    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ContentPart] | None = None


class InputMessage(Turn):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock] | None = None


class MessagesTool(Body):
    """A function that the model may call."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: bool | None = None


class MessagesToolChoice(Body):
    """Which tool must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(Body):
    """The form of the answer and the effort of reasoning."""

    format: dict[str, Any] | None = None
    effort: str | None = None


class ConversationBody(TemplateBody):
    """A conversation with its tools."""

    tool_type = "custom"
    messages: list[InputMessage] = Field(min_length=1)
    system: str | list[ContentPart] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None  # the earlier name of output_config.format


class CountBody(ConversationBody):
    """The request body of `count_tokens`."""

    model: str | None = None


class MessagesBody(ConversationBody, SamplingBody):
    """The request body of a message."""

    max_tokens: MaxTokens = Field(ge=1)
    stop_sequences: list[str] | None = None


def template_messages(body: ConversationBody) -> list[dict[str, Any]]:
    """Convert messages for chat templates."""
    found = [template_message("system", body.system, "system")] if body.system else []
    for number, message in enumerate(body.messages):
        place = f"messages.{number}.content"
        if isinstance(message.content, list):
            found += _from_blocks(message.role, message.content, place)
        elif message.content is not None:
            found.append({"role": message.role, "content": message.content})
        elif message.role != "system":  # it may hold settings only
            raise ApiError(400, f"{place} is missing", param="messages", code="missing_field")
    return found


def _from_blocks(role: str, blocks: list[ContentBlock], place: str) -> list[dict[str, Any]]:
    """Convert one message. Tool results become messages of their own, tool calls a field of the assistant's message."""
    found: list[dict[str, Any]] = []
    calls = []
    for number, block in enumerate(blocks):
        if block.type == "tool_result":
            result = template_message("tool", block.content, f"{place}.{number}.content")
            found.append({**result, "tool_call_id": block.tool_use_id or ""})
        elif block.type == "tool_use":
            calls.append(template_call(block.id, block.name, block.input or {}))
    message = template_message(role, blocks, place) | ({"tool_calls": calls} if calls else {})
    has_text = any(block.type in TEXTS for block in blocks)
    if has_text or message["content"] or len(message) > 2 or not (found or role == "system"):
        found.append(message)
    return found


def _tool_options(body: ConversationBody, service: Service) -> ToolOptions:
    tools = [
        {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
        for tool in body.tools or ()
    ]
    chosen = body.tool_choice or MessagesToolChoice(type="auto")
    choices: dict[str, Any] = {"any": "required", "tool": {"type": "function", "function": {"name": chosen.name}}}
    return tool_options(
        service.chat_model,
        [{"type": "function", "function": tool} for tool in tools],
        choices.get(chosen.type, chosen.type),
        not chosen.disable_parallel_tool_use,
    )


def conversation(body: ConversationBody, service: Service) -> Conversation:
    """Convert a body's messages, system prompt and tools. If the last message is the assistant's, it is continued."""
    is_begun = body.messages[-1].role == "assistant"
    values = template_values(body, effort=body.output_config.effort if body.output_config else None)
    return Conversation(_tool_options(body, service), template_messages(body), values, is_begun)


def count_tokens(body: CountBody, service: Service) -> dict[str, Any]:
    """Count the tokens of a conversation's prompt."""
    refuse_others(body.model_extra or {}, MessagesBody.model_fields, {})
    return {"input_tokens": len(conversation(body, service).render())}


def to_request(body: MessagesBody, service: Service) -> GenerationRequest:
    """Convert a request body."""
    if body.stop is not None:
        raise ApiError(400, "stop is named stop_sequences in this API", param="stop")
    form = body.output_config and body.output_config.format
    if form is not None and body.output_format is not None:
        why = "output_config.format and output_format both say what the answer is, give one of them"
        raise ApiError(400, why, param="output_format")
    return chat_request(
        body,
        conversation(body, service),
        body.max_tokens,
        response_format=body.output_format if form is None else form,
    )


class MessagesFormat(ItemFormat):
    """Writes a message: its items are content blocks."""

    prefix = "msg_"
    text_kind, thought_kind, call_kind = "text", "thinking", "tool_use"

    def opening(self) -> Iterator[bytes]:
        yield _event("message_start", message=self._message([], None, None, 0))

    def ended(self, choice: Choice, ended: ChoiceEnd) -> Iterator[bytes]:
        yield from self._add(self._splitter.finish())
        yield from self._close()
        reason, sequence = self._stop_reason(ended)
        usage = self._usage(ended.tokens)
        yield _event("message_delta", delta={"stop_reason": reason, "stop_sequence": sequence}, usage=usage)

    def closing(self) -> Iterator[bytes]:
        yield _event("message_stop", **self.statistics())

    def failed(self, error: ApiError, request_id: str) -> Iterator[bytes]:
        yield sse(error.messages(request_id), "error")

    def ping(self) -> bytes:
        return _event("ping")

    def whole(self) -> dict[str, Any]:
        ended = self._fill()
        return {**self._message(self._items, *self._stop_reason(ended), ended.tokens), **self.statistics()}

    def _open(self, kind: str, call: CallBegin | None) -> Iterator[bytes]:
        if call is not None:
            block = {"type": kind, "id": new_id("toolu_"), "name": call.name, "input": ""}
        else:
            block = {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}
        self._items.append(block)
        empty = {**block, "input": {}} if call else dict(block)
        yield _event("content_block_start", index=len(self._items) - 1, content_block=empty)

    def _append(self, kind: str, text: str) -> Iterator[bytes]:
        self._items[-1]["input" if kind == "tool_use" else kind] += text
        delta_type, key = ("input_json_delta", "partial_json") if kind == "tool_use" else (f"{kind}_delta", kind)
        yield _event("content_block_delta", index=len(self._items) - 1, delta={"type": delta_type, key: text})

    def _close(self) -> Iterator[bytes]:
        if self._items:
            last = self._items[-1]
            if last["type"] == "tool_use":
                arguments = parse_arguments(last["input"])
                last["input"] = arguments if isinstance(arguments, dict) else {}  # the answer may be cut
            yield _event("content_block_stop", index=len(self._items) - 1)

    def _stop_reason(self, ended: ChoiceEnd) -> tuple[str, str | None]:
        if isinstance(ended.stop, str):
            return "stop_sequence", ended.stop
        if ended.reason == "length":
            return "max_tokens", None
        return ("tool_use" if self._splitter.has_called else "end_turn"), None

    def _message(self, content: list[Any], reason: str | None, sequence: str | None, written: int) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content}
        return {**head, "stop_reason": reason, "stop_sequence": sequence, "usage": self._usage(written)}

    def _usage(self, written: int) -> dict[str, Any]:
        """Return the numbers of tokens; those read from the prefix cache are known once the prompt is being read."""
        cached = self.group.cached_tokens
        return {
            "input_tokens": self.group.prompt_tokens - cached,
            "output_tokens": written,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
        }


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind, **fields}, kind)
