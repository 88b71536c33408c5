"""Tool calls and reasoning: rendering tools into a prompt, constraining an answer, splitting its text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from outpace.api.llm import LLM
from outpace.core.errors import UserError
from outpace.grammar.structure import read_structure
from outpace.models.files.tokenizer_folder import THINK, Thought, ThoughtMarks
from outpace.server.errors import ApiError
from outpace.server.options import ServerOptions
from outpace.server.request_body import parse_finite_json
from outpace.tools import definitions
from outpace.tools.call_grammar import structure_of, thought_rules
from outpace.tools.calls import CallArguments, CallBegin, CallParser, TextDelta
from outpace.tools.definitions import Tool, ToolChoice
from outpace.tools.reasoning import ReasoningParser, ThoughtDelta, thought_tokens

BILLING = re.compile(r"\s*x-anthropic-billing-header:([ \t]*([^;\s]+;|[\w.-]+=\S*))*[ \t]*[\r\n]*")
AnswerPart = ThoughtDelta | TextDelta | CallBegin | CallArguments


class TextSplitter:
    """Splits a choice's text into reasoning, answer and tool calls. The result does not depend on how it arrives."""

    def __init__(self, thoughts: ReasoningParser | None = None, calls: CallParser | None = None) -> None:
        self._thoughts, self._calls = thoughts, calls

    @property
    def has_called(self) -> bool:
        """Whether the answer has tool calls so far, all of them complete."""
        return self._calls is not None and 0 < self._calls.count == self._calls.num_whole

    @property
    def is_cut(self) -> bool:
        """Whether a tool call is not complete."""
        return self._calls is not None and self._calls.count > self._calls.num_whole

    def push(self, text: str) -> list[AnswerPart]:
        """Add text; return the parts that are now certain."""
        if self._thoughts is not None:
            return list(self._parse_calls(self._thoughts.push(text)))
        return list(self._parse_calls([TextDelta(text)] if text else []))

    def finish(self) -> list[AnswerPart]:
        parts = list(self._parse_calls(self._thoughts.finish())) if self._thoughts else []
        return [*parts, *(self._calls.finish() if self._calls else [])]

    def _parse_calls(self, parts: Iterable[ThoughtDelta | TextDelta]) -> Iterator[AnswerPart]:
        for part in parts:
            if isinstance(part, TextDelta) and self._calls is not None:
                yield from self._calls.push(part.text)
            else:
                yield part


class ChatModel:
    """Whether and how the served model renders tools, calls them, and reasons, and how it samples by default."""

    def __init__(self, llm: LLM, options: ServerOptions) -> None:
        self.llm, self.options, self.tokenizer = llm, options, llm.tokenizer
        self.call_format = definitions.call_format_of(llm.tokenizer, options.tool_parser)
        self.recommended = llm.target.recommended_sampling(options.generation_config)
        self.default_sampling = {"temperature": 1.0, **self.recommended}

    @property
    def marks(self) -> ThoughtMarks:
        """The marks of thoughts that are looked for in an answer that has some."""
        return self.tokenizer.thought_marks or THINK

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the model's chat template renders tools. Raises UserError if there is none."""
        return definitions.takes_tools(self.tokenizer)


