"""Tools: what may be offered, how calls are forced, and how calls and thoughts are found for any split of a text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from files import folder_of, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from splits import check_every_split
from test_grammar import accepts

from outpace.core.errors import UserError
from outpace.grammar.compiler import Grammars
from outpace.grammar.structure import LARGEST, read_structure
from outpace.models.text.tokenizer import Tokenizer
from outpace.tools.call_grammar import structure_of, thought_rules
from outpace.tools.calls import CallArguments, CallBegin, CallParser, Delta, TextDelta, merge_deltas
from outpace.tools.definitions import (
    ARGS,
    FORMATS,
    HARMONY,
    HERMES,
    JSON,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    PYTHON_TAG,
    TAGS,
    XML,
    CallFormat,
    Tool,
    ToolChoice,
    call_format_of,
    read_choice,
    read_tools,
    takes_tools,
    with_tool_prompt,
)
from outpace.tools.reasoning import ReasoningParser, Thought, ThoughtDelta, thought_tokens

PARAMETERS = {
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "$defs": {"City": {"type": "string"}},
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": PARAMETERS}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = read_tools([WEATHER, CLOCK])
CITY = '{"city": "Z\\"}ü"}'
A = '{"city": "A"}'


def free_text(content: str) -> list[Delta]:
    return [TextDelta(content)]


def call(number: int, name: str, arguments: str = "{}") -> list[Delta]:
    return [CallBegin(number, name), CallArguments(number, arguments)]


NO_CALLS = [
    *[(HERMES, text) for text in (" Hello <b>you</b> <tool", "<tool_call>\nno json</tool_call>")],
    (HERMES, '<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>'),
    (HERMES, '<tool_call>\n{"arguments": [}]'),
    *[(LLAMA, text) for text in ("<|python_tags", "Hello {you}", '  {"name": "Ann", "age": 3}')],
    *[(JSON, text) for text in ("[1, 2]", '{"name": 3}', '{"name"')],
]
CALL = '{"name": "weather", "arguments": {"city": "A"}}'


def tagged(city: str) -> str:
    return f"<function=weather>\n<parameter=city>\n{city}\n</parameter>\n</function>"


def fenced(call: str) -> str:
    return f"```json\n{call}\n```"


HERMES_CALL, TAGGED_CALL = f"<tool_call>\n{CALL}\n</tool_call>", f"<tools>\n{CALL}\n</tools>"
XML_CALL, ARGS_CALL = f"<tool_call>\n{tagged('A')}\n</tool_call>", f"[TOOL_CALLS]weather[ARGS]{A}"
CHANNEL_CALL = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{A}"
LLAMA_CALL = CALL.replace("arguments", "parameters")
NO_CITY = CALL.replace("city", "town")
DOUBLED = f"{{{CALL}}}"
QWEN = replace(  # as `auto` returns it for Qwen
    HERMES, marks=tuple(f for one in FORMATS.values() for f in one.frames.items()), takes_unmarked=True
)
PROPERTIES = {"text": {"type": "string"}, "count": {"$ref": "#/$defs/N"}, "flag": {"type": "boolean"}}
PROPERTIES |= {
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "list": {"type": ["array", "null"]},
    "any": {},
}
STORE = {"name": "store", "parameters": {"properties": PROPERTIES, "$defs": {"N": {"type": "integer"}}}}
VALUES = "<tool_call>\n<function=store>\n" + "".join(
    f"<parameter={name}>\n{value}\n</parameter>\n"
    for name, value in {"text": '1\n"2"', "count": 3, "flag": "True", "maybe": "null", "list": "[1]", "any": 5}.items()
)
VALUES += "</function>\n</tool_call>"
CLOCK_CALL = '{"name": "clock", "arguments": {}}'
BAD_TAGS = "<function=weather><parameter=\nx\n</parameter><parameter=ids: [1]\n</parameter>"  # without a name, or `>`
ONE_CALL = [
    *(HERMES_CALL, TAGGED_CALL, CALL, LLAMA_CALL, f"[{CALL}]", f"<tools>[{CALL}]</tools>", XML_CALL, tagged("A")),
    *(
        fenced(CALL),
        fenced(f" [{CALL}]"),
        f"```\n{CALL}\n```",
        f"```tool_call\n{CALL}```",
        f"```xml\n{HERMES_CALL}\n```",
    ),
    *(
        f"<|python_tag|>{LLAMA_CALL}",
        f"```json\n{CALL}",
        f"<tool_call>\n{CALL}",
        CALL.replace('e": ', 'e" :\n\t').replace('s": ', 's" :')[:-1] + "\n}",
    ),
    *(
        DOUBLED,
        f"{DOUBLED}}}",
        DOUBLED[:-1],
        f"{{ {CALL}\n}}",
        CALL.replace(A, f"{{{A}}}"),
        DOUBLED.replace(A, f"{{{A}}}"),
    ),
    *(
        fenced(DOUBLED),
        f"[{DOUBLED}]",
        HERMES_CALL.replace(CALL, DOUBLED),
        f"~~~json\n{CALL}\n~~~",
        f"````\n{CALL}\n````",
    ),
    *(f"<function=weather>{{{A}}}</function>", f"<tool_call>\n{fenced(CALL)}\n</tool_call>"),
]
TWO_CALLS = [
    *(fenced(f"{CALL}\n{CLOCK_CALL}"), fenced(f"[{CALL},\n {CLOCK_CALL}]"), f"{fenced(CALL)}\n{fenced(CLOCK_CALL)}"),
    *(
        f"<tools>\n{CALL}\n{CLOCK_CALL}\n</tools>",
        f"{CALL}\n{CLOCK_CALL}",
        f"{CALL}; {CLOCK_CALL}",
        f"[{CALL}, {CLOCK_CALL}]",
    ),
    f"<tool_call>\n{tagged('A')}\n<function=clock>\n</function>\n</tool_call>",
    *(
        f"{DOUBLED}\n{{{CLOCK_CALL}}}",
        f"[{DOUBLED}, {{{CLOCK_CALL}}}]",
        f"{fenced(CALL)}\n<tool_call>{CLOCK_CALL}</tool_call>",
    ),
]
EXAMPLES = [  # fenced, and the text goes on
    *(f"So:\n{fenced(CALL)}\nDone.", f"So: {fenced(CALL)}\n\nDone.", f"{fenced(CALL)}\n{fenced(CLOCK_CALL)}\nDone."),
    *(
        f"{fenced(DOUBLED)} or",
        f"```json\n[{CALL},\n {CLOCK_CALL}]\n```\nor",
        f"~~~\n{CALL}\n~~~\nor",
        f"{fenced(CALL)}\n```\nx\n```",
    ),
    *(
        f"```xml\n{form}\n```\nDone."
        for form in (HERMES_CALL, TAGGED_CALL, XML_CALL, ARGS_CALL, f"<|python_tag|>{LLAMA_CALL}")
    ),
    *(f"```\nuser: ?\n{HERMES_CALL}\n```\nDone.", f"````md\n{fenced(CALL)}\n````\nDone.", f"```json\n{CALL}\nx\n```"),
]
TEXTS = [
    *('```json\n{"a": 1}\n```', '```json\n{"name": "rm", "arguments": {}}\n```', "```", "``` `x` [y](z) ```", "[1, 2]"),
    *(
        '{"name": "weather", "age": 3}',
        '{"name": "clock"}',
        f"See {CALL}",
        f"```python\nx = 1\n{CALL}\n```",
        "<function=rm>",
    ),
    *("{{ name }}", '{{"name": "rm", "arguments": {}}}', '{{{"name": "clock", "arguments": {}}}}', *EXAMPLES),
    *("````\n```json\n```\n````", "<tools>\n\n</tools>", f"`{CALL}`", "<function=clock", "[TOOL_CALLS]", f"- {CALL}"),
]
TRANSCRIPTS: list[tuple[CallFormat, str, list[Delta]]] = [
    (HERMES, "", []),
    *[(family, answer, free_text(answer)) for family, answer in NO_CALLS],
    (
        HERMES,
        f'Let me see.\n<tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call>',
        free_text("Let me see.") + call(0, "weather", CITY),
    ),
    (
        HERMES,
        f'<tool_call>{{"arguments": {A}, "name": "weather"}}</tool_call>\n'
        '<tool_call>\n{"name":"clock"}\n</tool_call>\nDone.',
        call(0, "weather", A) + call(1, "clock") + free_text("\nDone."),
    ),
    (HERMES, '<tool_call>\n{"name": "weather", "arguments": {"city": "Par', call(0, "weather", '{"city": "Par')),
    (
        HERMES,
        '<tool_call>\n{"name": "clock", "arguments": {}} oops <tool_call>{"name": "clock"}</tool_call>',
        call(0, "clock") + free_text(" oops") + call(1, "clock"),
    ),
    (LLAMA, f'{{"name": "weather", "parameters": {A}}}', call(0, "weather", A)),
    (
        LLAMA,
        '<|python_tag|>{"name": "clock", "parameters": {}}; {"name": "clock", "parameters": {"a": [1, {"b": "]"}]}}',
        call(0, "clock") + call(1, "clock", '{"a": [1, {"b": "]"}]}'),
    ),
    (
        MISTRAL,
        f'So: [TOOL_CALLS] [{{"name": "weather", "arguments": {A}}}, '
        '{"name": "clock", "arguments": "{\\"x\\": 1}"}]',
        free_text("So:") + call(0, "weather", A) + call(1, "clock", '{"x": 1}'),
    ),
    (JSON, '{"type": null, "name": "clock", "id": 12, "arguments": {}}', call(0, "clock")),
    (JSON, '[{"name": "clock", "arguments": {}}]\n', call(0, "clock")),
    *[(QWEN, answer, free_text(answer)) for answer in TEXTS],
    *[(QWEN, f"So.\n{form}", free_text("So.") + call(0, "weather", A)) for form in ONE_CALL],
    *[(QWEN, form, call(0, "weather", A) + call(1, "clock")) for form in TWO_CALLS],
    *[
        (
            family,
            f"```\n{form}\n```\nSo.\n```\n{form}\n```",
            free_text(f"```\n{form}\n```\nSo.") + call(0, "weather", A),
        )
        for family, form in (
            *((QWEN, DOUBLED), (JSON, CALL), (LLAMA, LLAMA_CALL), (HERMES, HERMES_CALL), (TAGS, TAGGED_CALL)),
            *((XML, XML_CALL), (MISTRAL, ARGS_CALL)),
        )
    ],
    (QWEN, f"```ls```\n{HERMES_CALL}\nDone.", free_text("```ls```") + call(0, "weather", A) + free_text("\nDone.")),
    (QWEN, DOUBLED.replace('"A"', '{{"x": [{{}}, "{{}}"]}}'), call(0, "weather", '{"city": {"x": [{}, "{{}}"]}}')),
    (MISTRAL, f"[TOOL_CALLS]weather[ARGS]{{{A}}}[TOOL_CALLS]clock{{{{}}}}", call(0, "weather", A) + call(1, "clock")),
    (QWEN, f"```py\nx = {{}}\n```\n{CALL}", free_text("```py\nx = {}\n```") + call(0, "weather", A)),
    (QWEN, f"<tool_call>\n{CALL}\n{CALL} </tool", call(0, "weather", A) + call(1, "weather", A)),
    (
        XML,
        VALUES,
        call(0, "store", '{"text": "1\\n\\"2\\"", "count": 3, "flag": true, "maybe": null, "list": [1], "any": 5}'),
    ),
    (XML, '<function=clock>\n{"a": {}}\n</function>', call(0, "clock", '{"a": {}}')),
    (XML, '<invoke name="clock"><parameter name="a">b</parameter></invoke>', call(0, "clock", '{"a": "b"}')),
    (
        XML,
        "<function=clock></function>\n<function=rm></function>",
        call(0, "clock") + free_text("\n<function=rm></function>"),
    ),
    (XML, "<function=clock><parameter=a>b", [CallBegin(0, "clock"), CallArguments(0, '{"a": ')]),
    (XML, "<function=weather><parameter=city>b</par", call(0, "weather", '{"city": "b')),
    (XML, f"{BAD_TAGS}<parameter=city>\n\n</parameter></function>", call(0, "weather", '{"city": ""}')),
    (XML, tagged("echo '}' </ {\n\n"), call(0, "weather", '{"city": "echo \'}\' </ {\\n\\n"}')),
    (
        XML,
        "<function=store><parameter=count>2026-01-15</parameter></function>",
        call(0, "store", '{"count": "2026-01-15"}'),
    ),
    (HERMES, HERMES_CALL.replace('"A"', '"mkdir -p t/{a,b"'), call(0, "weather", '{"city": "mkdir -p t/{a,b"}')),
    (
        MISTRAL,
        f"So [TOOL_CALLS]weather[ARGS]{A}[TOOL_CALLS]clock{{}}",
        free_text("So") + call(0, "weather", A) + call(1, "clock"),
    ),
    (MISTRAL, f"[TOOL_CALLS]weather[CALL_ID]ab12[ARGS]{A}", call(0, "weather", A)),
    (MISTRAL, "[TOOL_CALLS]rm[ARGS]{}", free_text("[TOOL_CALLS]rm[ARGS]{}")),
    (HARMONY, CHANNEL_CALL, call(0, "weather", A)),
    (
        HARMONY,
        f"So to=functions.weather<|channel|>commentary json<|message|>{A}",
        free_text("So") + call(0, "weather", A),
    ),
    (HARMONY, f"to=functions.weather<|message|>{A}", call(0, "weather", A)),
    (HARMONY, "Go to=functions.rm<|message|>{}", free_text("Go to=functions.rm<|message|>{}")),
]


ALL_TOOLS = (*TOOLS, *read_tools([{"type": "function", "function": STORE}]))


def parsed(family: CallFormat, chunks: Iterable[str], tools: tuple[Tool, ...] = ALL_TOOLS) -> list[Delta]:
    parser = CallParser(family, tools)
    deltas = [delta for chunk in chunks for delta in parser.push(chunk)]
    deltas += parser.finish()
    assert parser.count == sum(isinstance(delta, CallBegin) for delta in deltas)
    return merge_deltas(deltas)


@pytest.mark.parametrize("every", [23, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize(("family", "text", "expected"), TRANSCRIPTS)
def test_every_split_of_a_transcript_gives_the_same_deltas(
    family: CallFormat, text: str, expected: list[Delta], every: int
) -> None:
    assert parsed(family, [text]) == expected
    assert check_every_split(lambda: CallParser(family, ALL_TOOLS), text, merge_deltas, every) == expected


PARTS = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<think>", "</think>", "<|python_tag|>", '{"name": "clock"', "}"),
    *("{", "~~~\n", "````\n"),
    *('"', ', "arguments": ', "{}", "[", "]", ",", "\n", " ", "a", "\\", "<", "```", "```json\n", "`", "<tools>"),
    *("<|channel|>commentary to=functions.", "<|message|>", " <|constrain|>json"),
    *("</tools>", "<function=clock>", "</function>", "<parameter=a>", "\n</parameter>", "[ARGS]", "clock", ";"),
    '{"name": "weather", "arguments": {"city": "A"}}',
]


@given(
    st.sampled_from([HERMES, LLAMA, MISTRAL, JSON, XML, TAGS, QWEN, HARMONY]),
    st.lists(st.sampled_from(PARTS), max_size=14),
    st.lists(st.integers(0, 200), max_size=5),
)
@settings(max_examples=300, deadline=None)
def test_any_text_in_any_chunks_gives_the_same_deltas(family: CallFormat, parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    chunks = [text[start:end] for start, end in itertools.pairwise(bounds)]
    assert parsed(family, chunks) == parsed(family, [text])
    for is_open in (False, True):
        assert thoughts(chunks, is_open) == thoughts([text], is_open)


def thoughts(chunks: Iterable[str], is_open: bool = False) -> list[tuple[str, str]]:
    parser = ReasoningParser(Thought.BEGUN if is_open else Thought.OPTIONAL)
    pieces = [*(piece for chunk in chunks for piece in parser.push(chunk)), *parser.finish()]
    return [(type(piece).__name__, piece.text) for piece in merge_deltas(pieces)]


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("Hello", False, [("TextDelta", "Hello")]),
        ("<think>\nso\n</think>\n\nHello <think>", False, [("ThoughtDelta", "so\n"), ("TextDelta", "Hello <think>")]),
        ("so</think>Hello", True, [("ThoughtDelta", "so"), ("TextDelta", "Hello")]),
        ("so </thin", True, [("ThoughtDelta", "so </thin")]),
        ("\n<think>\nso</think>\nHello", True, [("ThoughtDelta", "so"), ("TextDelta", "Hello")]),
        ("<thin", True, [("ThoughtDelta", "<thin")]),
        (" <thin", False, [("TextDelta", "<thin")]),
    ],
)
def test_thoughts_are_found_for_every_split_of_the_text(text: str, is_open: bool, expected: Any) -> None:
    for first, second in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        assert thoughts((text[:first], text[first:second], text[second:]), is_open) == expected
    assert isinstance(ReasoningParser(Thought.BEGUN).push("a")[0], ThoughtDelta)


@pytest.mark.parametrize("family", [QWEN, JSON, LLAMA])
def test_references_in_parameters_of_calls_without_marks(family: CallFormat, tokenizer: Tokenizer) -> None:
    node = {"properties": {"next": {"$ref": "#"}, "n": {"$ref": "#/$defs/N"}}, "$defs": {"N": {"type": "integer"}}}
    function = {"name": "f", "parameters": {**node, "additionalProperties": False}}
    form = read_structure({"type": "json_schema", "schema": {"type": "null"}}, None)
    tools = read_tools([{"type": "function", "function": function}])
    structure = structure_of(tokenizer, family, tools, ToolChoice("auto"), form=form)
    assert structure is not None
    for arguments, expected in (('{"next": {"n": 1}}', True), ('{"next": {"n": "1"}}', False), ('{"m": 1}', False)):
        text = f'{{"name": "f", "{family.arguments}": {arguments}}}'
        assert accepts(Grammars(tokenizer), structure, tokenizer, text) is expected


def test_text_between_tags_is_passed_on_at_once() -> None:
    parser = CallParser(XML, TOOLS)
    for character in "<function=weather>\n<parameter=city>\n":
        parser.push(character)
    assert [parser.push(piece) for piece in ("Ro", "me\n", "x</par")] == [
        [CallArguments(0, "Ro")],
        [CallArguments(0, "me")],
        [CallArguments(0, "\\nx")],
    ]


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        (HERMES_CALL, True),
        (f"<tool_call>\n{CALL}", True),
        (f"<tool_call>\n{CALL[:-1]}", False),
        (f"{fenced(CALL)}\n{CALL[:-4]}", False),
        (HERMES_CALL.replace('"A"', "nope"), False),
        (HERMES_CALL.replace('"A"', "NaN"), False),
        (HERMES_CALL.replace(A, '"{\\"city\\": 1}"'), True),
        (HERMES_CALL.replace(A, '"no object"'), False),
        (DOUBLED.replace(A, f"{{{A}}}"), True),
        (f"{fenced(CALL)}\nor\n{DOUBLED[:-3]}", False),
        (XML_CALL, True),
        (XML_CALL.partition("</function>")[0], False),
        ("<function=clock>{}</function>", True),
        ("<function=clock>{no}</function>", False),
    ],
)
def test_a_call_is_whole_if_its_arguments_are_a_json_object(text: str, whole: bool) -> None:
    parser = CallParser(QWEN, TOOLS)
    parser.push(text)
    assert parser.count
    assert (parser.num_whole == parser.count) is whole


def templated(where: Path, template: str) -> Tokenizer:
    """Return the tokenizer with another chat template."""
    where.mkdir(exist_ok=True)
    folder = folder_of(write_gguf(where / "model.gguf"), where / "folder")
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.from_folder(folder)


def answers(tokenizer: Tokenizer, family: CallFormat, choice: ToolChoice, text: str, **options: Any) -> bool:
    """Return whether a text is one whole answer with tools."""
    structure = structure_of(tokenizer, family, TOOLS, choice, **options)
    assert structure is not None
    return accepts(Grammars(tokenizer), structure, tokenizer, text)


@pytest.mark.parametrize(
    ("family", "kind", "parallel", "good", "bad"),
    [
        (HERMES, "required", True, f"{HERMES_CALL}\n{HERMES_CALL}", "Hello"),
        (HERMES, "required", False, HERMES_CALL, HERMES_CALL * 2),
        (HERMES, "auto", True, f"So {HERMES_CALL} and <b>", "So <tool_call>\nno"),
        (HERMES, "auto", False, "Hello", f"{HERMES_CALL} and"),
        (QWEN, "required", True, HERMES_CALL, fenced(CALL)),
        (QWEN, "auto", True, f"So\n{fenced(CALL)}\n{HERMES_CALL}", "So <tool_call>\nno"),
        (QWEN, "auto", True, '```json\n{"name": "Ann", "arguments": 3}\n```', f"So\n{fenced(NO_CITY)}"),
        (QWEN, "auto", True, f"```json\n[{CALL}, {CALL}]\n```", f"```json\n[{CALL}, {NO_CITY}]\n```"),
        (QWEN, "auto", False, f"So\n{fenced(CALL)}\n", f"So\n{CALL}\nDone"),
        (QWEN, "auto", False, f"{fenced(CALL)}\nDone\n{fenced(CALL)}", f"{fenced(CALL)}\n{fenced(CALL)}"),
        (QWEN, "auto", False, f"{fenced(CALL)}\nDone", f"{fenced(CALL)}\nDone\n{HERMES_CALL}\nDone"),
        (QWEN, "auto", False, f"{DOUBLED}}}\n", f"{{{NO_CITY}}}"),
        (QWEN, "auto", True, fenced(f"[{DOUBLED}, {DOUBLED}]"), fenced(f"[{DOUBLED}, {{{NO_CITY}}}]")),
        (JSON, "auto", False, fenced(DOUBLED), f"{DOUBLED}\n{DOUBLED}"),
        (LLAMA, "auto", False, f"{{{LLAMA_CALL}}}", f"{{{LLAMA_CALL}}} and"),
        (TAGS, "required", True, f"{TAGGED_CALL}\n{TAGGED_CALL}", HERMES_CALL),
        (TAGS, "auto", True, f"So {TAGGED_CALL}", "So <tools>\n[]"),
        (LLAMA, "required", True, f"{LLAMA_CALL}; {LLAMA_CALL}", CALL),
        (LLAMA, "auto", True, "Hello {you}", LLAMA_CALL.replace("city", "town")),
        (JSON, "required", True, f"{CALL}\n{CALL}", "{}"),
        (JSON, "auto", True, 'Hello\n{"name": "Ann"}', NO_CITY),
        (JSON, "auto", True, CALL.replace(": ", ":\n "), '{ "name":"clock",  "arguments": 3}'),
        (MISTRAL, "required", True, f"[TOOL_CALLS][{CALL}, {CALL}]", f"[TOOL_CALLS]{CALL}"),
        (MISTRAL, "auto", False, f"[TOOL_CALLS][{CALL}]", "[TOOL_CALLS][{}]"),
        (MISTRAL_ARGS, "required", True, f"{ARGS_CALL}{ARGS_CALL}", CALL),
        (MISTRAL_ARGS, "auto", True, f"So {ARGS_CALL}", "[TOOL_CALLS]weather[ARGS]{}"),
        (HARMONY, "required", True, CHANNEL_CALL, CHANNEL_CALL.replace("city", "town")),
        (HARMONY, "auto", True, f"So {CHANNEL_CALL}", f"So {CHANNEL_CALL.replace('city', 'town')}"),
        (XML, "required", True, f"{XML_CALL}\n{XML_CALL}", HERMES_CALL),
        (XML, "required", False, XML_CALL, XML_CALL.replace("city", "town")),
        (XML, "auto", True, f"So {tagged('a < b')} and {XML_CALL}", "So <function=rm>\n</function>"),
        (XML, "auto", False, "<tool>", f"{XML_CALL} and"),
    ],
)
def test_calls_are_forced_or_optional(
    family: CallFormat, kind: str, parallel: bool, good: str, bad: str, tokenizer: Tokenizer
) -> None:
    assert answers(tokenizer, family, ToolChoice(kind), good, parallel=parallel)
    assert not answers(tokenizer, family, ToolChoice(kind), bad, parallel=parallel)
    for is_open in (False, True):
        thought, begins = thought_rules(tokenizer, is_open), "" if is_open else "<think>"
        text = f"{begins}a < b</think>\n{good}"
        assert answers(tokenizer, family, ToolChoice(kind), text, parallel=parallel, thought=thought)
        if is_open or kind == "required":  # an offered tool leaves all texts free, also one that begins as a thought
            unfinished = f"{begins}a < b"
            assert not answers(tokenizer, family, ToolChoice(kind), unfinished, parallel=parallel, thought=thought)
        if not is_open:
            assert answers(tokenizer, family, ToolChoice(kind), good, parallel=parallel, thought=thought)


FORMS: list[tuple[dict[str, Any], str, str]] = [
    (
        {"json": {"properties": {"name": {"type": "string"}, "n": {"type": "integer"}}, "required": ["name"]}},
        *('{"name": "weather", "n": 3}', '{"n": 3}'),
    ),
    (
        {"json": {"type": "object", "additionalProperties": False, "properties": {"a": {"type": "null"}}}},
        *('{\n  "a": null\n}', '{"a": 1}'),
    ),
    ({"regex": "[a-c]{2}"}, "ab", "ad"),
    ({"choice": ["yes", "no"]}, "no", "maybe"),
    ({"grammar": 'start: "a"+ tail\ntail: "b"'}, "aab", "b"),
]


@pytest.mark.parametrize(
    ("family", "call"),
    [
        (HERMES, HERMES_CALL),
        (QWEN, HERMES_CALL),
        (QWEN, CALL),
        (TAGS, TAGGED_CALL),
        (LLAMA, LLAMA_CALL),
        (JSON, CALL.replace(": ", ":\n ")),
        (MISTRAL, f"[TOOL_CALLS][{CALL}]"),
        (MISTRAL_ARGS, ARGS_CALL),
        (XML, XML_CALL),
    ],
)
@pytest.mark.parametrize(("structured", "good", "bad"), FORMS)
def test_an_answer_is_calls_or_has_the_requested_form(
    structured: dict[str, Any], good: str, bad: str, family: CallFormat, call: str, tokenizer: Tokenizer
) -> None:
    form = read_structure(None, structured)
    for parallel, thought, begins in ((True, "", ""), (False, thought_rules(tokenizer, True), "a < b</think>\n")):
        options = {"form": form, "parallel": parallel, "thought": thought}
        for text, expected in ((good, True), (call, True), (bad, False), (f"{good}{call}", False), ("Hello", False)):
            assert answers(tokenizer, family, ToolChoice("auto"), begins + text, **options) is expected, text
        assert answers(tokenizer, family, ToolChoice("none"), begins + good, **options)
    more = call + (family.between if family.body != "list" else "") + call
    assert answers(tokenizer, family, ToolChoice("auto"), more, form=form) is (family.body != "list")
    assert not answers(tokenizer, family, ToolChoice("auto"), more, form=form, parallel=False)


@pytest.mark.parametrize(
    ("structured", "good", "bad"),
    [
        ({"json": {"enum": [1, 2]}}, "2", "3"),
        ({"regex": "[a-c]{2}"}, "ab", "ad"),
        ({"choice": ["yes", "no"]}, "no", "maybe"),
        ({"grammar": 'start: "a"+ tail\ntail: "b"'}, "aab", "b"),
    ],
)
def test_a_structure_may_follow_a_thought(
    structured: dict[str, Any], good: str, bad: str, tokenizer: Tokenizer
) -> None:
    grammars, form = Grammars(tokenizer), read_structure(None, structured)
    assert form is not None
    for is_open, begins in ((False, "<think>"), (True, "")):
        thought = thought_rules(tokenizer, is_open)
        structure = structure_of(tokenizer, JSON, (), ToolChoice("none"), thought=thought, form=form)
        assert structure is not None
        assert accepts(grammars, structure, tokenizer, f"{begins}it is 2 < 3</think>\n\n{good}")
        assert not accepts(grammars, structure, tokenizer, f"{begins}so</think>{bad}")
        assert accepts(grammars, structure, tokenizer, good) == (not is_open)
        assert not accepts(grammars, structure, tokenizer, bad)


@pytest.mark.parametrize(
    ("pieces", "is_open", "count"),
    [
        (["<th", "ink>", "so", "</thi", "nk>x", "y"], False, 5),
        (["\n", "<think>", "so"], False, 3),
        (["so", " what</think>", "y"], True, 2),
        (["so"], True, 1),
        (["so", "<think>", "</think>"], False, 0),
        (["<th"], False, 0),
        ([], True, 0),
    ],
)
def test_tokens_of_a_thought_are_counted(pieces: list[str], is_open: bool, count: int) -> None:
    assert thought_tokens([piece.encode() for piece in pieces], is_open) == count


def test_a_named_tool_is_the_only_one(tokenizer: Tokenizer) -> None:
    clock = '{"name": "clock", "arguments": {}}'
    assert answers(tokenizer, JSON, ToolChoice("named", "clock"), clock)
    assert not answers(tokenizer, JSON, ToolChoice("named", "weather"), clock)
    assert structure_of(tokenizer, JSON, TOOLS, ToolChoice("none")) is None
    assert structure_of(tokenizer, JSON, (), ToolChoice("auto")) is None


def test_parameters_that_cannot_be_enforced_are_refused_by_name(tokenizer: Tokenizer) -> None:
    function = {"name": "f", "parameters": {"properties": {"a": {"not": {"const": 1}}}}}
    bad = read_tools([{"type": "function", "function": function}])
    strict = read_tools([{"type": "function", "function": {**function, "strict": True}}])
    for tools, choice in ((bad, ToolChoice("required")), (bad, ToolChoice("named", "f")), (strict, ToolChoice("auto"))):
        with pytest.raises(UserError, match=r"parameters of tool f: .*'not'"):
            structure_of(tokenizer, HERMES, tools, choice)


def test_many_tools_are_enforced_together(tokenizer: Tokenizer) -> None:
    """Each has parameters of at most 64 KiB."""
    enum = {"enum": [f"value {number}" for number in range(400)]}
    function = {"parameters": {"type": "object", "properties": {"a": enum}, "required": ["a"]}}
    tools = read_tools([{"type": "function", "function": {**function, "name": f"f{n}"}} for n in range(60)])
    structure = structure_of(tokenizer, JSON, tools, ToolChoice("required"), parallel=False)
    assert structure is not None
    assert len(structure.text) > 2 * LARGEST
    grammars = Grammars(tokenizer)
    assert accepts(grammars, structure, tokenizer, '{"name": "f59", "arguments": {"a": "value 399"}}')
    assert not accepts(grammars, structure, tokenizer, '{"name": "f59", "arguments": {"a": "value 400"}}')
    large = read_tools([{"type": "function", "function": {"name": "f", "parameters": {"default": "x" * 70_000}}}])
    with pytest.raises(UserError, match=r"parameters of tool f: the JSON schema has 700.. bytes, at most 65536"):
        structure_of(tokenizer, JSON, large, ToolChoice("required"))


@pytest.mark.parametrize(
    "bad",
    [
        {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}},  # refused by our own check
        {"type": "object", "patternProperties": {"^a": {}, "b$": {}}},  # refused by the library
        {"type": "object", "properties": {"a": {"enum": [f"x{n}" for n in range(9000)]}}},  # too large
    ],
    ids=["uniqueItems", "patternProperties", "size"],
)
def test_a_model_may_call_a_tool_whose_parameters_cannot_be_enforced(bad: Any, tokenizer: Tokenizer) -> None:
    """Other tools of the request remain usable, and the parameters of a strict tool are still enforced."""
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    tools = read_tools([{"type": "function", "function": {"name": "f", "parameters": bad}}, strict])
    structure = structure_of(tokenizer, HERMES, tools, ToolChoice("auto"))
    assert structure is not None
    constraint = Grammars(tokenizer).constraint(structure, 0)
    calls = [
        ("f", '{"a": "x1"}' if "enum" in str(bad) else '{"a": [1, 1]}'),
        ("weather", A),
        ("weather", '{"city": 7}'),
    ]
    allowed = []
    for name, arguments in calls:
        text = f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        tokens = tokenizer.continuation(text)
        allowed.append(constraint.allowed([], tokens) == len(tokens))
    assert allowed == [True, True, False]


def test_a_model_may_call_a_tool_whose_parameters_cannot_be_enforced_in_tags(tokenizer: Tokenizer) -> None:
    function = {"name": "f", "parameters": {"properties": {"a": {"type": "string", "pattern": "^x"}}}}
    tools = read_tools([{"type": "function", "function": function}])
    structure = structure_of(tokenizer, XML, tools, ToolChoice("auto"))
    assert structure is not None
    text = "<function=f>\n<parameter=a>\ny\n</parameter>\n</function>"
    assert accepts(Grammars(tokenizer), structure, tokenizer, text)
    strict = read_tools([{"type": "function", "function": {**function, "strict": True}}])
    for offered, choice in ((tools, "required"), (strict, "auto")):
        with pytest.raises(UserError, match=r"parameters of tool f: 'pattern' of 'a' cannot be enforced"):
            structure_of(tokenizer, XML, offered, ToolChoice(choice))


def test_schemas_that_are_true_or_false_in_tags(tokenizer: Tokenizer) -> None:
    """The first allows every value, the second forbids the parameter."""
    function = {"name": "f", "parameters": {"properties": {"a": True, "b": False, "c": {"$ref": "#/$defs/any"}}}}
    function["parameters"]["$defs"] = {"any": True}  # type: ignore[index]
    tools = read_tools([{"type": "function", "function": function}])
    structure = structure_of(tokenizer, XML, tools, ToolChoice("required"))
    assert structure is not None
    grammars = Grammars(tokenizer)
    for name, is_allowed in (("a", True), ("b", False), ("c", True)):
        text = f"<tool_call>\n<function=f>\n<parameter={name}>\ny\n</parameter>\n</function>\n</tool_call>"
        assert accepts(grammars, structure, tokenizer, text) is is_allowed


def test_templates_say_whether_they_take_tools(tmp_path: Path) -> None:
    cases = {
        "{% for m in messages %}{{ m.content }}{% endfor %}": False,
        "{{ messages }}{% if tools %}has tools{% endif %}": False,
        "{{ messages }}{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}": True,
        "{% if tools %}{{ raise_exception('no tools') }}{% endif %}{{ messages }}": False,
    }
    for number, (template, expected) in enumerate(cases.items()):
        (tmp_path / str(number)).mkdir()
        tokenizer = templated(tmp_path / str(number), template)
        assert takes_tools(tokenizer) is expected
        assert call_format_of(tokenizer).name == ("hermes" if expected else "json")
    assert tokenizer.thought_marks is None


def test_families_are_found_by_the_template_or_the_vocabulary(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert {name: call_format_of(tokenizer, name) for name in FORMATS} == FORMATS
    tags = templated(tmp_path, "{{ messages }}{% if tools %}<tool_call><function=name>{% endif %}")
    assert call_format_of(tags).name == "xml"
    channels = templated(tmp_path / "channels", "{{ messages }}{% if tools %}<|channel|>commentary to={% endif %}")
    assert call_format_of(channels).start == HARMONY.start
    for tokens, family in (({PYTHON_TAG}, LLAMA), ({MISTRAL.start}, MISTRAL), ({MISTRAL.start, ARGS}, MISTRAL_ARGS)):
        monkeypatch.setattr(tokenizer, "id_of", lambda name, known=tokens: 5 if name in known else None)
        auto = call_format_of(tokenizer)
        assert (auto.name, auto.body, auto.start) == (family.name, family.body, family.start)
        assert auto.keeps_special
        assert {"<tool_call>", "<tools>", "[TOOL_CALLS]", PYTHON_TAG} <= set(auto.frames)
    assert call_format_of(tokenizer, "mistral") is MISTRAL_ARGS


def test_a_prompt_describes_tools_if_the_template_does_not() -> None:
    user = {"role": "user", "content": "Hi"}
    for family in (HERMES, LLAMA, MISTRAL, JSON):
        system, *others = with_tool_prompt([user], TOOLS, family)
        assert others == [user]
        assert "Of a city." in system["content"]
        assert family.start in system["content"]
        again = with_tool_prompt([{"role": "system", "content": "Be brief."}, user], TOOLS, family)
        assert [turn["role"] for turn in again] == ["system", "user"]
        assert again[0]["content"].startswith("Be brief.\n\n")


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ("weather", "list of at most"),
        ([3], "a tool is 3"),
        ([{"type": "web"}], "it must be"),
        ([{"type": "function", "function": {"name": "a b"}}], "a tool's name is 'a b'"),
        ([{"type": "function", "function": {"name": "a", "parameters": 3}}], "must be a JSON schema"),
        ([{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}], "must be object"),
        ([CLOCK, CLOCK], "two functions named 'clock'"),
        ([CLOCK] * 129, "at most 128"),
    ],
)
def test_wrong_tools_are_refused(tools: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_tools(tools)


def test_choices_are_read() -> None:
    assert read_tools(None) == ()
    assert read_choice(None, ()) == ToolChoice("none")
    assert read_choice(None, TOOLS) == read_choice("auto", TOOLS) == ToolChoice("auto")
    assert read_choice("auto", ()) == ToolChoice("none")
    assert read_choice({"type": "function", "function": {"name": "clock"}}, TOOLS) == ToolChoice("named", "clock")
    assert read_choice({"type": "function", "name": "clock"}, TOOLS) == ToolChoice("named", "clock")
    for wrong in ("maybe", {"function": {"name": "rm"}}, {"function": 3}):
        with pytest.raises(UserError, match="tool_choice"):
            read_choice(wrong, TOOLS)
    with pytest.raises(UserError, match="tool_choice is 'required', but there are no tools"):
        read_choice("required", ())
