"""Tool calls as grammars: enforced from the first token, or from where the model begins a call."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from outpace.core.errors import UserError
from outpace.grammar import schema
from outpace.grammar.structure import Structure, quoted
from outpace.models.text.tokenizer import Tokenizer
from outpace.tools.definitions import PYTHON_TAG, CallFormat, Tool, ToolChoice
from outpace.tools.reasoning import CLOSE, OPEN

_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_COMPACT = {"x-guidance": {**_SEPARATORS, "coerce_one_of": True}}  # branches exclude one another, see schema.py
_OBJECT = {"type": "object"}
_ANY = r"/(.|\n)*/"


def structure_of(
    tokenizer: Tokenizer,
    family: CallFormat,
    tools: Sequence[Tool],
    choice: ToolChoice,
    parallel: bool = True,
    thought: str = "",
) -> Structure | None:
    """Return the form of the answer; None if no tool may be called.

    `parallel` allows several calls; `thought` is how the answer begins, from `thought_rules`. Parameters that cannot be
    enforced may be any object, but raise UserError if a call is forced or the tool is strict.
    """
    if choice.kind == "none" or not tools:
        return None
    offered = [tool for tool in tools if choice.name in (None, tool.name)]
    is_forced = choice.kind in ("required", "named")
    lines = ["call: " + " | ".join(f"call_{number}" for number in range(len(offered)))]
    lines += _answer(tokenizer, family, is_forced, parallel and choice.kind != "named")
    lines += ["start: thought answer", thought] if thought else ["start: answer"]
    for number, tool in enumerate(offered):
        head = f"{{{quoted('name')}: {quoted(tool.name)}, {quoted(family.arguments)}: "
        lines.append(f"call_{number}: {quoted(head)} arguments_{number} {quoted('}')}")
    exact = [_parameters(tool, is_forced or tool.is_strict) for tool in offered]
    if is_forced:
        return Structure("lark", _with_arguments(lines, exact))
    free = [found if tool.is_strict else _OBJECT for tool, found in zip(offered, exact, strict=True)]
    return Structure("lark", _with_arguments(lines, exact), fallback=_with_arguments(lines, free))


def thought_rules(tokenizer: Tokenizer, is_open: bool) -> str:
    """Return the rule `thought` of a Lark grammar: all text up to </think> and the white space after it.

    `is_open`: the prompt has begun a thought, which the answer then has to end. Otherwise the model decides whether it
    thinks.
    """
    close = _mark(tokenizer, CLOSE)
    is_special = close.startswith("<")  # no other text matches it
    thought = f"{_ANY} {close}" if is_special else "thinking"
    rest = "" if is_special else f"\nthinking[lazy]: {_ANY} {close}"
    whole = f"{thought} /[ \\n]*/" if is_open else f"({_mark(tokenizer, OPEN)} {thought} /[ \\n]*/)?"
    return f"thought: {whole}{rest}"


def _parameters(tool: Tool, is_enforced: bool) -> Any:
    try:
        return schema.enforceable(tool.parameters)
    except UserError as error:
        if is_enforced:
            raise UserError(f"parameters of tool {tool.name}: {error}") from error
        return _OBJECT


def _with_arguments(lines: Sequence[str], schemas: Sequence[Any]) -> str:
    """Return a grammar with the rules of the calls' arguments."""
    rules = (f"arguments_{number}: %json {json.dumps({**one, **_COMPACT})}" for number, one in enumerate(schemas))
    return "\n".join([*lines, *rules])


def _answer(tokenizer: Tokenizer, family: CallFormat, is_forced: bool, parallel: bool) -> list[str]:
    """Return the rule `answer` and the rules that it needs."""
    more = f" ({quoted(family.between)} call)*" if parallel else ""
    if family.is_list:
        listed = f'{_mark(tokenizer, family.start)} "[" call{more} "]"'
        return [f"answer: {listed}" if is_forced else f"answer: {_ANY} {listed} | {_ANY}"]
    if not family.start and is_forced:
        return [f"answer: call{more}"]
    if not family.start:  # the calls are the whole answer: other text must begin with another character
        before = f"{_mark(tokenizer, PYTHON_TAG)}? " if tokenizer.id_of(PYTHON_TAG) is not None else ""
        return [f"answer: {before}call{more} | rest", r"rest: /[^{\s](.|\n)*/"]
    framed = f"{quoted(family.start)} call {quoted(family.end)}"
    if is_forced:
        return [f"answer: framed{f' ({quoted(family.between)} framed)*' if parallel else ''}", f"framed: {framed}"]
    mark, _, rest = family.start.partition("\n")
    return [
        "answer: framed* rest" if parallel else "answer: framed | rest",
        f"framed: begun {quoted(chr(10) + rest)} call {quoted(family.end)}",
        f"begun[lazy]: {_ANY} {quoted(mark)}",
        f"rest: {_ANY}",
    ]


def _mark(tokenizer: Tokenizer, text: str) -> str:
    """Return a mark as a grammar names it: by its id if it is a special token."""
    index = tokenizer.id_of(text)
    return f"<[{index}]>" if index is not None and index in tokenizer.special_ids else quoted(text)