@dataclass(frozen=True)
class ToolOptions:
    """The tools of a request, which of them must be called, and whether several calls may be made at once."""

    model: ChatModel
    tools: tuple[Tool, ...]
    choice: ToolChoice
    parallel: bool

    def render(self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the tokens of a conversation with its tools; raise ApiError if the template ignores them."""
        model, messages = self.model, _without_billing(messages)
        if self.choice.kind != "none":
            if model.takes_tools:
                values = {**values, "tools": [dict(tool.raw) for tool in self.tools]}
            elif model.options.tool_prompt:
                messages = definitions.with_tool_prompt(messages, self.tools, model.call_format)
            elif self.choice.kind == "auto":
                why = "this model's chat template ignores tools: start the server with --tool-prompt or set tool_choice"
                raise ApiError(400, why, param="tools", code="tools_not_supported")
        return tuple(model.tokenizer.chat(messages, **values))

    def within_text(self, is_structured: bool) -> ToolOptions:
        """Return the options for an answer that continues a text; raise ApiError if it must be a whole answer."""
        if is_structured or self.choice.kind in ("required", "named"):
            what = "a structured answer" if is_structured else f"tool_choice {self.choice.kind!r}"
            why = f"{what} needs a whole answer, it cannot continue the last message"
            raise ApiError(400, why, param="messages", code="invalid_value")
        # Without a start mark, only a whole answer is a call.
        return self if self.model.call_format.start else replace(self, choice=ToolChoice("none"))

    def constraints(self, begin: Thought, response_format: Any, structured_outputs: Any) -> dict[str, Any]:
        """Return the fields of SamplingParams that make the answer follow the tools and the requested structure."""
        given = {"response_format": response_format, "structured_outputs": structured_outputs}
        found = {name: value for name, value in given.items() if value is not None}
        tokenizer, family = self.model.tokenizer, self.model.call_format
        thought = "" if begin is Thought.NONE else thought_rules(tokenizer, begin.is_open)
        has_calls = self.choice.kind != "none"
        has_special_marks = (thought and tokenizer.thought_ids) or (has_calls and family.keeps_special)
        shown = {"skip_special_tokens": False} if has_special_marks else {}
        if not has_calls and not thought:
            return shown | found
        try:
            form = read_structure(response_format, structured_outputs)
        except UserError as error:
            raise ApiError(400, str(error), param=next(iter(found)), code="invalid_value") from None
        if structured_outputs is not None and self.choice.kind in ("required", "named"):
            why = "structured_outputs applies to an answer without calls, but tool_choice requires a call"
            raise ApiError(400, why, param="structured_outputs")
        structure = structure_of(tokenizer, family, self.tools, self.choice, self.parallel, thought, form)
        return shown | ({"structured_outputs": structure} if structure else {})

    def splitter(self, begin: Thought) -> Callable[[], TextSplitter]:
        """Return a factory of splitters for the choices of a prompt."""
        has_calls, marks = self.choice.kind != "none", self.model.marks
        return lambda: TextSplitter(
            None if begin is Thought.NONE else ReasoningParser(begin, marks),
            CallParser(self.model.call_format, self.tools) if has_calls else None,
        )

    def thought_counter(self, begin: Thought) -> Callable[[Sequence[int]], int] | None:
        """Return a function that counts the reasoning tokens of an answer; None if it does not reason."""
        spelled, marks = self.model.tokenizer.spelled, self.model.marks
        if begin is Thought.NONE:
            return None
        return lambda tokens: thought_tokens(map(spelled, tokens), begin.is_open, marks)


def _without_billing(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Leave out a line of Claude Code that differs in each request, since all tokens after it would be read again."""
    found = []
    for message in messages:
        content = message["content"]
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        if message["role"] == "system" and parts and (line := BILLING.match(parts[0]["text"])):
            rest = parts[0]["text"][line.end() :]
            kept = [{"type": "text", "text": rest}, *parts[1:]] if rest else parts[1:]
            message = {**message, "content": kept if isinstance(content, list) else rest}
        found += [message] if message["content"] or not content else []
    return found


def tool_options(model: ChatModel, tools: Any, choice: Any, parallel: bool | None) -> ToolOptions:
    """Read a request's fields in the format of chat completions; raise ApiError for wrong ones."""
    param = "tools"
    try:
        offered = definitions.read_tools(tools)
        param = "tool_choice"
        chosen = definitions.read_choice(choice, offered)
    except UserError as error:
        raise ApiError(400, str(error), param=param, code="invalid_value") from None
    return ToolOptions(model, offered, chosen, parallel is not False)


def template_call(call_id: str | None, name: str | None, arguments: Any) -> dict[str, Any]:
    """Return a call of an earlier answer as chat templates expect it."""
    return {"id": call_id or "", "type": "function", "function": {"name": name or "", "arguments": arguments}}


def parse_arguments(text: str) -> Any:
    """Return a call's arguments as an object, or the text itself if it is not JSON."""
    try:
        return parse_finite_json(text)
    except (ValueError, RecursionError):
        return text
