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
from outpace.grammar.structure import read_structure
from outpace.models.text.tokenizer import Tokenizer
from outpace.tools import definitions
from outpace.tools.call_grammar import structure_of, thought_rules
from outpace.tools.calls import CallArguments, CallBegin, CallParser, Delta, TextDelta, merge_deltas
from outpace.tools.definitions import (
    HERMES,
    JSON,
    LLAMA,
    MISTRAL,
    CallFormat,
    Tool,
    ToolChoice,
    call_format_of,
    read_choice,
    read_tools,
    takes_tools,
    with_tool_prompt,
)
from outpace.tools.reasoning import ReasoningParser, Thought, ThoughtDelta, has_thoughts, thought_tokens

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
]


def parsed(family: CallFormat, chunks: Iterable[str], tools: tuple[Tool, ...] = TOOLS) -> list[Delta]:
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
    assert check_every_split(lambda: CallParser(family, TOOLS), text, merge_deltas, every) == expected


PARTS = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<think>", "</think>", "<|python_tag|>", '{"name": "clock"', "}"),
    *('"', ', "arguments": ', "{}", "[", "]", ",", "\n", " ", "a", "\\", "<"),
    '{"name": "weather", "arguments": {"city": "A"}}',
]


@given(
    st.sampled_from([HERMES, LLAMA, MISTRAL, JSON]),
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
        (" <thin", False, [("TextDelta", "<thin")]),
    ],
)
def test_thoughts_are_found_for_every_split_of_the_text(text: str, is_open: bool, expected: Any) -> None:
    for first, second in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        assert thoughts((text[:first], text[first:second], text[second:]), is_open) == expected
    assert isinstance(ReasoningParser(Thought.BEGUN).push("a")[0], ThoughtDelta)


def templated(where: Path, template: str) -> Tokenizer:
    """Return the tokenizer with another chat template."""
    folder = folder_of(write_gguf(where / "model.gguf"), where / "folder")
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.from_folder(folder)


def answers(tokenizer: Tokenizer, family: CallFormat, choice: ToolChoice, text: str, **options: Any) -> bool:
    """Return whether a text is one whole answer with tools."""
    structure = structure_of(tokenizer, family, TOOLS, choice, **options)
    assert structure is not None
    return accepts(Grammars(tokenizer), structure, tokenizer, text)


CALL = '{"name": "weather", "arguments": {"city": "A"}}'


@pytest.mark.parametrize(
    ("family", "kind", "parallel", "good", "bad"),
    [
        (HERMES, "required", True, f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>", "Hello"),
        (HERMES, "required", False, f"<tool_call>\n{CALL}\n</tool_call>", f"<tool_call>\n{CALL}\n</tool_call>" * 2),
        (HERMES, "auto", True, f"So <tool_call>\n{CALL}\n</tool_call> and <b>", "So <tool_call>\nno"),
        (HERMES, "auto", False, "Hello", f"<tool_call>\n{CALL}\n</tool_call> and"),
        (LLAMA, "required", True, CALL.replace("arguments", "parameters"), CALL),
        (LLAMA, "auto", True, "Hello {you}", '{"name": "rm"'),
        (JSON, "required", True, f"{CALL}\n{CALL}", "{}"),
        (JSON, "auto", True, "Hello", '{"name": "Ann"}'),
        (MISTRAL, "required", True, f"[TOOL_CALLS][{CALL}, {CALL}]", f"[TOOL_CALLS]{CALL}"),
        (MISTRAL, "auto", False, f"[TOOL_CALLS][{CALL}]", "[TOOL_CALLS][]"[:0] + "[TOOL_CALLS][{}]"),
    ],
)
def test_calls_are_forced_or_optional(
    family: CallFormat, kind: str, parallel: bool, good: str, bad: str, tokenizer: Tokenizer
) -> None:
    assert answers(tokenizer, family, ToolChoice(kind), good, parallel=parallel)
    if (family, kind) != (MISTRAL, "auto"):  # whose mark is plain text in this vocabulary, so free text too
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
        structure = replace(form, thought=thought_rules(tokenizer, is_open))
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
    """Other tools of the request stay usable. What a strict tool takes is enforced nevertheless."""
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
        assert call_format_of(tokenizer) is (HERMES if expected else JSON)
        tokenizer.close()
    assert not has_thoughts(tokenizer)


def test_families_are_found_by_the_vocabulary(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    for token, family in ((definitions.PYTHON_TAG, LLAMA), (MISTRAL.start, MISTRAL)):
        monkeypatch.setattr(tokenizer, "id_of", lambda name, known=token: 5 if name == known else None)
        assert call_format_of(tokenizer) is family
        assert family.keeps_special


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
