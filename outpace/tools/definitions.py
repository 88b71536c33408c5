"""Tools that a request offers, tool_choice, and the formats in which models write calls."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outpace.core.errors import UserError
from outpace.models.text.template_form import text_of
from outpace.models.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class CallFormat:
    """How a model writes tool calls, and which other forms of calls are accepted in its answers.

    A call is written between the marks `start` and `end`; without a `start` mark, the whole answer is the call. `body`
    is the form between the marks: `json` (one JSON object), `list` (a JSON list of all calls), `args` (the name, the
    mark `args` and the arguments), or `xml` (tags for the function and its parameters).
    """

    name: str
    start: str = ""
    end: str = ""
    body: str = "json"
    arguments: str = "arguments"  # the field's name
    args: str = ""
    between: str = "\n"  # separates several calls
    keeps_special: bool = False  # the marks may be special tokens, whose text answers omit by default
    marks: tuple[tuple[str, str], ...] = ()  # more pairs of marks that may enclose a call
    takes_unmarked: bool = False  # a JSON object at the start of a line or in a Markdown fence may be a call
    takes_tags: bool = False  # a tag of a function may begin a call

    @property
    def frames(self) -> dict[str, str]:
        """The marks that may begin a call, each with the mark that ends it."""
        own = ((self.start.strip(), self.end.strip()),) if self.start else ()
        return dict((*own, *self.marks))


PYTHON_TAG = "<|python_tag|>"  # Llama 3.1 may write it before a call
ARGS = "[ARGS]"  # Mistral's newer models write it between a call's name and arguments
HERMES = CallFormat("hermes", "<tool_call>\n", "\n</tool_call>", takes_tags=True)
JSON = CallFormat("json", takes_unmarked=True)
LLAMA = CallFormat(
    "llama3",
    arguments="parameters",
    between="; ",
    keeps_special=True,
    marks=((PYTHON_TAG, ""),),
    takes_unmarked=True,
    takes_tags=True,
)
MISTRAL = CallFormat("mistral", "[TOOL_CALLS]", body="list", between=", ", keeps_special=True)
MISTRAL_ARGS = replace(MISTRAL, body="args", args=ARGS, between="")
HARMONY = CallFormat(  # gpt-oss; each call ends the answer
    "openai",
    "<|channel|>commentary to=functions.",
    body="args",
    args=" <|constrain|>json<|message|>",
    between="",
    keeps_special=True,
    marks=(("to=functions.", ""),),  # after the mark of a new message
)
TAGS = CallFormat("tools", "<tools>\n", "\n</tools>")
XML = CallFormat("xml", "<tool_call>\n", "\n</tool_call>", body="xml", takes_tags=True)
FORMATS = {family.name: family for family in (HERMES, JSON, LLAMA, MISTRAL, TAGS, XML, HARMONY)}
AUTO = "auto"


def call_format_of(tokenizer: Tokenizer, name: str = AUTO) -> CallFormat:
    """Return the named format, or for `auto` the model's own.

    `auto` chooses by chat template and vocabulary: Hermes and Qwen, Qwen3-Coder's tags, Mistral, Llama 3.1, else plain
    JSON. It accepts calls in the other formats too, since models often deviate from their templates.
    """
    own = FORMATS[name] if name != AUTO else _own_format(tokenizer)
    if own is MISTRAL and tokenizer.id_of(ARGS) is not None:
        own = MISTRAL_ARGS
    if name != AUTO:
        return own
    others = tuple(frame for family in FORMATS.values() for frame in family.frames.items())
    return replace(own, marks=others, takes_unmarked=True, takes_tags=True)


def _own_format(tokenizer: Tokenizer) -> CallFormat:
    """Detect the format by the chat template and the vocabulary."""
    template = tokenizer.template_text
    if "<function=" in template:
        return XML
    if "<tool_call>" in template:
        return HERMES
    if "<|channel|>commentary" in template:
        return HARMONY
    if tokenizer.id_of(MISTRAL.start) is not None:
        return MISTRAL
    return LLAMA if tokenizer.id_of(PYTHON_TAG) is not None else JSON


MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_./-]{1,128}")  # as MCP servers name tools


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. `raw` is the definition passed to the chat template."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    raw: Mapping[str, Any] = field(repr=False)

    @property
    def is_strict(self) -> bool:
        """Whether the arguments must fit the schema even where `tool_choice` does not force a call."""
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
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) > MAX_TOOLS:
        raise UserError(f"tools is {reprlib.repr(given)}, it must be a list of at most {MAX_TOOLS} tools")
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
        raise UserError(
            f"a tool's name is {reprlib.repr(name)}, it must be 1 to 128 letters, digits, '_', '-', '.', '/'"
        )
    if function.get("strict") not in (None, True, False):
        raise UserError(f"strict of tool {name} is {reprlib.repr(function['strict'])}, it must be true or false")
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
    described = "\n".join(
        json.dumps({"name": tool.name, "description": tool.description, "parameters": tool.parameters})
        for tool in tools
    )
    prompt = (
        f"You may call these functions, given as JSON with a schema of their parameters:\n{described}\n\n"
        f"To call one, answer in this form and with nothing else:\n{_example(family)}"
    )

    if messages and messages[0].get("role") == "system":
        first = {**messages[0], "content": f"{text_of(messages[0].get('content'))}\n\n{prompt}".strip()}
        return [first, *messages[1:]]
    return [{"role": "system", "content": prompt}, *messages]


def _example(family: CallFormat) -> str:
    """Return an example of a call, with dots in place of the name and the arguments."""
    call = json.dumps({"name": "...", family.arguments: {}}).replace("{}", "{...}")
    if family.body == "list":
        call = f"[{call}]"
    elif family.body == "args":
        call = f"...{family.args}{{...}}"
    elif family.body == "xml":
        call = "<function=...>\n<parameter=...>\n...\n</parameter>\n</function>"
    return f"{family.start}{call}{family.end}"
