"""What cannot be asked of an answer is refused in one sentence, and leaves nothing behind."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
from test_library import folder

import outpace
from outpace.api.llm import LLM
from outpace.api.params import Asking
from outpace.models.load import Loaded, load_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load_model(folder(tmp_path_factory.mktemp("asking"), "target"))


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
        ({"logprobs_mode": "processed"}, "logprobs_mode says nothing without logprobs"),
        ({"logitbias": {}}, "unknown option 'logitbias' of an answer.*did you mean 'logit_bias'"),
        ({"asking": Asking(), "seed": 1}, "give an Asking or options by name, not both: seed"),
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
