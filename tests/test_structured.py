"""Structured output from the outside: the library and the command line on a tiny random model."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from commands import Run
from commands import run as run
from commands import tiny as tiny
from files import model_folder, smollm2_file
from judges import random_judge

import outpace
from outpace.core import registry
from outpace.core.errors import UserError
from outpace.engine.build import check_rule
from outpace.models.load import load_model

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "count"],
    "additionalProperties": False,
}
ASKED: dict[str, Any] = {
    "schema": {"json": SCHEMA, "disable_any_whitespace": True},
    "regex": {"regex": "[a-f]{3}-[0-9]{2}"},
    "choice": {"choice": ["yes", "perhaps", "no"]},
    "grammar": {"grammar": 'start: "(" /[a-z]{2}/ ")"'},
}
SAMPLINGS: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 4}, {"temperature": 1.0, "top_p": 0.9, "seed": 5}]


def is_valid(name: str, text: str) -> bool:
    if name == "schema":
        jsonschema.validate(json.loads(text), SCHEMA)
        return json.dumps(json.loads(text)) == text
    patterns = {"regex": r"[a-f]{3}-\d{2}", "choice": "yes|perhaps|no", "grammar": r"\([a-z]{2}\)"}
    return re.fullmatch(patterns[name], text) is not None


@pytest.mark.parametrize("every", [len(SAMPLINGS), pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("method", registry.names("decoders"))
def test_answers_are_valid_and_the_same_by_every_method(tiny_folder: str, method: str, every: int) -> None:
    """With all samplings, or with one of them, which alternate."""
    drafting = registry.find("decoders", method).drafting
    worker = "inline" if drafting == "parallel" else None
    with outpace.load(
        tiny_folder, "layers:0" if drafting else None, method=method, worker=worker, profile=False
    ) as llm:
        for number, (name, asked) in enumerate(ASKED.items()):
            for sampling in SAMPLINGS[number % every :: every]:
                plain = llm.chat("hello", structured_outputs=asked, max_tokens=60, plain=True, **sampling)
                result = llm.chat("hello", structured_outputs=asked, max_tokens=60, **sampling)
                assert result.tokens == plain.tokens or not registry.find("decoders", method).lossless
                assert result.finish_reason == plain.finish_reason == "stop"
                assert is_valid(name, result.text), result.text


@pytest.mark.parametrize("rule", registry.names("rules"))
def test_answers_are_valid_by_every_rule(tiny_folder: str, rule: str, tmp_path: Path) -> None:
    decoder = registry.find("decoders", "speculative")
    check_rule(rule, decoder, "model")
    first = registry.names("rules").index(rule) % len(ASKED)  # one of what is asked; the next rule takes the next one
    own = {"judge": str(random_judge(tmp_path, load_model(tiny_folder))), "threshold": 1.0} if rule == "judge" else {}
    with outpace.load(tiny_folder, "layers:0", method="speculative", rule=rule, profile=False, **own) as llm:
        for name, asked in list(ASKED.items())[first : first + 1]:
            for temperature in (0.0, 1.0):
                try:
                    result = llm.chat("hello", structured_outputs=asked, max_tokens=60, temperature=temperature)
                except UserError as error:
                    assert "does not work with temperature" in str(error)  # noqa: PT017
                    continue
                assert result.finish_reason == "stop"
                assert is_valid(name, result.text), result.text


def test_several_at_once_and_free_text(tiny_folder: str) -> None:
    with outpace.load(tiny_folder, profile=False) as llm:
        params = [outpace.SamplingParams(structured_outputs=asked, max_tokens=60) for asked in ASKED.values()]
        params.append(outpace.SamplingParams(max_tokens=20, ignore_eos=True))
        together = llm.generate(["hello"] * len(params), params)
        alone = [llm.generate("hello", each)[0] for each in params]
        assert [result.tokens for result in together] == [result.tokens for result in alone]
        assert len(llm.generate("hello", params[1], n=1)) == 1
        assert llm.grammars.compiled == len(ASKED)


def test_forced_text_is_drafted_unless_drafters_are_named(tiny_folder: str) -> None:
    asked = {"grammar": 'start: "the same words again and again, whatever the model would like: " /[a-z]/'}
    with outpace.load(tiny_folder, method="speculative", profile=False) as llm:
        assert list(llm.engine.drafting.drafters) == ["ngram", "grammar+ngram"]
        result = llm.chat("hello", structured_outputs=asked, max_tokens=200)
        assert result.figures.accepted > 0
    with outpace.load(tiny_folder, method="speculative", drafter="ngram", profile=False) as llm:
        assert list(llm.engine.drafting.drafters) == ["ngram"]
        assert llm.chat("hello", structured_outputs=asked, max_tokens=200).text == result.text
    with outpace.load(tiny_folder, "layers:0", method="speculative", rule="rejection", profile=False) as llm:
        assert list(llm.engine.drafting.drafters) == ["model"]


@pytest.mark.parametrize("rows", [272, 320, 400])
def test_rows_beyond_the_vocabulary_are_never_picked(tmp_path: Path, rows: int) -> None:
    """Models pad their output layer; a drafted or picked id of the padding must not end the grammar."""
    folder = str(model_folder(tmp_path, "padded", vocab_size=rows))
    with outpace.load(folder, dtype="float32", drafter="ngram") as llm:
        for number, asked in enumerate(({"json_object": True}, {"regex": "[a-z]{5}"}, {"choice": ["hello", "world"]})):
            for temperature in (0.0, 1.0, 100.0):
                given = {"structured_outputs": asked, "temperature": temperature, "seed": number, "max_tokens": 24}
                result, plain = (llm.chat("hello", plain=is_plain, **given) for is_plain in (False, True))
                assert result.tokens == plain.tokens
                assert max(result.tokens) < llm.tokenizer.size


def test_a_grammar_may_be_compiled_beforehand(tiny_folder: str) -> None:
    with outpace.load(tiny_folder, profile=False) as llm:
        llm.compile(outpace.SamplingParams())
        llm.compile(outpace.SamplingParams(structured_outputs=ASKED["regex"]))
        assert llm.grammars.compiled == 1
        with pytest.raises(UserError, match="'not'"):
            llm.compile(
                outpace.SamplingParams(response_format={"type": "json_schema", "schema": {"not": {"const": 1}}})
            )


def test_options_that_allow_no_token_are_an_error(tiny_folder: str) -> None:
    with outpace.load(tiny_folder, profile=False) as llm:
        bias = dict.fromkeys(range(llm.tokenizer.size), -100.0)
        assert is_valid("choice", llm.chat("hello", structured_outputs=ASKED["choice"], logit_bias=bias).text)
        words = [chr(code) for code in range(33, 127)]
        with pytest.raises(UserError, match="no token may follow the first 0"):
            llm.chat("hello", structured_outputs={"regex": "[a-z]"}, bad_words=words)


def test_special_tokens_are_shown_on_request(tiny_folder: str) -> None:
    with outpace.load(tiny_folder, profile=False) as llm:
        special = min(llm.tokenizer.special_ids)
        bias = {"logit_bias": {special: 100.0}, "max_tokens": 2, "ignore_eos": True}
        assert llm.generate("hello", **bias)[0].text == ""
        name = llm.tokenizer.decode([special], skip_special=False)
        assert llm.generate("hello", skip_special_tokens=False, **bias)[0].text == name * 2


@pytest.fixture
def generate(run: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `outpace generate` in a folder with a schema and a grammar; return exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    (tmp_path / "sum.lark").write_text('start: /[0-9]/ "+" /[0-9]/')
    return partial(run, "generate", "hello", "--raw", "--target", str(tiny))


def test_the_command_line_reads_schemas_regexes_and_grammars(generate: Run) -> None:
    flags = (("--json-schema", "schema.json"), ("--regex", "[a-c]{5}"), ("--grammar", "sum.lark"))
    texts = [json.loads(generate(*words, "--json")[1])["text"] for words in flags]
    jsonschema.validate(json.loads(texts[0]), SCHEMA)
    assert re.fullmatch("[a-c]{5}", texts[1])
    assert re.fullmatch(r"\d\+\d", texts[2])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--json-schema", "gone.json"], "gone.json, which cannot be read"),
        (["--json-schema", "sum.lark"], "not valid JSON"),
        (["--json-schema", "schema.json", "--regex", "a"], "give one of them"),
        (["--regex", "("], "the regex cannot be enforced"),
        (["--grammar", "schema.json"], "the grammar cannot be enforced"),
        (["--regex", ""], "must be a non-empty string"),
    ],
)
def test_errors_of_structure_flags(generate: Run, arguments: list[str], words: str) -> None:
    code, out, err = generate(*arguments)
    assert (code, out, words in " ".join(err.split())) == (2, "", True), err


@pytest.mark.smollm2
@pytest.mark.parametrize("samplings", [SAMPLINGS[1:2], pytest.param(SAMPLINGS, marks=pytest.mark.long)])
def test_the_shipped_pair_writes_the_same_json(samplings: list[dict[str, Any]]) -> None:
    smollm2_file()
    with outpace.load(profile=False) as llm:
        for sampling in samplings:
            asked = {"structured_outputs": {"json": SCHEMA}, "max_tokens": 80, **sampling}
            plain, result = (llm.chat("A green thing.", plain=is_plain, **asked) for is_plain in (True, False))
            assert result.tokens == plain.tokens
            if plain.finish_reason == "stop":
                jsonschema.validate(json.loads(plain.text), SCHEMA)
