"""What may be asked, and what numpy and torch hand over: text, messages, token ids, and numbers of every make."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_library import CHAT, folder

import outpace
from outpace.api.llm import LLM
from outpace.api.params import SamplingParams
from outpace.api.prompts import ROLES, tokens_of
from outpace.models.load import Loaded, load_model

IDS = [40, 41, 42]
BAD = {
    "a number": 5,
    "nothing": None,
    "bytes": b"hello",
    "a bytearray": bytearray(b"hello"),
    "a set of tokens": {40, 41},
    "one message": CHAT[0],
    "fractions": [1.5, 2.0],
    "truths": [True, False],
    "numpy fractions": np.array([1.5]),
    "torch truths": torch.tensor([True]),
    "a table of tokens": np.array([IDS, IDS]),
    "tokens among messages": [*CHAT, 5],
    "texts": ["hello", "world"],
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load_model(folder(tmp_path_factory.mktemp("prompts"), "target"))


@pytest.fixture(scope="module")
def llm(tiny: Loaded) -> Iterator[LLM]:
    with closing(LLM(tiny, method="autoregressive")) as made:
        yield made


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_prompt_is_refused(llm: LLM, kind: str) -> None:
    with pytest.raises(
        outpace.UserError, match=r"^the prompt is .*, it must be text, a list of chat messages or a list"
    ):
        llm.stream(BAD[kind], max_tokens=2)
    assert not llm.engine.waiting


@pytest.mark.parametrize("prompts", [5, None, b"hello", {"hello"}, CHAT[0], 1.5], ids=str)
def test_what_is_no_list_of_prompts_is_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(outpace.UserError, match=r"^prompts is .*, it must be a prompt or a list of prompts"):
        llm.generate(prompts, max_tokens=2)


def test_a_long_prompt_that_is_refused_is_not_printed_whole(llm: LLM) -> None:
    with pytest.raises(outpace.UserError) as raised:
        llm.stream([0.5] * 100_000)
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize(
    "ids",
    [
        tuple(IDS),
        range(40, 43),
        array("i", IDS),
        np.array(IDS),
        np.array(IDS, np.uint8),
        torch.tensor(IDS),
        [np.int64(40), torch.tensor(41), 42],
    ],
    ids=lambda ids: type(ids).__name__,
)
def test_token_ids_of_every_make(llm: LLM, ids: Any) -> None:
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


def test_one_record_for_all_prompts_or_one_for_each(llm: LLM) -> None:
    each = [SamplingParams(max_tokens=2), SamplingParams(max_tokens=3, temperature=1.0, n=2)]
    assert [len(result.tokens) for result in llm.generate(["hello", "12"], each)] == [2, 3, 3]
    assert [len(result.tokens) for result in llm.generate(["hello", "12"], each[0])] == [2, 2]
    with pytest.raises(outpace.UserError, match="there are 2 sampling_params for 1 prompts"):
        llm.generate("hello", each)
    with pytest.raises(outpace.UserError, match="give SamplingParams or options by name, not both: max_tokens"):
        llm.generate(["hello", "12"], each, max_tokens=2)
    with pytest.raises(outpace.UserError, match=r"sampling_params is {'max_tokens': 2}, it must be SamplingParams"):
        llm.generate("hello", {"max_tokens": 2})
    assert not llm.engine.waiting


def test_a_role_that_nobody_knows_is_refused(llm: LLM) -> None:
    for role, says in (
        ("usr", "unknown role 'usr'.*did you mean 'user'"),
        ("", "unknown role ''"),
        (7, "unknown role '7'"),
    ):
        for ask in (llm.chat, llm.generate):
            with pytest.raises(outpace.UserError, match=says):
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
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(outpace.UserError, match=r"^messages is .*, it must be a text or a list of messages, each with"):
        llm.chat(messages)


def test_chat_gives_one_answer_as_a_stream_does(llm: LLM) -> None:
    with pytest.raises(outpace.UserError, match="n is 2, this gives one answer: use generate"):
        llm.chat("hello", n=2, temperature=1.0)
    with pytest.raises(outpace.UserError, match="choice is -1, it must be at least 0"):
        llm.chat("hello", choice=-1)


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
    expected = SamplingParams(
        max_tokens=5,
        temperature=0.5,
        top_k=4,
        top_p=0.5,
        seed=2**63 - 1,
        ignore_eos=True,
        logit_bias={3: 1.5, 4: 2},
        stop_token_ids=(1, 2),
        logprobs=2,
        n=2,
    )
    assert given == expected
    assert repr(given) == repr(expected)


def test_numbers_that_load_takes(tiny: Loaded) -> None:
    options: dict[str, Any] = {"nodes": np.int64(4), "batch": torch.tensor(2), "kv_memory": np.float32(0.25)}
    with LLM(tiny, method="speculative", drafter="ngram", branches=np.int64(1), **options) as llm:
        assert llm.engine.options.nodes == 4
        assert llm.stream("hello", choice=np.int64(1), max_tokens=2).finish().choice == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"seed": 2**63}, "seed is 9223372036854775808, it must be between 0 and 9223372036854775807"),
        ({"seed": np.float64(2.5)}, "seed is 2.5, it must be a whole number"),
        ({"max_tokens": np.array([3])}, r"max_tokens is \[3\], it must be a whole number"),
        ({"temperature": np.bool_(True)}, "temperature is True, it must be a number"),
        ({"temperature": "hot"}, "temperature is 'hot', it must be a number, between 0 and 100"),
        ({"ignore_eos": "yes"}, "ignore_eos is 'yes', it must be True or False"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5, it must be a list of token ids"),
        ({"stop_token_ids": b"ab"}, "stop_token_ids is b'ab', it must be a list of token ids"),
    ],
)
def test_numbers_that_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(outpace.UserError, match=says):
        SamplingParams(**options)
