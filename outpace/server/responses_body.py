"""What `/v1/responses` takes, and the job that it makes of it."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field

from outpace.server.calling import calling_of
from outpace.server.errors import ApiError
from outpace.server.fields import MOST_LOGPROBS, Body, Sampled, sampling
from outpace.server.jobs import Job, own_options, room, seed_of
from outpace.server.service import Service

USUAL_TOKENS = 4096


class Content(Body):
    """A part of an item's content: text alone."""

    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Item(Body):
    """A message, a call of a function, its output, or reasoning."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] | None = None
    id: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[Content] | None = None
    status: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Content] | None = None
    summary: list[Any] | None = None
    encrypted_content: str | None = None
    phase: str | None = None


class TextOptions(Body):
    """The form of the text."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None  # accepted without effect


class ResponsesBody(Sampled):
    """The fields of a response."""

    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    text: TextOptions | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    store: bool | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    truncation: Literal["disabled", "auto"] | None = None
    include: list[str] | None = None
    reasoning: dict[str, Any] | None = None
    stream_options: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None


def conversation(body: ResponsesBody) -> list[dict[str, Any]]:
    """Messages as chat templates take them."""
    found: list[dict[str, Any]] = []
    if body.instructions:
        found.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*found, {"role": "user", "content": body.input}]
    for number, item in enumerate(body.input):
        found += _messages(item, number)
    return found


def _messages(item: Item, number: int) -> list[dict[str, Any]]:
    if item.type == "reasoning":
        return []
    if item.type == "function_call":
        try:
            arguments = json.loads(item.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = item.arguments
        call = {"name": item.name or "", "arguments": arguments}
        calls = [{"id": item.call_id or "", "type": "function", "function": call}]
        return [{"role": "assistant", "content": "", "tool_calls": calls}]
    if item.type == "function_call_output":
        return [{"role": "tool", "tool_call_id": item.call_id or "", "content": _text(item.output)}]
    if item.role is None:
        raise ApiError(400, f"input.{number}.role is missing", param="input", code="missing_field")
    role = "system" if item.role == "developer" else item.role
    return [{"role": role, "content": _text(item.content)}]


def _text(content: str | list[Content] | None) -> str:
    if isinstance(content, list):
        return "\n".join(part.text or part.refusal or "" for part in content)
    return content or ""


def job(body: ResponsesBody, service: Service) -> Job:
    """Renders the conversation; in the executor."""
    llm = service.llm
    for name in ("store", "previous_response_id", "background"):
        if getattr(body, name):
            said = f"{name} is {getattr(body, name)!r:.60}, this server keeps no responses: leave it out"
            raise ApiError(400, said, param=name)
    messages = conversation(body)
    if not messages:
        raise ApiError(400, "input is an empty list, it must be text or messages", param="input")
    calling = calling_of(service, _tools(body.tools), body.tool_choice, body.parallel_tool_calls)
    prompt = calling.prompt(messages, {})
    forms = calling.fields(prompt, body.text.format if body.text else None, None)
    asked = min(body.max_output_tokens or USUAL_TOKENS, room(llm, prompt))
    logprobs = (body.top_logprobs or 0) if wants_logprobs(body) else None
    params = sampling(body, asked, seed_of(body), logprobs=logprobs, **forms)
    own = own_options(body, llm, service.options.methods)
    return Job((prompt,), params, own=own, splitter=calling.splitter(prompt), thoughts=calling.thoughts(prompt))


def _tools(given: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Functions as chat completions have them; ApiError for tools of another kind."""
    other = next((tool for tool in given or () if tool.get("type") != "function"), None)
    if other is not None:
        said = f"a tool is of type {other.get('type')!r:.60}, this server takes functions"
        raise ApiError(400, said, param="tools", code="invalid_value")
    names = ("name", "description", "parameters", "strict")
    return given and [
        {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}
        for tool in given
    ]


def wants_logprobs(body: ResponsesBody) -> bool:
    """Whether log-probabilities are asked for."""
    return body.top_logprobs is not None or "message.output_text.logprobs" in (body.include or ())
