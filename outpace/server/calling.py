"""Tools and thoughts of a request: what its prompt tells of them, what must be written, how its text is taken apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from outpace.core.errors import UserError
from outpace.grammar.structure import read_structure as read_structure
from outpace.server.choices import no_thoughts
from outpace.server.errors import ApiError
from outpace.server.parts import Splitter
from outpace.tools.call_grammar import structure_of, thought_rules
from outpace.tools.calls import CallParser
from outpace.tools.definitions import Tool, ToolChoice, read_choice, read_tools, with_tool_prompt
from outpace.tools.reasoning import CLOSE, ReasoningParser, begins_open, thought_tokens

if TYPE_CHECKING:
    from outpace.server.service import Service

TAIL = 32  # tokens of a prompt in which it may begin a thought


@dataclass(frozen=True)
class Calling:
    """The tools that a request offers, and which must be called. `parallel`: several at once."""

    service: Service
    tools: tuple[Tool, ...]
    choice: ToolChoice
    parallel: bool

    def prompt(self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> tuple[int, ...]:
        """The conversation in tokens, with the tools in it; ApiError where the model would not hear of them."""
        service, tokenizer = self.service, self.service.llm.tokenizer
        if self.choice.kind == "none":
            return tuple(tokenizer.chat(messages, **values))
        if service.takes_tools:
            return tuple(tokenizer.chat(messages, tools=[dict(tool.raw) for tool in self.tools], **values))
        if service.options.tool_prompt:
            return tuple(tokenizer.chat(with_tool_prompt(messages, self.tools, service.family), **values))
        if self.choice.kind == "auto":
            said = "this model's chat template ignores tools: start the server with --tool-prompt, or set tool_choice"
            raise ApiError(400, said, param="tools", code="tools_not_supported")
        return tuple(tokenizer.chat(messages, **values))

    def fields(self, prompt: Sequence[int], response_format: Any, structured_outputs: Any) -> dict[str, Any]:
        """What `SamplingParams` is told of what must be written."""
        given = {"response_format": response_format, "structured_outputs": structured_outputs}
        found = {name: value for name, value in given.items() if value is not None}
        tokenizer, is_open = self.service.llm.tokenizer, self._begins_open(prompt)
        thinks = is_open or (self.service.has_thoughts and not self._has_thought(prompt))
        thought = thought_rules(tokenizer, is_open) if thinks else ""
        structure = structure_of(tokenizer, self.service.family, self.tools, self.choice, self.parallel, thought)
        if structure is None:
            return _behind(thought, found) if thought and found else found
        if structured_outputs is not None or (response_format or {}).get("type", "text") != "text":
            raise ApiError(400, "tools and a form of the answer cannot both be asked for", param="tools")
        special = {"skip_special_tokens": False} if self.service.family.keeps_special else {}
        return {"structured_outputs": structure, **special}

    def splitter(self, prompt: Sequence[int]) -> Callable[[], Splitter]:
        """Makes what takes the text of a choice apart."""
        is_open, family, tools = self._begins_open(prompt), self.service.family, self.tools
        thinks, calls = self.service.has_thoughts or is_open, self.choice.kind != "none"
        return lambda: Splitter(
            ReasoningParser(is_open) if thinks else None, CallParser(family, tools) if calls else None
        )

    def thoughts(self, prompt: Sequence[int]) -> Callable[[Sequence[int]], int]:
        """Counts the tokens of an answer that belong to its thought."""
        is_open, spelled = self._begins_open(prompt), self.service.llm.tokenizer.spelled
        if not (self.service.has_thoughts or is_open):
            return no_thoughts
        return lambda tokens: thought_tokens(map(spelled, tokens), is_open)

    def _begins_open(self, prompt: Sequence[int]) -> bool:
        return begins_open(self._tail(prompt))

    def _has_thought(self, prompt: Sequence[int]) -> bool:
        """Whether the prompt ends with a thought that is over: the model is told not to think."""
        return self._tail(prompt).rstrip().endswith(CLOSE)

    def _tail(self, prompt: Sequence[int]) -> str:
        return self.service.llm.tokenizer.decode(prompt[-TAIL:], skip_special=False)


def _behind(thought: str, forms: Mapping[str, Any]) -> dict[str, Any]:
    """The form that an answer is asked to have, behind its thought."""
    try:
        form = read_structure(forms.get("response_format"), forms.get("structured_outputs"))
    except UserError as error:
        raise ApiError(400, str(error), param=next(iter(forms)), code="invalid_value") from None
    return {"structured_outputs": replace(form, thought=thought)} if form else {}


def calling_of(service: Service, tools: Any, choice: Any, parallel: bool | None) -> Calling:
    """From a request's fields, in the form of chat completions; ApiError for wrong ones."""
    try:
        offered = read_tools(tools)
    except UserError as error:
        raise ApiError(400, str(error), param="tools", code="invalid_value") from None
    try:
        chosen = read_choice(choice, offered)
    except UserError as error:
        raise ApiError(400, str(error), param="tool_choice", code="invalid_value") from None
    return Calling(service, offered, chosen, parallel is not False)
