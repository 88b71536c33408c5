"""Sampling parameters: their names, old and new, and what is refused in one sentence and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from test_library import folder

import outpace
from outpace.api.llm import LLM
from outpace.api.params import SamplingParams
from outpace.models.load import Loaded, load_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load_model(folder(tmp_path_factory.mktemp("params"), "target"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0, it must be between 0.01 and 100"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5, it must be between -2 and 2"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan"),
        ({"logit_bias": {999_999: 1.0}}, "a token of logit_bias is 999999, it must be between 0 and 271"),
        ({"logit_bias": {-1: 1.0}}, "a token of logit_bias is -1"),
        ({"logit_bias": {"x": 1.0}}, "a token of logit_bias is 'x', it must be a whole number"),
        ({"logit_bias": {1.5: 1.0}}, "a token of logit_bias is 1.5, it must be a whole number"),
        ({"logit_bias": {True: 1.0}}, "a token of logit_bias is True"),
        ({"logit_bias": {float("inf"): 1.0}}, "a token of logit_bias is inf"),
        ({"logit_bias": {5: 1.0, "5": 2.0}}, "logit_bias names a token twice"),
        ({"logit_bias": {3: 101}}, "logit_bias of token 3 is 101, it must be between -100 and 100"),
        ({"logit_bias": [3]}, r"logit_bias is \[3\], it must map token ids to numbers"),
        ({"allowed_token_ids": []}, "allowed_token_ids has no token, at least one is needed"),
        ({"allowed_token_ids": 5}, "allowed_token_ids is 5, it must be a list of token ids"),
        ({"allowed_token_ids": [999_999]}, "a token of allowed_token_ids is 999999, it must be between 0 and 271"),
        ({"allowed_token_ids": [5], "bad_words": ["a"]}, "allowed_token_ids and bad_words may leave nothing to write"),
        ({"stop": ""}, "stop has an empty string"),
        ({"stop": ["a", ""]}, "stop has an empty string"),
        ({"stop": [3]}, r"stop is \[3\], it must be a list of strings"),
        ({"bad_words": "hello"}, "bad_words is 'hello', it must be a list of strings"),
        ({"bad_words": [""]}, "bad_words has an empty string"),
        ({"min_tokens": 30, "max_tokens": 20}, "min_tokens is 30, it must be at most max_tokens 20"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"logprobs": True}, "logprobs is True"),
        ({"logprobs": 2000}, "logprobs is 2000, it must be between 0 and 1024"),
        ({"logprobs_mode": "cooked", "logprobs": 1}, "logprobs_mode is 'cooked', it must be raw or processed"),
        ({"logprobs_mode": "processed"}, "logprobs_mode has no effect without logprobs"),
        ({"stop_token_ids": [1.5]}, "a token of stop_token_ids is 1.5, it must be a whole number"),
        ({"stop_token_ids": [999_999]}, "a token of stop_token_ids is 999999, it must be between 0 and 271"),
        ({"n": 2, "temperature": 1.0}, "n is 2, this gives one answer: use generate"),
        ({"sampling_params": 5}, "sampling_params is 5, it must be SamplingParams; or give options by name"),
        ({"logitbias": {}}, "unknown sampling parameter 'logitbias'.*did you mean 'logit_bias'"),
        ({"sampling_params": SamplingParams(), "seed": 1}, "give SamplingParams or options by name, not both: seed"),
    ],
    ids=str,
)
def test_what_cannot_be_asked_is_named(tiny: Loaded, options: dict[str, Any], says: str) -> None:
    with closing(LLM(tiny, method="autoregressive")) as llm:
        with pytest.raises(outpace.UserError, match=says):
            llm.stream("hello", **options)
        assert not llm.engine.waiting


@pytest.mark.parametrize(("n", "options"), [(0, {"temperature": 1.0}), (2, {}), (1025, {"temperature": 1.0})])
def test_a_number_of_answers_that_makes_no_sense_is_refused(tiny: Loaded, n: int, options: dict[str, Any]) -> None:
    with closing(LLM(tiny, method="autoregressive")) as llm:
        with pytest.raises(outpace.UserError, match=rf"n is {n}, "):
            llm.generate(["hello"], n=n, **options)
        assert not llm.engine.waiting


@pytest.fixture
def llm(tiny: Loaded) -> Iterator[LLM]:
    with closing(LLM(tiny, method="autoregressive")) as made:
        yield made


def test_parameters_as_a_record_by_position_by_name_or_one_by_one(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=3)
    once = llm.generate(["hello"], params)[0]
    assert llm.generate(["hello"], sampling_params=params)[0].tokens == once.tokens
    assert llm.generate(["hello"], max_tokens=6, temperature=1.0, seed=3)[0].tokens == once.tokens
    assert llm.stream("hello", params).finish().tokens == once.tokens


def test_n_is_a_parameter(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, temperature=1.0, n=3)
    results = llm.generate(["hello", "12"], params)
    assert [result.choice for result in results] == [0, 1, 2, 0, 1, 2]
    assert len({result.tokens for result in results[:3]}) == 3
    assert len(llm.generate(["hello"], params, n=2)) == 2


def test_stop_token_ids_end_the_text_and_are_not_in_it(llm: LLM) -> None:
    asked: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    whole = llm.stream("hello", **asked).finish()
    place = next(n for n in range(3, 12) if whole.tokens[n] not in whole.tokens[:n] and _text(llm, whole.tokens[n]))
    asked["stop_token_ids"] = [whole.tokens[place]]
    cut, with_it = (llm.stream("hello", include_stop_str_in_output=i, **asked).finish() for i in (False, True))
    assert cut.tokens == with_it.tokens == whole.tokens[: place + 1]
    assert (cut.finish_reason, with_it.finish_reason) == ("stop", "stop")
    assert with_it.text == cut.text + _text(llm, whole.tokens[place])
    assert len(llm.stream("hello", min_tokens=place + 1, **asked).finish().tokens) > place + 1


def _text(llm: LLM, token: int) -> str:
    text = llm.tokenizer.decode([token])
    return "" if "\ufffd" in text else text


def test_what_others_write_for_nothing_is_taken() -> None:
    params = SamplingParams(stop=None, bad_words=None, stop_token_ids=None, logit_bias=None, top_k=-1)
    assert params == SamplingParams()


def test_what_is_given_is_not_edited_behind_the_parameters_back() -> None:
    given: dict[str, Any] = {"stop": ["a"], "bad_words": ["b"], "stop_token_ids": [1], "logit_bias": {1: 1.0}}
    params = SamplingParams(**given)
    before = repr(params)
    for values in given.values():
        values.clear()
    assert repr(params) == before
