"""Structured output: what may be asked, what is refused, what is written, and how a vocabulary is read."""

from __future__ import annotations

import json
import pickle
import random
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from outpace.core.constraints import Constraint
from outpace.core.errors import UserError, install_command
from outpace.grammar import compiler, schema
from outpace.grammar.compiler import Grammars, Vocabulary
from outpace.grammar.matcher import GrammarConstraint, unpacked
from outpace.grammar.structure import Structure, choice_of, read_structure, schema_of
from outpace.models.text.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "kind": {"enum": ["a", "b"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}

MISSPELT = ("uniqueItem", "additonalProperties", "oneof", "minlength", "requires", "Type", "min", "patternproperty")


def nested(depth: int) -> dict[str, Any]:
    return {"items": nested(depth - 1)} if depth else {}


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer)


def accepts(grammars: Grammars, asked: Structure, tokenizer: Tokenizer, text: str) -> bool:
    """Whether a text is one whole answer."""
    constraint, prompt = grammars.constraint(asked, 2), [0, 0]
    tokens = tokenizer.continuation(text)
    count = constraint.allowed(prompt, tokens)
    end = sorted(tokenizer.stop_ids)[:1] or [tokenizer.size]
    return count == len(tokens) and (
        constraint.is_over(prompt, tokens) or constraint.allowed(prompt, [*tokens, *end]) == count + 1
    )


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        (schema_of(PERSON), '{"name": "Al", "kind": "a"}', '{"name": "Al", "kind": "c"}'),
        (schema_of(PERSON), '{ \n"name":"x",\t"kind" : "b" }', '{"kind": "a"}'),
        (schema_of(PERSON), f'{{"name": "Al"{" " * 16}, "kind": "a"}}', f'{{"name":{" " * 17}"", "kind": "a"}}'),
        (schema_of(PERSON, compact=True), '{"name": "Al", "kind": "a"}', '{"name":"Al","kind":"a"}'),
        (schema_of({"type": "object"}), '{"any": [1, {}]}', "[1]"),
        (Structure("regex", "[a-c]+!"), "abc!", "abd!"),
        (choice_of(["yes", 'say "no"\n']), 'say "no"\n', "no"),
        (Structure("lark", 'start: "a" NUMBER\nNUMBER: /[0-9]+/'), "a42", "a"),
    ],
)
def test_a_grammar_takes_whole_answers_alone(
    asked: Structure, good: str, bad: str, grammars: Grammars, tokenizer: Tokenizer
) -> None:
    assert accepts(grammars, asked, tokenizer, good)
    assert not accepts(grammars, asked, tokenizer, bad)


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"\d+", ["1", "42"], ["𝟗", "٣", "a"]),
        (r"\d{3}-\d{4}", ["555-0123"], ["𝟝𝟝𝟝-𝟘𝟙𝟚𝟛"]),
        (r"[\w.-]+", ["a.B-3_"], ["é", "ª", " "]),
        (r"\s", [" ", "\n"], ["\u00a0", "\u2003"]),
        (r"\D", ["a", "é", "٣"], ["1"]),
        (r"[^\s\w]", ["-", "é", "\u00a0"], ["a", " "]),
        (r"[\s\S]", ["a", "é", "\u00a0", " "], []),
        (r"\\d\\\d", [r"\d\1"], ["1", "11"]),
        (r"(?x) \d \s \d", ["1 2"], ["1\u00a02"]),
    ],
)
@pytest.mark.parametrize("kind", ["regex", "lark"])
def test_classes_of_a_regex_match_ascii_only(
    kind: str, pattern: str, good: list[str], bad: list[str], grammars: Grammars, tokenizer: Tokenizer
) -> None:
    asked = Structure(kind, pattern if kind == "regex" else f"start: /{pattern}/")
    assert [text for text in [*good, *bad] if accepts(grammars, asked, tokenizer, text)] == good


