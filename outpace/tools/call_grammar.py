"""Writes grammars of tool calls, enforced from the first token or from where the model begins a call."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from outpace.core.errors import UserError
from outpace.grammar import schema
from outpace.grammar.schema import resolved, types_of
from outpace.grammar.structure import FREE_WHITESPACE, Structure, quoted, schema_of
from outpace.models.files.tokenizer_folder import THINK
from outpace.models.text.tokenizer import Tokenizer
from outpace.tools.definitions import CallFormat, Tool, ToolChoice

_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_EXCLUSIVE = {"coerce_one_of": True}  # branches exclude one another, see schema.py
_OBJECT = {"type": "object"}
_ANY = r"/(.|\n)*/"
_SPACE = r"[\x20\x0A\x0D\x09]*"
_AFTER = rf"{_SPACE}\}}*{_SPACE}\]?{_SPACE}"  # the only call
_CLOSE = rf"/{_AFTER}(```|~~~|<\/tools>|<\/tool_call>|<\/function>)?{_SPACE}/"
_GO_ON = rf"/{_AFTER}(<\/tools>|<\/tool_call>|<\/function>)?{_SPACE}(```|~~~)[\x20\x09]*\x0A{_SPACE}[^\s`~\{{<\[]/"


def structure_of(
    tokenizer: Tokenizer,
    family: CallFormat,
    tools: Sequence[Tool],
    choice: ToolChoice,
    parallel: bool = True,
    thought: str = "",
    form: Structure | None = None,
) -> Structure | None:
    """Return the form of the answer; None if it is free text.

    `parallel`: allow several calls. `thought`: rules of a thought before the answer, from `thought_rules`. `form`: the
    form of an answer without calls; if the model decides whether it calls, the answer is either calls or has this form.
    A tool whose parameters cannot be enforced accepts any object; if a call is forced or the tool is strict, UserError
    is raised instead.
    """
    begin = ["start: thought answer", thought] if thought else ["start: answer"]
    if choice.kind == "none" or not tools:
        return after_thought(form, thought) if form and thought else form
    offered = [tool for tool in tools if choice.name in (None, tool.name)]
    is_forced = choice.kind in ("required", "named")
    several = parallel and choice.kind != "named"
    calls = _Calls(tokenizer, family, offered, several, "all" if is_forced else "possible")
    if is_forced:
        return Structure("lark", "\n".join([*begin, *calls.forced("answer", _SEPARATORS)]))
    free = _Calls(tokenizer, family, offered, parallel, "none")
    if form is None:
        fallback = Structure("lark", "\n".join([*begin, *free.optional()]))
        return Structure("lark", "\n".join([*begin, *calls.optional()]), fallback=fallback)
    fallback = replace(form, around="\n".join([*begin, *free.instead_of(form)]))
    return replace(form, around="\n".join([*begin, *calls.instead_of(form)]), fallback=fallback)


def after_thought(form: Structure, thought: str) -> Structure:
    """Return the form of an answer after a thought, whose rules are those of `thought_rules`."""
    return replace(form, around=f"start: thought answer\n{thought}\nanswer: @form")


def thought_rules(tokenizer: Tokenizer, is_open: bool) -> str:
    """Return the Lark rule `thought`: all text up to the mark that ends a thought, and what is between it and the
    answer.

    `is_open`: the prompt has begun a thought, so the answer must end it. Otherwise, the thought is optional.
    """
    marks, space = tokenizer.thought_marks or THINK, r"/[ \n]*/"
    end = _mark(tokenizer, marks.end)
    rules = [] if _is_special(end) else [f"thinking[lazy]: {_ANY} {end}"]
    thought = f"{_ANY} {end} {space}" if _is_special(end) else f"thinking {space}"
    whole = thought if is_open else f"({_mark(tokenizer, marks.start)} {thought})?"
    if marks.begins:
        whole += f" (answer_begin {space})*"
        rules.append("answer_begin: " + " | ".join(_mark(tokenizer, text) for text in marks.begins))
    return "\n".join([f"thought: {whole}", *rules])


class _Calls:
    """Writes the Lark rules of answers that call offered tools."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        family: CallFormat,
        tools: Sequence[Tool],
        parallel: bool,
        enforced: Literal["all", "possible", "none"],
    ) -> None:
        """`enforced`: which parameters to enforce besides those of strict tools: all, those that can be, or no others.

        Raises UserError if parameters that must be enforced cannot be.
        """
        self._tokenizer, self._family, self._tools, self._parallel = tokenizer, family, tools, parallel
        self._enforced = enforced
        self._limits_of = {tool.name: _limits(tool, enforced) for tool in tools}

    def forced(self, name: str, options: Mapping[str, Any]) -> list[str]:
        """Return a rule of this name, which matches calls only, and the rules that it uses."""
        between = quoted(self._family.between) if self._family.between else ""
        more = f" ({between} framed)*" if self._parallel and self._family.body != "list" else ""
        terms = (self._literal(self._family.start), self._calls(), self._literal(self._family.end))
        framed = " ".join(filter(None, terms))
        return [f"{name}: framed{more}", f"framed: {framed}", *self._call_rules(options)]

    def optional(self) -> list[str]:
        """Return the rule `answer`: free text, with each call enforced from where it certainly is one."""
        family, rules = self._family, ["rest: " + _ANY]
        framed = []
        if family.body == "xml":  # models omit the mark before the tag
            framed.append("begun call_rest")
            rules += self._until("<function=")
        elif family.start:
            mark = family.start.strip()
            after = family.start.partition(mark)[2]
            terms = ("begun", quoted(after) if after else "", self._calls(), self._literal(family.end))
            framed.append(" ".join(filter(None, terms)))
            rules += self._until(mark)
        if family.takes_unmarked:
            for number, tool in enumerate(self._tools):
                framed.append(f'head_{number} space? arguments_{number} space? "}}"')
                rules.append(f"head_{number}[lazy]: {_ANY} {_head(tool)}")
            rules.append(r"space: /[\x20\x0A\x0D\x09]+/")
        if self._parallel:
            answer = "answer: framed* rest"
        else:
            answer = "answer: (framed go_on)* (framed after? | rest)"  # a fenced call before other text is an example
            rules += [f"after: {_CLOSE}", f"go_on: {_GO_ON}"]
        # An unmarked call is recognized after its name, when the model has already chosen its separators.
        options = FREE_WHITESPACE if family.takes_unmarked else _SEPARATORS
        return [answer, "framed: " + " | ".join(framed), *rules, *self._call_rules(options)]

    def instead_of(self, form: Structure) -> list[str]:
        """Return the rule `answer`: either calls, or a text of the given form.

        Calls without marks are JSON schemas, so that they share lexemes with a form that is a JSON schema.
        """
        family = self._family
        options = _SEPARATORS if form.compact else FREE_WHITESPACE
        answers = ["@form"]
        rules = []
        if family.start:
            answers.append("calls")
            rules += self.forced("calls", options)
        if family.takes_unmarked:
            between = quoted(family.between if family.body == "json" else "\n")
            answers.append(f"bare ({between} bare)*" if self._parallel else "bare")
            rules.append("bare: " + " | ".join(f"%json {self._bare(tool, options)}" for tool in self._tools))
        return ["answer: " + " | ".join(answers), *rules]

    def _calls(self) -> str:
        if self._family.body != "list":
            return "call"
        more = f" ({quoted(self._family.between)} call)*" if self._parallel else ""
        return f'"[" call{more} "]"'

    def _until(self, mark: str) -> list[str]:
        """Return the rule `begun`: all text up to a mark."""
        written = _mark(self._tokenizer, mark)
        return [f"begun: rest {written}" if _is_special(written) else f"begun[lazy]: {_ANY} {written}"]

    def _literal(self, text: str) -> str:
        """Return the grammar's terms for a mark with white space around it."""
        mark = text.strip()
        written = _mark(self._tokenizer, mark)
        if not _is_special(written):
            return quoted(text) if text else ""
        before, _, after = text.partition(mark)
        return " ".join([*([quoted(before)] if before else []), written, *([quoted(after)] if after else [])])

    def _call_rules(self, options: Mapping[str, Any]) -> list[str]:
        """Return the rule `call` and the rules of the tools' arguments."""
        rules = []
        names = [f"call_{number}" for number in range(len(self._tools))]
        for number, tool in enumerate(self._tools):
            if self._family.body == "xml":
                try:
                    rules += self._tags(number, tool, self._limits_of[tool.name])
                except UserError:  # the schema can be enforced, but not in tags
                    if self._enforced == "all" or tool.is_strict:
                        raise
                    rules += self._tags(number, tool, _OBJECT)
                continue
            arguments = f"arguments_{number}"
            limits = {**self._limits_of[tool.name], "x-guidance": {**options, **_EXCLUSIVE}}
            rules.append(f"{arguments}: %json {json.dumps(limits)}")
            if self._family.body == "args":
                written = f"{quoted(tool.name)} {_mark(self._tokenizer, self._family.args)} {arguments}"
            else:
                head = f"{{{quoted('name')}: {quoted(tool.name)}, {quoted(self._family.arguments)}: "
                written = f"{quoted(head)} {arguments} {quoted('}')}"
            rules.append(f"call_{number}: {written}")
        if self._family.body != "xml":
            return ["call: " + " | ".join(names), *rules]
        return ['call: "<function=" call_rest', "call_rest: " + " | ".join(names), *rules]

    def _bare(self, tool: Tool, options: Mapping[str, Any]) -> str:
        """Return the JSON schema of a whole call."""
        limits = dict(self._limits_of[tool.name])
        definitions = {"$defs": limits.pop("$defs", {})}
        fields: dict[str, Any] = {"name": {"const": tool.name}, self._family.arguments: limits}
        call = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
        return json.dumps({**call, **definitions, "x-guidance": {**options, **_EXCLUSIVE}})

    def _tags(self, number: int, tool: Tool, limits: Mapping[str, Any]) -> list[str]:
        """Return the rules of a call whose parameters are written in tags, in the order of the schema."""
        fields = limits.get("properties", {})
        required, rules, terms = limits.get("required", []), [], []
        if not fields:
            terms, rules = [f"any_{number}*"], [rf"any_{number}: /<parameter=[^<>\n]+>\n/ until_{number}"]
            rules.append(f'until_{number}[lazy]: {_ANY} "\\n</parameter>\\n"')
        for keyword in ("anyOf", "oneOf", "allOf", "$ref", "minProperties", "maxProperties", "patternProperties"):
            if keyword in limits:
                raise UserError(f"parameters of tool {tool.name}: {keyword!r} cannot be enforced in tags, leave it out")
        for place, (field, inner) in enumerate(fields.items()):
            if resolved(inner, limits) is False:
                continue
            name = f"value_{number}_{place}"
            terms.append(name if field in required else f"{name}?")
            rules += self._value(name, tool, field, inner, limits)
        return [f"call_{number}: " + " ".join([quoted(f"{tool.name}>\n"), *terms, quoted("</function>")]), *rules]

    def _value(self, name: str, tool: Tool, field: str, inner: Any, root: Mapping[str, Any]) -> list[str]:
        """Return the rules of one parameter: strings are written as they are, other values as JSON."""
        begin, end = quoted(f"<parameter={field}>\n"), quoted("\n</parameter>\n")
        found, types = resolved(inner, root), types_of(inner, root)
        limits = {} if found is True else found
        values = limits.get("enum", [limits["const"]] if "const" in limits else None)
        if values is not None:
            texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
            return [f"{name}: {begin} ({' | '.join(map(quoted, texts))}) {end}"]
        if "string" not in types:
            definitions = {"$defs": root.get("$defs", {})}
            value = json.dumps({**limits, **definitions, "x-guidance": {**FREE_WHITESPACE, **_EXCLUSIVE}})
            return [f"{name}: {begin} {name}_json {end}", f"{name}_json: %json {value}"]
        if keyword := next((key for key in ("pattern", "format", "minLength", "maxLength") if key in limits), None):
            where = f"parameters of tool {tool.name}: {keyword!r} of {field!r}"
            raise UserError(f"{where} cannot be enforced for strings in tags, leave it out")
        return [f"{name}: {begin} {name}_text", f"{name}_text[lazy]: {_ANY} {end}"]


