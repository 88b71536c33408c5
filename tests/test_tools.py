"""Tools: what may be offered, how calls are forced, and how calls and thoughts are found however a text is split."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from files import folder_of, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from splits import check_every_split

from outpace.core.errors import UserError
from outpace.grammar.compiler import Grammars
from outpace.grammar.structure import Structure, read_structure
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
from outpace.tools.reasoning import ReasoningParser, ThoughtDelta, begins_open, has_thoughts, thought_tokens

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city.",
        "parameters": {
            "properties": {"city": {"$ref": "#/$defs/City"}},
            "required": ["city"],
            "$defs": {"City": {"type": "string"}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = read_tools([WEATHER, CLOCK])
CITY = '{"city": "Z\\"}ü"}'
TRANSCRIPTS: list[tuple[CallFormat, str, list[Delta]]] = [
    (HERMES, "", []),
    (HERMES, " Hello <b>you</b> <tool", [TextDelta(" Hello <b>you</b> <tool")]),
    (
        HERMES,
        f'Let me see.\n<tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call>',
        [TextDelta("Let me see."), CallBegin(0, "weather"), CallArguments(0, CITY)],
    ),
    (
        HERMES,
        '<tool_call>{"arguments": {"city": "A"}, "name": "weather"}</tool_call>\n'
        '<tool_call>\n{"name":"clock"}\n</tool_call>\nDone.',
        [
            *(CallBegin(0, "weather"), CallArguments(0, '{"city": "A"}')),
            *(CallBegin(1, "clock"), CallArguments(1, "{}"), TextDelta("\nDone.")),
        ],
    ),
    (
        HERMES,
        '<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>',
        [TextDelta('<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>')],
    ),
    (HERMES, "<tool_call>\nno json</tool_call>", [TextDelta("<tool_call>\nno json</tool_call>")]),
    (HERMES, '<tool_call>\n{"arguments": [}]', [TextDelta('<tool_call>\n{"arguments": [}]')]),
    (
        HERMES,
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Par',
        [CallBegin(0, "weather"), CallArguments(0, '{"city": "Par')],
    ),
    (
        HERMES,
        '<tool_call>\n{"name": "clock", "arguments": {}} oops <tool_call>{"name": "clock"}</tool_call>',
        [
            CallBegin(0, "clock"),
            CallArguments(0, "{}"),
            TextDelta(" oops"),
            CallBegin(1, "clock"),
            CallArguments(1, "{}"),
        ],
    ),
    (
        LLAMA,
        '{"name": "weather", "parameters": {"city": "A"}}',
        [CallBegin(0, "weather"), CallArguments(0, '{"city": "A"}')],
    ),
    (
        LLAMA,
        '<|python_tag|>{"name": "clock", "parameters": {}}; {"name": "clock", "parameters": {"a": [1, {"b": "]"}]}}',
        [
            *(CallBegin(0, "clock"), CallArguments(0, "{}")),
            *(CallBegin(1, "clock"), CallArguments(1, '{"a": [1, {"b": "]"}]}')),
        ],
    ),
    (LLAMA, "<|python_tags", [TextDelta("<|python_tags")]),
    (LLAMA, "Hello {you}", [TextDelta("Hello {you}")]),
    (LLAMA, '  {"name": "Ann", "age": 3}', [TextDelta('  {"name": "Ann", "age": 3}')]),
    (
        MISTRAL,
        'So: [TOOL_CALLS] [{"name": "weather", "arguments": {"city": "A"}}, '
        '{"name": "clock", "arguments": "{\\"x\\": 1}"}]',
        [
            *(TextDelta("So:"), CallBegin(0, "weather"), CallArguments(0, '{"city": "A"}')),
            *(CallBegin(1, "clock"), CallArguments(1, '{"x": 1}')),
        ],
    ),
    (
        JSON,
        '{"type": null, "name": "clock", "id": 12, "arguments": {}}',
        [CallBegin(0, "clock"), CallArguments(0, "{}")],
    ),
    (JSON, '[{"name": "clock", "arguments": {}}]\n', [CallBegin(0, "clock"), CallArguments(0, "{}")]),
    (JSON, "[1, 2]", [TextDelta("[1, 2]")]),
    (JSON, '{"name": 3}', [TextDelta('{"name": 3}')]),
    (JSON, '{"name"', [TextDelta('{"name"')]),
]


def parsed(family: CallFormat, chunks: Iterable[str], tools: tuple[Tool, ...] = TOOLS) -> list[Delta]:
    parser = CallParser(family, tools)
    told = [delta for chunk in chunks for delta in parser.push(chunk)]
    told += parser.finish()
    assert parser.count == sum(isinstance(delta, CallBegin) for delta in told)
    return merge_deltas(told)


@pytest.mark.parametrize("every", [23, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize(("family", "text", "expected"), TRANSCRIPTS)
def test_every_split_of_a_transcript_gives_the_same_deltas(
    family: CallFormat, text: str, expected: list[Delta], every: int
) -> None:
    assert parsed(family, [text]) == expected
    assert check_every_split(lambda: CallParser(family, TOOLS), text, merge_deltas, every) == expected


PARTS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "<think>",
    "</think>",
    "<|python_tag|>",
    '{"name": "clock"',
    "}",
    '"',
]
PARTS += [
    ', "arguments": ',
    "{}",
    "[",
    "]",
    ",",
    "\n",
    " ",
    "a",
    "\\",
    "<",
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
    parser = ReasoningParser(is_open)
    found: list[tuple[str, str]] = []
    for piece in [*(piece for chunk in chunks for piece in parser.push(chunk)), *parser.finish()]:
        kind = type(piece).__name__
        if found and found[-1][0] == kind:
            found[-1] = (kind, found[-1][1] + piece.text)
        else:
            found.append((kind, piece.text))
    return found


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
def test_thoughts_are_told_apart_however_the_text_is_split(text: str, is_open: bool, expected: Any) -> None:
    for first, second in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        assert thoughts((text[:first], text[first:second], text[second:]), is_open) == expected
    assert isinstance(ReasoningParser(True).push("a")[0], ThoughtDelta)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("tokenizer")
    return folder_of(write_gguf(where / "model.gguf"), where / "folder")


def templated(folder: Path, where: Path, template: str) -> Tokenizer:
    """The tokenizer of a folder with another chat template."""
    for file in folder.iterdir():
        (where / file.name).write_bytes(file.read_bytes())
    (where / "chat_template.jinja").write_text(template)
    return Tokenizer.from_folder(where)


def answers(tokenizer: Tokenizer, family: CallFormat, choice: ToolChoice, text: str, **options: Any) -> bool:
    """Whether a text is one whole answer under the structure."""
    structure = structure_of(tokenizer, family, TOOLS, choice, **options)
    assert structure is not None
    return is_answer(tokenizer, structure, text)


def is_answer(tokenizer: Tokenizer, structure: Structure, text: str) -> bool:
    """Whether a text is one whole answer of this structure."""
    constraint = Grammars(tokenizer).constraint(structure, 0)
    tokens = tokenizer.continuation(text)
    end = sorted(tokenizer.stop_ids)[:1] or [tokenizer.size]
    return constraint.allowed([], tokens) == len(tokens) and (
        constraint.is_over([], tokens) or constraint.allowed(tokens, end) == 1
    )


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
def test_calls_are_forced_and_begun_freely(
    family: CallFormat, kind: str, parallel: bool, good: str, bad: str, folder: Path
) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    assert answers(tokenizer, family, ToolChoice(kind), good, parallel=parallel)
    if (family, kind) != (MISTRAL, "auto"):  # whose mark is plain text in this vocabulary, so free text too
        assert not answers(tokenizer, family, ToolChoice(kind), bad, parallel=parallel)
    for is_open in (False, True):
        thought, begins = thought_rules(tokenizer, is_open), "" if is_open else "<think>"
        text = f"{begins}a < b</think>\n{good}"
        assert answers(tokenizer, family, ToolChoice(kind), text, parallel=parallel, thought=thought)
        assert not answers(tokenizer, family, ToolChoice(kind), f"{begins}a < b", parallel=parallel, thought=thought)


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        ({"json": {"enum": [1, 2]}}, "2", "3"),
        ({"regex": "[a-c]{2}"}, "ab", "ad"),
        ({"choice": ["yes", "no"]}, "no", "maybe"),
        ({"grammar": 'start: "a"+ tail\ntail: "b"'}, "aab", "b"),
    ],
)
def test_a_form_may_stand_behind_a_thought(asked: dict[str, Any], good: str, bad: str, folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    form = read_structure(None, asked)
    assert form is not None
    for is_open, begins in ((False, "<think>"), (True, "")):
        structure = replace(form, thought=thought_rules(tokenizer, is_open))
        assert is_answer(tokenizer, structure, f"{begins}it is 2 < 3</think>\n\n{good}")
        assert not is_answer(tokenizer, structure, f"{begins}so</think>{bad}")
        assert not is_answer(tokenizer, structure, good)


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


def test_a_named_tool_is_the_only_one(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    clock = '{"name": "clock", "arguments": {}}'
    assert answers(tokenizer, JSON, ToolChoice("named", "clock"), clock)
    assert not answers(tokenizer, JSON, ToolChoice("named", "weather"), clock)
    assert structure_of(tokenizer, JSON, TOOLS, ToolChoice("none")) is None
    assert structure_of(tokenizer, JSON, (), ToolChoice("auto")) is None


def test_parameters_that_cannot_be_enforced_are_refused_by_name(folder: Path) -> None:
    bad = read_tools(
        [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"not": {}}}}}}]
    )
    with pytest.raises(UserError, match=r"parameters of tool f: .*'not'"):
        structure_of(Tokenizer.from_folder(folder), HERMES, bad, ToolChoice("auto"))


def test_templates_say_whether_they_take_tools(folder: Path, tmp_path: Path) -> None:
    cases = {
        "{% for m in messages %}{{ m.content }}{% endfor %}": False,
        "{{ messages }}{% if tools %}has tools{% endif %}": False,
        "{{ messages }}{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}": True,
        "{% if tools %}{{ raise_exception('no tools') }}{% endif %}{{ messages }}": False,
    }
    for number, (template, expected) in enumerate(cases.items()):
        (tmp_path / str(number)).mkdir()
        tokenizer = templated(folder, tmp_path / str(number), template)
        assert takes_tools(tokenizer) is expected
        assert call_format_of(tokenizer) is (HERMES if expected else JSON)
        tokenizer.close()
    assert not has_thoughts(tokenizer)
    assert begins_open("<|im_start|>assistant\n<think>\n")
    assert not begins_open("<think></think>")


def test_families_are_told_by_the_vocabulary(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    for token, family in ((definitions.PYTHON_TAG, LLAMA), (MISTRAL.start, MISTRAL)):
        monkeypatch.setattr(tokenizer, "id_of", lambda name, known=token: 5 if name == known else None)
        assert call_format_of(tokenizer) is family
        assert family.keeps_special


def test_a_prompt_tells_of_tools_where_the_template_does_not() -> None:
    user = {"role": "user", "content": "Hi"}
    for family in (HERMES, LLAMA, MISTRAL, JSON):
        told = with_tool_prompt([user], TOOLS, family)
        assert told[1:] == [user]
        assert "Of a city." in told[0]["content"]
        assert family.start in told[0]["content"]
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
def test_what_is_no_tool_is_refused(tools: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_tools(tools)


def test_choices_are_read() -> None:
    assert read_tools(None) == ()
    assert read_choice(None, ()) == ToolChoice("none")
    assert read_choice(None, TOOLS) == read_choice("auto", TOOLS) == ToolChoice("auto")
    assert read_choice("auto", ()) == ToolChoice("none")
    assert read_choice({"type": "function", "function": {"name": "clock"}}, TOOLS) == ToolChoice("named", "clock")
    assert read_choice({"type": "function", "name": "clock"}, TOOLS) == ToolChoice("named", "clock")
    for wrong, tools in (
        ("maybe", TOOLS),
        ("required", ()),
        ({"function": {"name": "rm"}}, TOOLS),
        ({"function": 3}, TOOLS),
    ):
        with pytest.raises(UserError, match="tool_choice"):
            read_choice(wrong, tools)
    assert json.loads(json.dumps(definitions.tool_prompt(TOOLS, JSON)))
