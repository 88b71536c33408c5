"""What `/v1/chat/completions` takes, and the job that it makes of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from outpace.server.calling import calling_of
from outpace.server.errors import ApiError
from outpace.server.fields import MOST_CHOICES, MOST_LOGPROBS, Body, Sampled, StreamOptions, sampling
from outpace.server.jobs import Job, own_options, room, seed_of
from outpace.server.service import Service

USUAL_TOKENS = 4096


class TextPart(Body):
    """A part of a message's content; pictures, sounds and files are not taken."""

    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """One message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class Prediction(Body):
    """What the caller expects the answer to be."""

    type: Literal["content"]
    content: str | list[TextPart]


class ChatBody(Sampled):
    """The fields of a chat completion."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    stream_options: StreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    store: bool | None = None
    modalities: list[Literal["text"]] | None = None
    prediction: Prediction | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None


def messages_of(given: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates take them: content as text, arguments of calls as objects."""
    return [_message(message) for message in given]


def _message(given: ChatMessage) -> dict[str, Any]:
    role = "system" if given.role == "developer" else given.role
    if given.role == "user" and not given.content and given.content != "":
        raise ApiError(400, "a message of the user has no content, it must be a text or parts", param="messages")
    message: dict[str, Any] = {"role": role, "content": text_of(given.content)}
    if given.tool_calls:
        message["tool_calls"] = [_call(call) for call in given.tool_calls]
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(given, name)
        if value is not None:
            message[name] = value
    return message


def text_of(content: str | list[TextPart] | None, between: str = "\n") -> str:
    """The text of parts, or the one that was given."""
    return between.join(part.text for part in content) if isinstance(content, list) else content or ""


def _call(given: dict[str, Any]) -> dict[str, Any]:
    function = given.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return given
    try:
        return {**given, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except (ValueError, RecursionError):
        return given


def job(body: ChatBody, service: Service) -> Job:
    """Renders the conversation; in the executor."""
    llm = service.llm
    if body.store:
        raise ApiError(400, "store is true, this server keeps nothing: leave it out", param="store")
    values = body.chat_template_kwargs or {}
    taken = {"messages", "add_generation_prompt", "tools", "documents"} & values.keys()
    if taken:
        raise ApiError(400, f"chat_template_kwargs may not have {min(taken)}", param="chat_template_kwargs")
    calling = calling_of(service, body.tools, body.tool_choice, body.parallel_tool_calls)
    prompt = calling.prompt(messages_of(body.messages), values)
    left = room(llm, prompt)
    asked = body.max_completion_tokens or body.max_tokens or USUAL_TOKENS
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    prediction = text_of(body.prediction.content, "") if body.prediction else ""
    forms = calling.fields(prompt, body.response_format, body.structured_outputs)
    params = sampling(body, min(asked, left), seed_of(body), logprobs=logprobs, prediction=prediction, **forms)
    n = body.n or 1
    return Job(
        (prompt,),
        params,
        n,
        n,
        own_options(body, llm, service.options.methods),
        bool(body.return_rounds),
        calling.splitter(prompt),
        calling.thoughts(prompt),
    )