def _limits(tool: Tool, enforced: str) -> Mapping[str, Any]:
    """Return the schema of a tool's arguments. `enforced` is as for `_Calls`."""
    if enforced == "none" and not tool.is_strict:
        return _OBJECT
    try:
        schema_of(tool.parameters)  # raises UserError if it is too large
        limits: Mapping[str, Any] = schema.enforceable(tool.parameters)
    except UserError as error:
        if enforced == "all" or tool.is_strict:
            raise UserError(f"parameters of tool {tool.name}: {error}") from error
        return _OBJECT
    return limits


def _head(tool: Tool) -> str:
    """Return a regex of a call's JSON up to its arguments."""
    name = re.escape(tool.name).replace("/", r"\/")
    return rf'/\{{{_SPACE}"name"{_SPACE}:{_SPACE}"{name}"{_SPACE},{_SPACE}"(arguments|parameters)"{_SPACE}:/'


def _mark(tokenizer: Tokenizer, text: str) -> str:
    """Return the grammar's terms for a mark: the ids of special tokens in it, and the text of other parts."""
    special = tokenizer.special_ids
    found = ((tokenizer.id_of(part), part) for part in tokenizer.split_at_added(text))
    return " ".join(f"<[{index}]>" if index in special else quoted(part) for index, part in found)


def _is_special(mark: str) -> bool:
    """Return whether a term is the id of a special token, which no other text matches."""
    return mark.startswith("<")
