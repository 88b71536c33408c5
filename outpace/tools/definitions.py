"""Tools that a request offers, tool_choice, and the formats in which models write calls."""

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
    """How a family of models writes a call: a JSON object with the tool's name and its arguments, between marks.

    Without a `start` mark the call is the whole answer.
    """

    start: str = ""
    end: str = ""
    arguments: str = "arguments"  # the field's name
    between: str = "\n"  # separates several calls
    is_list: bool = False  # all calls are in one list
    keeps_special: bool = False  # the marks may be special tokens, whose text answers omit by default


HERMES = CallFormat("<tool_call>\n", "\n</tool_call>")
LLAMA = CallFormat(arguments="parameters", between="; ", keeps_special=True)
MISTRAL = CallFormat("[TOOL_CALLS]", between=", ", is_list=True, keeps_special=True)
JSON = CallFormat()
PYTHON_TAG = "<|python_tag|>"  # Llama 3.1 may write it before a call


def call_format_of(tokenizer: Tokenizer) -> CallFormat:
    """Choose by chat template and vocabulary: Hermes and Qwen, Llama 3.1, Mistral, else plain JSON."""
    template = tokenizer.template_text
    if "<tool_call>" in template and "<function=" not in template:
        return HERMES
    if tokenizer.id_of(MISTRAL.start) is not None:
        return MISTRAL
    if tokenizer.id_of(PYTHON_TAG) is not None:
        return LLAMA
    return JSON


MOST = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. `raw` is the definition passed to the chat template."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    raw: Mapping[str, Any] = field(repr=False)

    @property
    def is_strict(self) -> bool:
        """Whether its arguments must follow the parameters even if the model decides to call it."""
        return self.raw["function"].get("strict") is True


@dataclass(frozen=True)
class ToolChoice:
    """`kind` is none, auto, required or named; `name` is that of the tool that must be called."""

    kind: str
    name: str | None = None


def read_tools(given: Any) -> tuple[Tool, ...]:
    """Read the field `tools` of a request; raise UserError if it is invalid."""
    if given is None:
        return ()
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) > MOST:
        raise UserError(f"tools is {reprlib.repr(given)}, it must be a list of at most {MOST} tools")
    tools = tuple(_tool(one) for one in given)
    names = [tool.name for tool in tools]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"tools has two functions named {twice[0]!r}, each needs a name of its own")
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
    """Read the field `tool_choice` of a request; raise UserError if it is invalid or names no tool."""
    if given is None:
        return ToolChoice("auto" if tools else "none")
    if isinstance(given, Mapping):
        inner = given.get("function", given)
        name = inner.get("name") if isinstance(inner, Mapping) else None
        if name not in [tool.name for tool in tools]:
            offered = ", ".join(tool.name for tool in tools) or "none"
            raise UserError(f"tool_choice names {reprlib.repr(name)}, the tools are {offered}")
        return ToolChoice("named", name)
    if given not in ("none", "auto", "required"):
        raise UserError(f"tool_choice is {reprlib.repr(given)}, it must be none, auto, required or name a function")
    if given == "required" and not tools:
        raise UserError("tool_choice is 'required', but there are no tools")
    return ToolChoice(given if tools else "none")


def takes_tools(tokenizer: Tokenizer) -> bool:
    """Return whether the chat template describes tools: it is rendered with and without one.

    Raises UserError if there is no template.
    """
    messages = [{"role": "user", "content": "?"}]
    probe = {"name": "zq_probe", "description": "-", "parameters": {"type": "object", "properties": {}}}
    bare = tokenizer.render(messages)
    try:
        rendered = tokenizer.render(messages, tools=[{"type": "function", "function": probe}])
    except UserError:
        return False
    return rendered != bare and "zq_probe" in rendered


def with_tool_prompt(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], family: CallFormat) -> list[Any]:
    """Return the conversation with the tools described in its system message, which is added if missing."""
    call = json.dumps({"name": "...", family.arguments: {}}).replace("{}", "{...}")
    described = "\n".join(
        json.dumps({"name": tool.name, "description": tool.description, "parameters": tool.parameters})
        for tool in tools
    )
    prompt = (
        f"You may call these functions, given as JSON with a schema of their parameters:\n{described}\n\n"
        f"To call one, answer in this form and with nothing else:\n{family.start}{call}{family.end}"
    )

    if messages and messages[0].get("role") == "system":
        first = {**messages[0], "content": f"{messages[0].get('content') or ''}\n\n{prompt}".strip()}
        return [first, *messages[1:]]
    return [{"role": "system", "content": prompt}, *messages]
