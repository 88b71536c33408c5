"""The tools that a request offers, which of them must be called, and how a prompt tells the model of them."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outpace.core.errors import UserError
from outpace.models.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class CallFormat:
    """A call is a JSON object with the tool's name and its arguments, between marks. Without a `start` it is the whole
    answer."""

    name: str
    start: str = ""
    end: str = ""
    arguments: str = "arguments"  # the field
    between: str = "\n"  # several calls
    is_list: bool = False  # all calls stand in one list

    @property
    def keeps_special(self) -> bool:
        """Whether its marks may be special tokens, whose text an answer leaves out unless it is asked for."""
        return self.name in ("llama", "mistral")


HERMES = CallFormat("hermes", "<tool_call>\n", "\n</tool_call>")
LLAMA = CallFormat("llama", arguments="parameters", between="; ")
MISTRAL = CallFormat("mistral", "[TOOL_CALLS]", between=", ", is_list=True)
JSON = CallFormat("json")
PYTHON_TAG = "<|python_tag|>"  # Llama 3.1 may write it before a call


def call_format_of(tokenizer: Tokenizer) -> CallFormat:
    """By the chat template's text and the vocabulary: Hermes and Qwen, Llama 3.1, Mistral, else plain JSON."""
    template = tokenizer.template_text
    if "<tool_call>" in template and "<function=" not in template:
        return HERMES
    if tokenizer.id_of(MISTRAL.start) is not None:
        return MISTRAL
    if tokenizer.id_of(PYTHON_TAG) is not None:
        return LLAMA
    return JSON


MOST = 128
CHOICES = ("none", "auto", "required")
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


@dataclass(frozen=True)
class Tool:
    """A function that the model may ask for. `raw` is what the chat template is given."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    raw: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True)
class ToolChoice:
    """`kind` is none, auto, required or named; `name` that of the tool that must be called."""

    kind: str
    name: str | None = None


def read_tools(given: Any) -> tuple[Tool, ...]:
    """The list `tools` of a request; UserError for what is none."""
    if given is None:
        return ()
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) > MOST:
        raise UserError(f"tools is {reprlib.repr(given)}, it must be a list of at most {MOST} tools")
    tools = tuple(_tool(one) for one in given)
    names = [tool.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"tools has two functions named {twice!r}, each needs a name of its own")
    return tools


def _tool(given: Any) -> Tool:
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or given.get("type") != "function" or not isinstance(function, Mapping):
        raise UserError(f'a tool is {reprlib.repr(given)}, it must be {{"type": "function", "function": {{...}}}}')
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UserError(f"a tool's name is {reprlib.repr(name)}, it must be 1 to 64 letters, digits, '_', '-' or '.'")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping):
        raise UserError(f"parameters of tool {name} is {reprlib.repr(parameters)}, it must be a JSON schema")
    if parameters.get("type", "object") != "object":
        raise UserError(f"parameters of tool {name} has type {parameters['type']!r}, it must be object")
    return Tool(name, str(function.get("description") or ""), {"type": "object", **parameters}, given)


def read_choice(given: Any, tools: Sequence[Tool]) -> ToolChoice:
    """The field `tool_choice` of a request; UserError for what is none, or names no tool."""
    if given is None:
        return ToolChoice("auto" if tools else "none")
    if isinstance(given, Mapping):
        inner = given.get("function", given)
        name = inner.get("name") if isinstance(inner, Mapping) else None
        if name not in [tool.name for tool in tools]:
            offered = ", ".join(tool.name for tool in tools) or "none"
            raise UserError(f"tool_choice names {reprlib.repr(name)}, the tools are {offered}")
        return ToolChoice("named", name)
    if given not in CHOICES:
        raise UserError(f"tool_choice is {reprlib.repr(given)}, it must be {', '.join(CHOICES)} or name a function")
    if given == "required" and not tools:
        raise UserError("tool_choice is 'required', but there are no tools")
    return ToolChoice(given if tools else "none")


def takes_tools(tokenizer: Tokenizer) -> bool:
    """Whether the model's chat template tells the model of tools: it is rendered with and without one. UserError where
    there is no template."""
    messages = [{"role": "user", "content": "?"}]
    probe = {"name": "zq_probe", "description": "-", "parameters": {"type": "object", "properties": {}}}
    bare = tokenizer.render(messages)
    try:
        told = tokenizer.render(messages, tools=[{"type": "function", "function": probe}])
    except UserError:
        return False
    return told != bare and "zq_probe" in told


def tool_prompt(tools: Sequence[Tool], family: CallFormat) -> str:
    """What tells the model of the tools where its template does not."""
    call = json.dumps({"name": "...", family.arguments: {}}).replace("{}", "{...}")
    described = "\n".join(
        json.dumps({"name": tool.name, "description": tool.description, "parameters": tool.parameters})
        for tool in tools
    )
    return (
        f"You may call these functions, given as JSON with a schema of their parameters:\n{described}\n\n"
        f"To call one, answer in this form and with nothing else:\n{family.start}{call}{family.end}"
    )


def with_tool_prompt(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], family: CallFormat) -> list[Any]:
    """The conversation with the tools told in its system message, which is added where there is none."""
    told = tool_prompt(tools, family)
    if messages and messages[0].get("role") == "system":
        first = {**messages[0], "content": f"{messages[0].get('content') or ''}\n\n{told}".strip()}
        return [first, *messages[1:]]
    return [{"role": "system", "content": told}, *messages]