def test_fields_of_both_apis_are_read() -> None:
    assert read_structure(None, None) is None
    assert read_structure({"type": "text"}, None) is None
    assert read_structure({"type": "json_object"}, None) == schema_of({"type": "object"})
    wrapped = {"type": "json_schema", "json_schema": {"name": "n", "schema": PERSON, "strict": True}}
    nulls = {
        "type": "json_schema",
        "schema": None,
        "json_schema": {"description": None, "strict": None, "schema": PERSON},
    }
    of_llama_cpp = ({"type": "json_object", "schema": schema} for schema in (PERSON, json.dumps(PERSON)))
    for response_format in (wrapped, {"type": "json_schema", "schema": PERSON}, nulls, *of_llama_cpp):
        assert read_structure(response_format, None) == schema_of(PERSON)
    for any_object in (None, {}, True, {"type": ["object", "null"]}):
        given = {"type": "json_object", "schema": any_object, "json_schema": None}
        assert read_structure(given, None) == schema_of({"type": "object"})
    assert read_structure({"type": "text", "json_schema": None}, {"regex": None, "json": PERSON}) == schema_of(PERSON)
    assert read_structure(None, {"json": json.dumps(PERSON)}) == schema_of(PERSON)
    assert read_structure(None, {"json": PERSON, "disable_any_whitespace": True}) == schema_of(PERSON, compact=True)
    assert read_structure({"type": "text"}, {"regex": "a", "choice": None}) == Structure("regex", "a")
    assert read_structure(None, {"choice": ["a", "b", "a"]}) == Structure("lark", 'start: "a" | "b"')
    assert read_structure(None, Structure("lark", "start: /a/")) == Structure("lark", "start: /a/")


