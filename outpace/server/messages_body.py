"""What `/v1/messages` and its `count_tokens` take, and the job that they make of it."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field

from outpace.server.calling import Calling, calling_of
from outpace.server.errors import ApiError
from outpace.server.fields import Body, Sampled, sampling
from outpace.server.jobs import Job, own_options, room, seed_of
from outpace.server.service import Service


class Block(Body):
    """A part of a message: text, thinking, a call of a tool, or its result; pictures and documents are not taken."""

    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None
    cache_control: dict[str, Any] | None = None
    citations: Any = None


class Turn(Body):
    """One message."""

    role: Literal["user", "assistant"]
    content: str | list[Block]


class MessagesTool(Body):
    """A function that the model may ask for."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None


class ToolChoice(Body):
    """Which tool must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountBody(Body):
    """A conversation."""

    model: str | None = None
    messages: list[Turn] = Field(min_length=1)
    system: str | list[Block] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: dict[str, Any] | None = None  # accepted without effect


class MessagesBody(Sampled):
    """The fields of a message that is asked for."""

    messages: list[Turn] = Field(min_length=1)
    system: str | list[Block] | None = None
    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: dict[str, Any] | None = None  # accepted without effect


def conversation(body: CountBody | MessagesBody) -> list[dict[str, Any]]:
    """Messages as chat templates take them."""
    found: list[dict[str, Any]] = []
    if body.system:
        text = body.system if isinstance(body.system, str) else "\n".join(block.text or "" for block in body.system)
        found.append({"role": "system", "content": text})
    for turn in body.messages:
        found += [{"role": turn.role, "content": turn.content}] if isinstance(turn.content, str) else _of_blocks(turn)
    return found


def _of_blocks(turn: Turn) -> list[dict[str, Any]]:
    """Results of tools are messages of their own, calls a field of the assistant's."""
    assert not isinstance(turn.content, str)
    found: list[dict[str, Any]] = []
    texts, calls = [], []
    for block in turn.content:
        if block.type == "tool_result":
            found.append({"role": "tool", "tool_call_id": block.tool_use_id or "", "content": _result(block)})
        elif block.type == "tool_use":
            function = {"name": block.name or "", "arguments": block.input or {}}
            calls.append({"id": block.id or "", "type": "function", "function": function})
        elif block.type == "text":
            texts.append(block.text or "")
    if texts or calls or not found:
        message: dict[str, Any] = {"role": turn.role, "content": "\n".join(texts)}
        found.append(message | {"tool_calls": calls} if calls else message)
    return found


def _result(block: Block) -> str:
    if isinstance(block.content, str) or block.content is None:
        return block.content or ""
    return "\n".join(part["text"] if isinstance(part.get("text"), str) else json.dumps(part) for part in block.content)


def _calling(body: CountBody | MessagesBody, service: Service) -> Calling:
    """Tools as chat completions have them."""
    tools = [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema},
        }
        for tool in body.tools or ()
    ]
    chosen = body.tool_choice
    named = {"type": "function", "function": {"name": chosen.name if chosen else None}}
    choices: dict[str, Any] = {"auto": "auto", "any": "required", "none": "none", "tool": named}
    parallel = not (chosen and chosen.disable_parallel_tool_use)
    return calling_of(service, tools or None, choices[chosen.type] if chosen else None, parallel)


def count(body: CountBody, service: Service) -> dict[str, Any]:
    """The tokens of the prompt that a conversation becomes."""
    return {"input_tokens": len(_calling(body, service).prompt(conversation(body), {}))}


def job(body: MessagesBody, service: Service) -> Job:
    """Renders the conversation; in the executor."""
    llm = service.llm
    if body.stop is not None:
        raise ApiError(400, "stop is called stop_sequences here", param="stop")
    calling = _calling(body, service)
    prompt = calling.prompt(conversation(body), {})
    most = min(body.max_tokens, room(llm, prompt))
    params = sampling(body, most, seed_of(body), stop=body.stop_sequences or [], **calling.fields(prompt, None, None))
    own = own_options(body, llm, service.options.methods)
    return Job((prompt,), params, own=own, splitter=calling.splitter(prompt), thoughts=calling.thoughts(prompt))
