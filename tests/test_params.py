"""What may be asked: prompts, sampling parameters, and numbers of numpy and torch; what is refused in one sentence."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_library import CHAT

import outpace
from outpace.api.llm import LLM
from outpace.api.params import SamplingParams
from outpace.api.prompts import ROLES, tokens_of

IDS = [40, 41, 42]


@pytest.fixture(scope="module")
def llm(tiny_folder: str) -> Iterator[LLM]:
    with closing(LLM(tiny_folder, method="autoregressive")) as made:
        yield made


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0, it must be between 0.01 and 100"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5, it must be between -2 and 2"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan"),
        ({"logit_bias": {999_999: 1.0}}, "a token of logit_bias is 999999, it must be between 0 and 271"),
        ({"logit_bias": {"x": 1.0}}, "a token of logit_bias is 'x', it must be a whole number"),
        ({"logit_bias": {1.5: 1.0}}, "a token of logit_bias is 1.5, it must be a whole number"),
        ({"logit_bias": {5: 1.0, "5": 2.0}}, "logit_bias names a token twice"),
        ({"logit_bias": {3: 101}}, "logit_bias of token 3 is 101, it must be between -100 and 100"),
        ({"logit_bias": [3]}, r"logit_bias is \[3\], it must map token ids to numbers"),
        ({"allowed_token_ids": []}, "allowed_token_ids has no token, at least one is needed"),
        ({"allowed_token_ids": [5], "bad_words": ["a"]}, "allowed_token_ids and bad_words may leave nothing to write"),
        ({"stop": ""}, "stop has an empty string"),
        ({"stop": [3]}, r"stop is \[3\], it must be a list of strings"),
        ({"bad_words": "hello"}, "bad_words is 'hello', it must be a list of strings"),
        ({"min_tokens": 30, "max_tokens": 20}, "min_tokens is 30, it must be at most max_tokens 20"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"logprobs": 2000}, "logprobs is 2000, it must be between 0 and 1024"),
        ({"logprobs_mode": "cooked", "logprobs": 1}, "logprobs_mode is 'cooked', it must be raw or processed"),
        ({"logprobs_mode": "processed"}, "logprobs_mode has no effect without logprobs"),
        ({"stop_token_ids": [1.5]}, "a token of stop_token_ids is 1.5, it must be a whole number"),
        ({"stop_token_ids": [999_999]}, "a token of stop_token_ids is 999999, it must be between 0 and 271"),
        ({"n": 2, "temperature": 1.0}, "n is 2, this gives one answer: use generate"),
        ({"sampling_params": 5}, "sampling_params is 5, it must be SamplingParams; or give options by name"),
        ({"logitbias": {}}, "unknown sampling parameter 'logitbias'.*did you mean 'logit_bias'"),
        ({"sampling_params": SamplingParams(), "seed": 1}, "give SamplingParams or options by name, not both: seed"),
        ({"temperature": -1.0}, "temperature is -1.0, it must be between 0 and 100"),
        ({"temperature": "hot"}, "temperature is 'hot', it must be a number, between 0 and 100"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_k": 2.5}, "top_k is 2.5, it must be a whole number"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"seed": 2**63}, "seed is 9223372036854775808, it must be between 0 and 9223372036854775807"),
        ({"max_tokens": np.array([3])}, r"max_tokens is \[3\], it must be a whole number"),
        ({"ignore_eos": "yes"}, "ignore_eos is 'yes', it must be True or False"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5, it must be a list of token ids"),
        ({"choice": -1}, "choice is -1, it must be at least 0"),
    ],
    ids=str,
)
def test_an_invalid_parameter_is_named(llm: LLM, options: dict[str, Any], says: str) -> None:
    with pytest.raises(outpace.UserError, match=says):
        llm.chat("hello", **options)
    assert not llm.engine.waiting


@pytest.mark.parametrize(("n", "options"), [(0, {"temperature": 1.0}), (2, {}), (1025, {"temperature": 1.0})])
def test_an_invalid_number_of_answers_is_refused(llm: LLM, n: int, options: dict[str, Any]) -> None:
    with pytest.raises(outpace.UserError, match=rf"n is {n}, "):
        llm.generate(["hello"], n=n, **options)
    assert not llm.engine.waiting


def test_parameters_as_an_object_or_by_name(llm: LLM) -> None:
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


def test_none_and_minus_one_mean_the_default() -> None:
    params = SamplingParams(stop=None, bad_words=None, stop_token_ids=None, logit_bias=None, top_k=-1)
    assert params == SamplingParams()


def test_parameters_are_copies_of_the_given_lists() -> None:
    given: dict[str, Any] = {"stop": ["a"], "bad_words": ["b"], "stop_token_ids": [1], "logit_bias": {1: 1.0}}
    params = SamplingParams(**given)
    before = repr(params)
    for values in given.values():
        values.clear()
    assert repr(params) == before


@pytest.mark.parametrize(
    "prompt",
    [
        *(5, None, b"hello", bytearray(b"hello"), {40, 41}, CHAT[0], [*CHAT, 5], ["hello", "world"]),
        *([1.5, 2.0], [True, False], np.array([1.5]), torch.tensor([True]), np.array([IDS, IDS])),
    ],
    ids=repr,
)
def test_an_invalid_prompt_is_refused(llm: LLM, prompt: Any) -> None:
    says = r"^the prompt is .*, it must be text or a list of chat messages or"
    with pytest.raises(outpace.UserError, match=says):
        llm.stream(prompt, max_tokens=2)
    assert not llm.engine.waiting


@pytest.mark.parametrize("prompts", [5, None, b"hello", {"hello"}, CHAT[0], 1.5], ids=str)
def test_an_invalid_list_of_prompts_is_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(outpace.UserError, match=r"^prompts is .*, it must be a prompt or a list of prompts"):
        llm.generate(prompts, max_tokens=2)


def test_a_long_prompt_that_is_refused_is_not_printed_whole(llm: LLM) -> None:
    with pytest.raises(outpace.UserError) as raised:
        llm.stream([0.5] * 100_000)
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize(
    "ids",
    [
        *(tuple(IDS), range(40, 43), array("i", IDS), np.array(IDS), np.array(IDS, np.uint8), torch.tensor(IDS)),
        [np.int64(40), torch.tensor(41), 42],
    ],
    ids=lambda ids: type(ids).__name__,
)
def test_token_ids_of_every_type(llm: LLM, ids: Any) -> None:
    expected = llm.stream(IDS, max_tokens=4).finish()
    assert expected.prompt_tokens == 3
    assert llm.stream(ids, max_tokens=4).finish().tokens == expected.tokens
    (one,) = llm.generate(ids, max_tokens=4)
    assert one.tokens == expected.tokens


def test_one_prompt_of_each_kind_or_a_list_of_them(llm: LLM) -> None:
    alone = [llm.stream(prompt, max_tokens=4).finish().tokens for prompt in ("hello", CHAT, IDS)]
    for prompt, tokens in zip(("hello", CHAT, IDS), alone, strict=True):
        assert [result.tokens for result in llm.generate(prompt, max_tokens=4)] == [tokens]
        assert [result.tokens for result in llm.generate([prompt], max_tokens=4)] == [tokens]
    assert [result.tokens for result in llm.generate(("hello", CHAT, IDS), max_tokens=4)] == alone
    assert [result.tokens for result in llm.generate(iter(["hello", CHAT]), max_tokens=4)] == alone[:2]
    assert [result.tokens for result in llm.generate(torch.tensor([IDS, IDS]), max_tokens=4)] == [alone[2]] * 2
    assert llm.generate([], max_tokens=4) == []


def test_one_object_for_all_prompts_or_one_for_each(llm: LLM) -> None:
    each = [SamplingParams(max_tokens=2), SamplingParams(max_tokens=3, temperature=1.0, n=2)]
    assert [len(result.tokens) for result in llm.generate(["hello", "12"], each)] == [2, 3, 3]
    assert [len(result.tokens) for result in llm.generate(["hello", "12"], each[0])] == [2, 2]
    with pytest.raises(outpace.UserError, match="there are 2 sampling_params for 1 prompts"):
        llm.generate("hello", each)
    assert not llm.engine.waiting


def test_an_unknown_role_is_refused(llm: LLM) -> None:
    for role, says in (("usr", "'usr'.*did you mean 'user'"), ("", "''"), (7, "'7'")):
        for ask in (llm.chat, llm.generate):
            with pytest.raises(outpace.UserError, match=f"unknown role {says}"):
                ask([{"role": role, "content": "hello"}], max_tokens=2)
    for role in ROLES:
        assert llm.chat([{"role": role, "content": "hello"}], max_tokens=2).tokens


def test_a_role_of_the_template_is_known() -> None:
    tokenizer = SimpleNamespace(template_text="{% if m.role == 'ipython' %}...", chat=lambda messages: [len(messages)])
    assert tokens_of([{"role": "ipython", "content": "7"}], tokenizer) == [1]


def test_a_text_is_a_conversations_first_message(llm: LLM) -> None:
    said = llm.chat("hello", max_tokens=4)
    assert said.tokens == llm.chat([{"role": "user", "content": "hello"}], max_tokens=4).tokens
    assert said.prompt_tokens > llm.stream("hello", max_tokens=4).finish().prompt_tokens, "without the template"


@pytest.mark.parametrize("messages", [[], IDS, None, 5, CHAT[0], ["hello"], b"hello"], ids=str)
def test_an_invalid_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(
        outpace.UserError, match=r"^messages is .*, it must be a string or a list of messages, each with"
    ):
        llm.chat(messages)


def test_numbers_of_numpy_and_torch_are_pythons() -> None:
    given = SamplingParams(
        max_tokens=np.int64(5),
        temperature=np.float32(0.5),
        top_k=torch.tensor(4),
        top_p=torch.tensor(0.5, dtype=torch.bfloat16),
        seed=np.uint64(2**63 - 1),
        ignore_eos=np.bool_(True),
        logit_bias={np.int64(3): np.float64(1.5), torch.tensor(4): 2},
        stop_token_ids=np.array([1, 2]),
        logprobs=np.array(2),
        n=np.int8(2),
    )
    numbers: dict[str, Any] = {"max_tokens": 5, "temperature": 0.5, "top_k": 4, "top_p": 0.5, "seed": 2**63 - 1, "n": 2}
    expected = SamplingParams(ignore_eos=True, logit_bias={3: 1.5, 4: 2}, stop_token_ids=(1, 2), logprobs=2, **numbers)
    assert given == expected
    assert repr(given) == repr(expected)


def test_numbers_that_load_takes(tiny_folder: str) -> None:
    options: dict[str, Any] = {"nodes": np.int64(4), "batch": torch.tensor(2), "kv_memory": np.float32(0.25)}
    with LLM(tiny_folder, method="speculative", drafter="ngram", branches=np.int64(1), **options) as llm:
        assert llm.engine.options.nodes == 4
        assert llm.stream("hello", choice=np.int64(1), max_tokens=2).finish().choice == 1