@pytest.mark.parametrize(
    ("response_format", "structured_outputs", "words"),
    [
        ("json", None, "must be an object with a type"),
        ({"type": "yaml"}, None, "unknown type of response_format 'yaml'"),
        ({"type": "json_schema"}, None, "has no schema"),
        ({"type": "json_schema", "json_schema": {"schema": None}}, None, "has no schema"),
        ({"type": "json_schema", "json_schema": []}, None, "json_schema of response_format is .*must be an object"),
        ({"type": "json_object", "schema": {"type": "array"}}, None, "has the type 'array', it must be object"),
        ({"type": "json_object", "schema": False}, None, "has the type False, it must be object"),
        ({"type": "json_object", "pattern": "a"}, None, "unknown field 'pattern' of response_format"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "grammar": "a"}}, None, "'grammar' of json_schema"),
        ({"type": "text", "json_schema": {"schema": {}}}, None, "type text has a schema"),
        ({"type": "json_schema", "json_schema": {"schema": 3}}, None, "must be an object"),
        ({"type": "json_object"}, {"regex": "a"}, "give one of them"),
        (None, "regex", "must be an object with one of"),
        (None, {}, "must have one of json"),
        (None, {"regex": "a", "choice": ["b"]}, "must have one of json"),
        (None, {"regexp": "a"}, "did you mean 'regex'"),
        (None, {"grammar": ""}, "must be a non-empty string"),
        (None, {"choice": ["a", ""]}, "must be a list of non-empty strings"),
        (None, {"json": "{"}, "not valid JSON"),
        (None, {"json": {"const": float("nan")}}, "plain JSON"),
        (None, {"json": "[" * 5000}, "JSON"),
        (None, {"json": {"description": "x" * 70000}}, "at most 65536 are allowed"),
        (None, {"regex": "x" * 70000}, "at most 65536"),
    ],
)
def test_an_invalid_structure_is_refused(response_format: Any, structured_outputs: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_structure(response_format, structured_outputs)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (schema_of({"not": {"type": "null"}}), "'not'"),
        (schema_of({"properties": {"a": {"anyOf": [{"uniqueItem": True}]}}}), "'uniqueItem'"),
        (schema_of({"x-guidance": {"lenient": True}}), "'x-guidance'"),
        (schema_of({"version": {"a": {}}, "$ref": "#/version/a"}), "cannot be enforced"),  # its limits are unknown
        *((schema_of({name: 1}), f"'{name}'") for name in MISSPELT),
        (schema_of({"type": "zzz"}), "type of the JSON schema is 'zzz', it must be one or several of"),
        (schema_of(False), "allows no value"),
        (schema_of({"items": 3}), "where a schema must be"),
        (schema_of({"type": "string", "pattern": "a(?=b)b"}), "look-ahead and look-behind, is not supported"),
        (schema_of({"properties": {f"p{n}": {} for n in range(1001)}}), "more than 1000 properties"),
        (schema_of(nested(schema.MAX_DEPTH + 1)), "deeper than 64 levels"),
        (Structure("regex", "("), "regex"),
        (Structure("regex", ""), "no text but the empty one"),
        (Structure("lark", "start: a"), "line 1, column 8: unknown name"),
        (Structure("lark", '{"grammars": []}'), "cannot be enforced"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(asked: Structure, words: str, grammars: Grammars) -> None:
    with pytest.raises(UserError) as raised:
        grammars.compile(asked)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 1000


def test_the_number_of_unknown_keywords_is_bounded() -> None:
    """Each is compared with all that have a meaning, so a flood of them would take the server's time."""
    names = [f"zq{number:06d}" for number in range(schema.MAX_UNKNOWN + 1)]
    allowed = dict.fromkeys(names[1:], 1)
    schema.enforceable({"type": "array", "items": allowed, **allowed})  # the same ones twice
    with pytest.raises(UserError, match="more than 200 different unknown keywords"):
        schema.enforceable(dict.fromkeys(names, 1))


@pytest.mark.parametrize("note", ["version", "self", "readonly", "_format", "_uniqueItems", "x-prompt", "@type"])
def test_a_keyword_without_a_meaning_is_an_annotation(note: str, grammars: Grammars) -> None:
    """Annotations change nothing, as in every validator; a property of the same name is a property."""
    inner = {"type": "integer", note: {"not": {}}}
    noted = {**PERSON, note: "1.0", "properties": {**PERSON["properties"], note: {"items": inner, note: 1, **inner}}}
    plain = {**PERSON, "properties": {**PERSON["properties"], note: {"items": {"type": "integer"}, "type": "integer"}}}
    assert schema.enforceable(noted) == plain
    compiled = [grammars.compile(schema_of(one)) for one in (noted, plain)]
    assert [matcher.is_error() for matcher in compiled] == [False, False]


def test_values_and_property_names_are_kept() -> None:
    """Values that are listed are not schemas, and property names are not keywords."""
    kept = {"enum": [{"version": 1}], "const": {"self": 1}, "properties": {"not": {}, "name": {}}}
    assert schema.enforceable(kept) == kept
    assert schema.enforceable(True) == {}


@pytest.mark.parametrize("is_busy", [True, False], ids=["it computes", "it waits"])
def test_a_grammar_that_takes_too_long_is_given_up(
    is_busy: bool, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave = threading.Event()

    def work(asked: Structure) -> object:
        while is_busy and not leave.is_set():
            pass
        return leave.wait(60)

    monkeypatch.setattr(compiler, "SECONDS", 0.05)
    monkeypatch.setattr(compiler, "BUSY", 1000 if is_busy else 2)
    grammars = Grammars(tokenizer)
    monkeypatch.setattr(grammars, "_matcher", work)
    with pytest.raises(UserError, match="seconds to compile"):
        grammars.compile(Structure("regex", "a"))
    leave.set()


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="a thread's processor time is not measured")
def test_a_busy_machine_does_not_make_a_grammar_too_slow(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time in which the compiler has no processor is not its own."""
    monkeypatch.setattr(compiler, "SECONDS", 0.1)
    monkeypatch.setattr(compiler, "BUSY", 1000)
    grammars = Grammars(tokenizer)
    monkeypatch.setattr(grammars, "_matcher", lambda asked: time.sleep(0.3) or "compiled")
    assert grammars.compile(Structure("regex", "a")) == "compiled"


def test_a_grammar_is_compiled_once_and_the_oldest_is_forgotten(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "KEPT", 2)
    grammars = Grammars(tokenizer)
    for pattern, expected in (("a", 1), ("a", 1), ("b", 2), ("a", 2), ("c", 3), ("a", 3), ("b", 4)):
        grammars.compile(Structure("regex", pattern))
        assert grammars.compiled == expected
    assert grammars.seconds > 0


def test_the_missing_package_is_named(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UserError, match=re.escape(install_command("grammar"))):
        Grammars(tokenizer).compile(Structure("regex", "a"))


def test_questions_do_not_move_the_text(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """Walkers step back from whatever they were asked, also where texts differ that share a constraint."""
    constraint = grammars.constraint(schema_of(PERSON), 1)
    answer = tokenizer.continuation('{"name": "Al", "kind": "a"}')
    text = [5]
    for place in range(len(answer)):
        for other in ([5], [5, *answer[: place // 2]], text):
            path = answer[len(other) - 1 :]
            assert constraint.allowed(other, [*path, 3]) == len(path)
            mask = constraint.mask(other, path[:1])
            assert mask is None or mask[path[1] if len(path) > 1 else path[0]] or len(path) == 1
        assert constraint.allowed(text, [answer[place]]) == 1
        text.append(answer[place])
    assert constraint.is_over(text, [])
    assert constraint.mask(text, []) is None
    assert constraint.forced(text, []) == []


def test_a_question_is_asked_once(grammars: Grammars, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafted path has the same answer once it is written; another text of its length has its own."""
    constraint = grammars.constraint(Structure("regex", "(ab|cd)f"), 1)
    asked: list[int] = []
    cursor = GrammarConstraint._cursor
    monkeypatch.setattr(GrammarConstraint, "_cursor", lambda own, text: asked.append(1) or cursor(own, text))
    one, end = tokenizer.continuation("ab"), tokenizer.continuation("f")
    text = [5]
    for _ in range(2):
        assert constraint.allowed(text, one) == len(one)
        assert not constraint.is_over(text, one)
    text += one
    assert not constraint.is_over(text, [])
    assert len(asked) == 2, "the path was written"
    assert constraint.is_over(text, end)
    assert not constraint.is_over(text, one[:1] * len(end))
    assert constraint.is_over([5, *tokenizer.continuation("cd")], end)
    assert constraint.allowed([5], end) == 0


def test_a_text_that_the_grammar_refuses_is_an_error(grammars: Grammars, tokenizer: Tokenizer) -> None:
    constraint = grammars.constraint(Structure("regex", "ab"), 0)
    with pytest.raises(UserError, match="refuses token"):
        constraint.mask(tokenizer.continuation("zz"), [])


def test_forced_text_is_proposed_as_it_is_cut(grammars: Grammars, tokenizer: Tokenizer) -> None:
    constraint = grammars.constraint(schema_of(PERSON, compact=True), 0)
    assert tokenizer.decode(constraint.forced([], [])) == '{"name": "'
    path = tokenizer.continuation('{"name": "Al"')
    assert tokenizer.decode(constraint.forced([], path)) == ', "kind": "'


@pytest.mark.parametrize(
    ("asked", "text", "count"),
    [
        (schema_of({"type": "integer"}), "-" + "1" * 30, 21),
        (schema_of({"type": "number"}), "1." + "3" * 30, 22),
        (schema_of({"type": "number"}), "1" * 19 + "." + "3" * 19 + "e" + "5" * 30, 60),
        (schema_of({"type": "number"}), "1" * 20 + ".5", 20),
        (schema_of({"type": "number"}), "1." + "3" * 20 + "e5", 22),
        (schema_of({"type": "array", "items": {"type": "integer"}}), "[1, " + "2" * 30, 24),
        (schema_of({"type": "string"}), '"' + "1" * 30 + '"', 32),
        (schema_of({"type": "string", "minLength": 30}), '"' + "1" * 30 + '"', 32),
        (schema_of({"type": "string", "pattern": "^[0-9]{30}$"}), '"' + "1" * 30 + '"', 32),
        (schema_of({"enum": [10**22]}), str(10**22), 23),
        (Structure("regex", "[0-9]+"), "1" * 30, 30),
    ],
)
def test_numbers_end_after_twenty_digits(
    asked: Structure, text: str, count: int, grammars: Grammars, tokenizer: Tokenizer
) -> None:
    """Unless no other text may follow; digits of strings and regexes are not limited."""
    constraint, answer, prompt = grammars.constraint(asked, 1), tokenizer.continuation(text), [5]
    allowed = constraint.allowed(prompt, answer)
    assert len(tokenizer.decode(answer[:allowed])) == count
    for place, token in enumerate(answer[: allowed + 1]):
        for mask in (constraint.mask(prompt, answer[:place]), constraint.mask([*prompt, *answer[:place]], [])):
            assert (mask is not None and bool(mask[token])) == (place < allowed)


def test_several_threads_ask_one_constraint(grammars: Grammars, tokenizer: Tokenizer) -> None:
    constraint = grammars.constraint(schema_of(PERSON), 0)
    answer = tokenizer.continuation('{"name": "Al", "kind": "a"}')
    wrong: list[int] = []

    def ask(first: int) -> None:
        for number in range(200):
            place = (first + number) % len(answer)
            if constraint.allowed(answer[:place], answer[place:]) != len(answer) - place:
                wrong.append(place)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(4)))
    assert not wrong


def test_a_constraint_stays_in_its_process(grammars: Grammars) -> None:
    constraint: Constraint = grammars.constraint(Structure("regex", "a"), 0)
    assert pickle.loads(pickle.dumps(constraint)) is None


def test_tokens_are_read_as_their_bytes(tokenizer: Tokenizer) -> None:
    vocabulary = Vocabulary(tokenizer)
    text = 'naïve {"Zürich": "日本"}\n'
    ids = tokenizer.continuation(text)
    assert b"".join(vocabulary.tokens[index] for index in ids).decode().lstrip() == text.lstrip()
    assert b"".join(vocabulary.tokens[index] for index in vocabulary(text)) in (text.encode(), b"")
    assert set(vocabulary.special_token_ids) >= tokenizer.special_ids
    assert set(vocabulary.stop_ids) == set(tokenizer.stop_ids) or vocabulary.stop_ids == [tokenizer.size]


def test_a_question_does_not_change_the_answer_to_another(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """Both paths end in white space behind as many parts of the grammar: the mask that llguidance keeps fits both."""
    asked = schema_of({"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]})
    text, first, second = (tokenizer.continuation(part) for part in ('{"a', '"\t:\r', '":null\r'))
    constraint = grammars.constraint(asked, 0)
    masks = [constraint.mask(text, first), constraint.mask(text, second)]
    masks.append(grammars.constraint(asked, 0).mask([*text, *second], []))
    before, after, alone = (mask.tolist() for mask in masks if mask is not None)
    assert after == alone != before


@pytest.mark.parametrize("pattern", ["(.|\n)*", "a*b?", "(ab|a|abab)*c?", "(a|b){2,5}", "[0-9]+(\\.[0-9]+)?"])
def test_whether_a_text_is_over_is_told_by_all_tokens(pattern: str, grammars: Grammars, tokenizer: Tokenizer) -> None:
    """One token that was allowed before is asked for first; the answer is that of the whole mask."""
    structure, draw = Structure("regex", pattern), random.Random(pattern)
    first, known = grammars.compile(structure), grammars.constraint(structure, 0)
    ends = known._ends
    for _ in range(20):
        matcher, text = first.deep_copy(), list[int]()
        while not matcher.is_stopped() and len(text) < 8:
            following = set(np.flatnonzero(unpacked(matcher.deep_copy().compute_bitmask())).tolist())
            is_over = matcher.is_accepting() and following <= ends
            assert known.is_over(text, []) == grammars.constraint(structure, 0).is_over(text, []) == is_over
            if not following - ends:
                break
            text.append(draw.choice(sorted(following - ends)))
            assert matcher.try_consume_tokens(text[-1:]) == 1
