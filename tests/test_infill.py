"""Fill-in-the-middle: each family's prompts, `LLM.infill`, `suffix` in completions, and llama.cpp's `/infill`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from files import MERGES, tokens, write_gguf
from serving import Served, served
from test_tokenizer import BYTES, WORDS, sentence_piece
from turns import in_turn

import outpace
from outpace.api.prompts import infill_prompt
from outpace.core.errors import UserError
from outpace.models.load import load_model
from outpace.models.text.tokenizer import Tokenizer

QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]
STARCODER = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>", "<repo_name>", "<file_sep>"]
DEEPSEEK = ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"]
FREE = {"temperature": 0, "ignore_eos": True}


def file_with(where: Path, marks: list[str], kind: int = 3, **named: int) -> Path:
    """Write a tiny model whose vocabulary ends with these infill tokens."""
    words = [*tokens()[: 272 - len(marks)], *marks]
    types = [3] * 3 + [1] * (269 - len(marks)) + [kind] * len(marks)
    fields: dict[str, Any] = {"tokens": words, "merges": list(MERGES[:3]), "token_type": types, **named}
    return write_gguf(where / "a.gguf", {f"tokenizer.ggml.{name}": value for name, value in fields.items()})


def shown(tokenizer: Tokenizer, *parts: Any, **options: Any) -> str:
    """Return an infill prompt as text."""
    return tokenizer.decode(infill_prompt(tokenizer, *parts, **options), skip_special=False)


@pytest.mark.parametrize("kind", [3, 4])
@pytest.mark.parametrize("marks", [QWEN, STARCODER, DEEPSEEK])
def test_prompts_of_families(tmp_path: Path, marks: list[str], kind: int) -> None:
    tokenizer = load_model(file_with(tmp_path, marks, kind), runtime="llama").tokenizer
    prefix, suffix, middle = marks[:3]
    assert shown(tokenizer, "a", "b") == f"{prefix}a{suffix}b{middle}"
    files = [("x.py", "c"), ("y.py", "d\n")]
    if marks is DEEPSEEK:
        snippet = "\n\n--- snippet ---\n\n"
        assert shown(tokenizer, "a", "b", files) == f"{snippet}c{snippet}d\n{prefix}a{suffix}b{middle}"
    else:
        repository, file = marks[4:]
        others = f"{repository}myproject\n{file}x.py\nc{file}y.py\nd\n{file}filename\n"
        assert shown(tokenizer, "a", "b", files) == f"{others}{prefix}a{suffix}b{middle}"
    assert set(infill_prompt(tokenizer, "", "")) <= tokenizer.stop_ids


def test_infill_tokens_written_in_a_text_stay_text(tmp_path: Path) -> None:
    tokenizer = load_model(file_with(tmp_path, QWEN), runtime="llama").tokenizer
    code = "x = '<|fim_suffix|><|endoftext|><|fim_' + '|im_end|>'"
    prompt = infill_prompt(tokenizer, code, code)
    marks = tokenizer.infill_tokens
    assert marks is not None
    assert [token for token in prompt if token in tokenizer.special_ids] == [marks.prefix, marks.suffix, marks.middle]
    assert shown(tokenizer, code, code) == f"{QWEN[0]}{code}{QWEN[1]}{code}{QWEN[2]}"


def test_infill_tokens_named_by_the_metadata(tmp_path: Path) -> None:
    named = {"fim_pre_token_id": 269, "suffix_token_id": 270, "fim_mid_token_id": 271}
    tokenizer = load_model(file_with(tmp_path, ["<x>", "<y>", "<z>"], **named), runtime="llama").tokenizer
    assert infill_prompt(tokenizer, "a", "b")[::2] == [269, 270, 271]


def test_code_llama(tmp_path: Path) -> None:
    """The suffix has no space before it, and a begin-of-text token begins the prompt."""
    words = ["<unk>", "<s>", "</s>", *BYTES, *WORDS, "▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"]
    words = words[:272]
    words[-4:] = ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"]
    scores = [float(len(word)) if word in WORDS else 0.0 for word in words]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(words) - 259)]
    path = sentence_piece(tmp_path / "sp.gguf", tokens=words, scores=scores, token_type=types)
    tokenizer = load_model(path, runtime="llama").tokenizer
    pre, suf, mid, eot = range(len(words) - 4, len(words))
    a, spaced = words.index("a"), words.index("▁a")
    assert infill_prompt(tokenizer, "a", "a") == [1, pre, spaced, suf, a, mid]
    assert infill_prompt(tokenizer, "a", "\na") == [1, pre, spaced, suf, 3 + 10, a, mid]
    assert {eot, 2} <= tokenizer.stop_ids


def test_parts_far_from_the_cursor_are_left_out(tmp_path: Path) -> None:
    tokenizer = load_model(file_with(tmp_path, QWEN), runtime="llama").tokenizer
    prefix, suffix = "p" * 40 + "12", "34" + "s" * 40
    for max_tokens in (100, 60, 30, 12, 3, 1):
        prompt = infill_prompt(tokenizer, prefix, suffix, [("x", "y" * 50)], max_tokens=max_tokens)
        assert len(prompt) <= max(max_tokens, 3)
        text = tokenizer.decode(prompt, skip_special=False)
        before, after = re.fullmatch(r".*<\|fim_prefix\|>(.*)<\|fim_suffix\|>(.*)<\|fim_middle\|>", text, re.S).groups()  # type: ignore[union-attr]
        assert prefix.endswith(before)
        assert suffix.startswith(after)
        if max_tokens >= 12:
            assert len(prompt) == max_tokens
            assert "34" in after
            assert "12" in before
    short = infill_prompt(tokenizer, "p" * 50, "s", max_tokens=30)
    assert tokenizer.decode(short) == "p" * 26 + "s"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = file_with(tmp_path_factory.mktemp("infill"), QWEN)
    with outpace.load(str(path), "layers:0") as llm, served(llm) as site:
        yield site


@pytest.mark.parametrize(("temperature", "speculation"), in_turn((0.0, 0.9), (True, False)))
def test_completions_fill_in_before_a_suffix(site: Served, temperature: float, speculation: bool) -> None:
    options = {"max_tokens": 20, "temperature": temperature, "seed": 4, "ignore_eos": True}
    expected = site.llm.infill("hello", " 12", plain=True, **options)
    asked = {**options, "suffix": " 12", "outpace": {"speculation": speculation}, "echo": True}
    assert site.complete("hello", **asked).choice["text"] == "hello" + expected.text
    ids = site.llm.tokenizer.encode("hello")
    found = site.complete([ids, ids], **asked).json
    assert [choice["text"] for choice in found["choices"]] == ["hello" + expected.text] * 2
    assert found["usage"]["prompt_tokens"] == 2 * len(infill_prompt(site.llm.tokenizer, "hello", " 12"))
    assert site.complete("hello", **{**asked, "suffix": ""}).choice["text"] != "hello" + expected.text
    assert site.complete("hello", **asked, logprobs=1).error["param"] == "suffix"


def test_a_file_without_a_name_has_llama_cpp_s(site: Served) -> None:
    asked = {"input_prefix": "hello", "input_suffix": "12", "n_predict": 4, "temperature": 0}
    bodies = [
        {**asked, "input_extra": [{"text": "34", **name}]} for name in ({}, {"filename": None}, {"filename": "tmp"})
    ]
    found = [site.ask("/infill", body).json for body in bodies]
    assert len({(one["content"], one["tokens_evaluated"]) for one in found}) == 1


@pytest.mark.parametrize(("temperature", "speculation"), in_turn((0.0, 0.9), (True, False)))
def test_infill_as_in_llama_cpp(site: Served, temperature: float, speculation: bool) -> None:
    files = [("x.py", "12")]
    parts = {"input_prefix": "hel", "prompt": "lo", "input_suffix": " 12"}
    parts["input_extra"] = [{"filename": name, "text": text} for name, text in files]
    asked = {**parts, "temperature": temperature, "seed": 4, "n_predict": 20, "ignore_eos": True, "cache_prompt": True}
    asked |= {
        "samplers": ["temperature"],
        "outpace": {"speculation": speculation},
        "t_max_predict_ms": 500,
        "n_indent": 4,
    }
    options = {"max_tokens": 20, "temperature": temperature, "seed": 4, "ignore_eos": True}
    expected = site.llm.infill("hello", " 12", files=files, plain=True, **options)
    whole = site.ask("/infill", asked).json
    assert whole["content"] == expected.text
    assert (whole["stop"], whole["stop_type"], whole["tokens_predicted"]) == (True, "limit", 20)
    assert whole["tokens_evaluated"] == expected.prompt_tokens
    assert whole["tokens"] == list(expected.tokens)
    stream = site.ask("/infill", {**asked, "stream": True})
    events = [json.loads(data) for data in re.findall("^data: (.*)$", stream.body.decode(), re.MULTILINE)]
    assert "".join(event["content"] for event in events) == expected.text
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["timings"]["predicted_n"] == 20
    fields = ["content", "timings/prompt_n", "timings/nothing", "stop_type/x", "truncated"]
    some = site.ask("/infill", {**asked, "response_fields": fields}).json
    assert set(some) == {"content", "timings/prompt_n", "truncated"}
    stopped = site.ask("/infill", {**asked, "stop": [expected.text[3:5]]}).json
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", expected.text[3:5])
    assert stopped["content"] == expected.text[: expected.text.find(expected.text[3:5])]


def test_infill_prompts_fit_the_context(site: Served) -> None:
    parts = {"input_prefix": "hello" * 100, "input_suffix": "12" * 100}
    for predict in (0, 5, -1, None):
        found = site.ask("/infill", {**parts, "n_predict": predict}).json
        most = 128 if predict in (-1, None) else predict
        assert found["tokens_predicted"] <= most
        assert found["tokens_evaluated"] <= 128 - max(predict or 0, 1)
        assert (found["content"] == "") >= (predict == 0)
    same = {**parts, "n_predict": 9, "seed": -1, "temperature": 2.0, "samplers": ["temperature"], "ignore_eos": True}
    assert len({site.ask("/infill", same).json["content"] for _ in range(4)}) > 1


def test_models_without_infill_tokens_are_refused(tiny_folder: str) -> None:
    with outpace.load(tiny_folder) as llm, served(llm) as site:
        with pytest.raises(UserError, match=r"no fill-in-the-middle tokens, such as <\|fim_prefix\|>"):
            llm.infill("a", "b")
        answers = site.complete("a", suffix="b"), site.ask("/infill", {"input_prefix": "a", "input_suffix": "b"})
        for found in answers:
            assert (found.status, found.error["code"]) == (400, "infill_not_supported")
            assert found.error["message"].startswith(f"{llm.target.name}: this model has no fill-in-the-middle tokens")
        assert site.complete("a", suffix="", max_tokens=2).status == 200
        assert site.ask("/infill", {"input_prefix": "a"}).error["param"] == "input_suffix"


@pytest.mark.parametrize("skip", [True, False])
def test_an_answer_ends_at_tokens_that_separate_texts(site: Served, skip: bool) -> None:
    """Text after the end of a document or turn, or after a fill-in-the-middle mark, is not part of the answer."""
    tokenizer = site.llm.tokenizer
    for mark in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *QWEN):
        bias = {tokenizer.id_of(mark): 100.0}
        found = site.llm.generate("hello", max_tokens=9, logit_bias=bias, skip_special_tokens=skip)[0]
        assert (found.text, len(found.tokens), found.finish_reason) == ("", 1, "stop")
