"""Chat completions and completions: the server's answers equal the library's under every field."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from serving import HELLO, Answered, Served, served, wait_for

import outpace
from outpace.models.base import Model
from outpace.planning.cost_model import CostModel
from outpace.server.choices import Choice, ChoiceDelta
from outpace.server.engine_thread import EngineThread

FREE = {"max_tokens": 16, "ignore_eos": True}
GREEDY = {"temperature": 0, **FREE}


@pytest.fixture(scope="module")
def site(tiny_folder: str) -> Iterator[Served]:
    with outpace.load(tiny_folder, "layers:0", drafter="model+ngram") as llm, served(llm, served_name=["tiny"]) as site:
        yield site


class Recorded:
    """Counts the calls of a function."""

    def __init__(self, call: Any) -> None:
        self.calls, self._call = 0, call

    def __get__(self, owner: Any, kind: Any) -> Any:
        return self if owner is None else partial(self, owner)

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        return self._call(*arguments)


def plain(site: Served, prompt: Any, choice: int = 0, **fields: Any) -> ChoiceDelta:
    """Return the library's answer without speculation, computed by the server's engine."""
    params = outpace.SamplingParams(**fields)
    found = Choice(site.llm.prepare(prompt, params, choice, plain=True), [0])
    site.service.thread.submit([found]).result(60)
    wait_for(lambda: found.ended is not None)
    return found.take() or ChoiceDelta()


def streamed(events: list[Any]) -> dict[int, str]:
    """Return texts by choice index."""
    texts: dict[int, str] = {}
    for choice in itertools.chain.from_iterable(event["choices"] for event in events):
        more = choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
        texts[choice["index"]] = texts.get(choice["index"], "") + more
    return texts


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 1.0, "seed": 7}])
def test_a_chat_equals_the_library_s_answer(site: Served, fields: dict[str, Any]) -> None:
    expected = plain(site, HELLO, **FREE, **fields)
    whole = site.chat(**FREE, **fields, return_token_ids=True)
    assert whole.status == 200
    choice = whole.choice
    assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    assert tuple(choice["token_ids"]) == expected.tokens
    assert (choice["finish_reason"], choice["index"], choice["stop_reason"]) == ("length", 0, None)
    stream = site.chat(**FREE, **fields, stream=True, return_token_ids=True)
    assert stream.headers["content-type"].startswith("text/event-stream")
    first, *others, last = stream.events
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert streamed(others)[0] == expected.text
    ids = [token for event in others for token in event["choices"][0].get("token_ids", ())]
    assert tuple(ids) == expected.tokens
    assert last["choices"][0]["finish_reason"] == "length"
    assert {event["id"] for event in stream.events} == {first["id"]}


def test_output_is_delivered_during_the_next_pass_of_an_asynchronous_target(
    tiny_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Model, "is_asynchronous", True)
    monkeypatch.setattr(EngineThread, "_deliver_updates", deliver := Recorded(EngineThread._deliver_updates))
    with outpace.load(tiny_folder, "layers:0", drafter="model+ngram") as llm, served(llm) as site:
        in_pass = Recorded(llm.engine._runner._score)
        monkeypatch.setattr(llm.engine._runner, "_score", in_pass)
        expected = plain(site, HELLO, **GREEDY)
        stream = site.chat(**GREEDY, stream=True)
        _, *events, last = stream.events
        assert streamed(events)[0] == expected.text
        assert last["choices"][0]["finish_reason"] == "length"
        assert site.chat(**GREEDY).choice["message"]["content"] == expected.text
        assert deliver.calls == in_pass.calls + 3, "in each pass, and at the end of each answer"


def test_usage(site: Served) -> None:
    whole = site.chat(**FREE).json["usage"]
    assert (whole["completion_tokens"], whole["total_tokens"]) == (16, 16 + whole["prompt_tokens"])
    assert set(whole["completion_tokens_details"]) >= {"accepted_prediction_tokens", "rejected_prediction_tokens"}
    assert all("usage" not in event for event in site.chat(**FREE, stream=True).events)
    *events, last = site.chat(**FREE, stream=True, stream_options={"include_usage": True}).events
    assert [event["usage"] for event in events] == [None] * len(events)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 16)
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = site.complete(**FREE, stream=True, stream_options=options).events
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 16


def test_cached_prompt_tokens(site: Served) -> None:
    first, second = (site.complete("12 world hello " * 5, **GREEDY).json["usage"] for _ in range(2))
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in (first, second)]
    assert cached[0] < cached[1] < second["prompt_tokens"]


def test_speculation_statistics(site: Served) -> None:
    found = site.chat("hello hello hello hello", **GREEDY).json
    vllm, timings = found["metrics"]["speculative_decoding"], found["timings"]
    assert vllm["num_draft_tokens"] == timings["draft_n"] >= timings["draft_n_accepted"]
    by_length = sum(length * count for length, count in enumerate(vllm["acceptance_histogram"]))
    assert by_length == vllm["num_accepted_draft_tokens"] == timings["draft_n_accepted"]
    assert timings["predicted_n"] == 16
    assert set(site.chat(**FREE, stream=True).events[-1]) >= {"metrics", "timings", "seed"}


def test_choices_are_keyed_by_their_index(site: Served) -> None:
    found = site.complete("hello", n=3, seed=5, **FREE).json
    texts = [choice["text"] for choice in found["choices"]]
    assert texts == [plain(site, "hello", choice, seed=5, temperature=1.0, **FREE).text for choice in range(3)]
    assert streamed(site.complete("hello", n=3, seed=5, stream=True, **FREE).events) == dict(enumerate(texts))


def test_greedy_choices_are_computed_once(site: Served) -> None:
    before = site.figure("generation_tokens_total")
    found = site.chat(n=4, **GREEDY).json
    assert len({choice["message"]["content"] for choice in found["choices"]}) == 1
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    assert found["usage"]["completion_tokens"] == 64
    assert site.figure("generation_tokens_total") - before == 16
    assert len(streamed(site.chat(n=4, stream=True, **GREEDY).events)) == 4


def test_best_of_ranks_by_mean_log_probability(site: Served) -> None:
    every = site.complete("hello", n=4, seed=3, logprobs=0, **FREE).json["choices"]
    means = [sum(c["logprobs"]["token_logprobs"]) / 16 for c in every]
    found = site.complete("hello", n=2, best_of=4, seed=3, logprobs=0, **FREE).json["choices"]
    best = sorted(range(4), key=lambda number: -means[number])[:2]
    assert [choice["text"] for choice in found] == [every[number]["text"] for number in best]
    assert [choice["index"] for choice in found] == [0, 1]


def test_a_random_seed_is_reported(site: Served) -> None:
    first = site.chat(**FREE).json
    again = site.chat(**FREE, seed=first["seed"]).json
    assert first["choices"][0]["message"] == again["choices"][0]["message"]
    assert first["system_fingerprint"] == again["system_fingerprint"]
    assert first["seed"] != site.chat(**FREE).json["seed"]
    assert site.chat(**FREE, seed=-2).json["seed"] == 2**63 - 2


def test_several_prompts(site: Served) -> None:
    ids = site.llm.tokenizer.encode("hello world")
    for prompts in (["hello", "world"], [ids, ids[:1]]):
        found = site.complete(prompts, n=2, seed=1, **FREE).json["choices"]
        assert [choice["index"] for choice in found] == [0, 1, 2, 3]
        pairs = itertools.product(prompts, range(2))
        expected = [plain(site, prompt, choice, seed=1, temperature=1.0, **FREE).text for prompt, choice in pairs]
        assert [choice["text"] for choice in found] == expected
    both = site.complete(["hello", "world"], n=2, **GREEDY).json["choices"]
    assert [choice["text"] for choice in both] == [
        plain(site, one, **FREE).text for one in ("hello", "world") for _ in "ab"
    ]
    assert site.complete(ids, **GREEDY).choice["text"] == plain(site, ids, **FREE).text


def test_echo_with_log_probabilities(site: Served) -> None:
    text = "hello world 12"
    asked = {"max_tokens": 3, "ignore_eos": True, "temperature": 0, "echo": True, "logprobs": 2}
    found = site.complete(text, **asked).choice
    logprobs, length = found["logprobs"], len(site.llm.tokenizer.encode(text))
    assert {len(values) for values in logprobs.values()} == {length + 3}
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    assert "".join(logprobs["tokens"][:length]) == text
    assert found["text"].startswith(text)
    for token, value, top in list(
        zip(*(logprobs[n] for n in ("tokens", "token_logprobs", "top_logprobs")), strict=True)
    )[1:]:
        assert top[token] == value
        assert len(top) in (2, 3)
    pieces = [found["text"][start:end] for start, end in itertools.pairwise(logprobs["text_offset"])]
    assert pieces[:length] == logprobs["tokens"][:length]
    events = site.complete(text, stream=True, **asked).events
    assert streamed(events)[0] == found["text"]
    parts = [e["choices"][0]["logprobs"] for e in events if e["choices"][0]["logprobs"]]
    assert {name: [x for part in parts for x in part[name]] for name in logprobs} == logprobs


def test_scoring_without_generation(site: Served) -> None:
    asked = {"echo": True, "logprobs": 1, "temperature": 0}
    one = site.complete("hello world", max_tokens=1, **asked).choice["logprobs"]
    none = site.complete("hello world", max_tokens=0, **asked)
    assert (none.choice["text"], none.choice["finish_reason"]) == ("hello world", "length")
    assert none.choice["logprobs"]["token_logprobs"] == one["token_logprobs"][:-1]
    assert none.json["usage"]["completion_tokens"] == 0


def test_chat_log_probabilities_have_exact_bytes(site: Served) -> None:
    asked = {"logprobs": True, "top_logprobs": 3, **GREEDY}
    found = site.chat(return_token_ids=True, **asked).choice
    content = found["logprobs"]["content"]
    assert len(content) == 16
    written = b"".join(bytes(entry["bytes"]) for entry in content)
    assert written.decode("utf-8", "replace") == found["message"]["content"]
    for entry, token in zip(content, found["token_ids"], strict=True):
        assert bytes(entry["bytes"]) == site.llm.tokenizer.spelled(token)
        top = [one["logprob"] for one in entry["top_logprobs"]]
        assert top == sorted(top, reverse=True)
        assert top[0] == entry["logprob"]  # greedy
        assert math.isclose(math.log(math.exp(entry["logprob"])), entry["logprob"], abs_tol=1e-6)
    events = site.chat(stream=True, **asked).events
    assert [e for event in events for e in ((event["choices"][0]["logprobs"] or {}).get("content") or [])] == content


def test_stop_strings_and_stop_tokens(site: Served) -> None:
    whole = plain(site, HELLO, **FREE)
    stop = whole.text[4:6]
    cut = whole.text[: whole.text.find(stop)]
    for stream in (False, True):
        asked = {"stream": stream, **GREEDY}
        assert end_of(site.chat(stop=[stop, "\0never"], **asked)) == (cut, "stop", stop)
        assert end_of(site.chat(stop=stop, include_stop_str_in_output=True, **asked))[0] == cut + stop
        token = whole.tokens[5]
        text, reason, why = end_of(site.chat(stop_token_ids=[token], **asked))
        assert (reason, why) == ("stop", token)
        assert whole.text.startswith(text)


def test_the_model_s_own_end_is_no_stop_reason(site: Served) -> None:
    end = site.llm.tokenizer.id_of("<|im_end|>")
    asked = {"logit_bias": {str(end): 100}, "temperature": 0, "max_tokens": 5}
    assert end_of(site.chat(**asked)) == ("", "stop", None)
    assert end_of(site.chat(stop_token_ids=[end], **asked)) == ("", "stop", end)


def end_of(answered: Answered) -> tuple[str, str, Any]:
    """Return text, finish reason and stop reason of a whole or streamed answer."""
    if answered.headers["content-type"].startswith("application/json"):
        choice = answered.choice
        return choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]
    last = [event["choices"][0] for event in answered.events if event["choices"]][-1]
    return streamed(answered.events)[0], last["finish_reason"], last["stop_reason"]


@pytest.mark.parametrize(
    "fields",
    [
        *({"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}, {"repetition_penalty": 1.5}, {"bad_words": ["hello"]}),
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"logit_bias": {"20": 5.0, "21": -100}},
        {"min_tokens": 12, "stop_token_ids": [20, 21, 22]},
        {"allowed_token_ids": [20, 21, 22, 68]},
    ],
)
def test_every_sampling_field_is_applied(site: Served, fields: dict[str, Any]) -> None:
    found = site.complete("hello", seed=2, **FREE, **fields).choice["text"]
    assert found == plain(site, "hello", seed=2, temperature=1.0, **FREE, **fields).text


def test_messages_with_parts_and_developer_role(site: Served) -> None:
    parts = [{"role": "developer", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "12"}]}]
    same = [{"role": "system", "content": "hello\n12"}]
    texts = [site.chat(messages, **GREEDY).choice["message"]["content"] for messages in (parts, same)]
    assert texts == [plain(site, same, **FREE).text] * 2


def test_fields_without_effect_are_accepted(site: Served) -> None:
    ignored = {"user": "x", "store": False, "metadata": {"a": "b"}, "service_tier": "auto"}
    assert site.chat(**GREEDY, **ignored, safety_identifier="y", prompt_cache_key="z").status == 200


def test_speculation_can_be_turned_off(site: Served) -> None:
    texts = []
    for own in ({"speculation": False}, {"method": "autoregressive"}, {"method": site.llm.method}, {}):
        found = site.chat("hello hello hello", **GREEDY, outpace=own).json
        texts.append(found["choices"][0]["message"]["content"])
        if own and own.get("method") != site.llm.method:
            assert found["timings"]["draft_n"] == 0
    assert len(set(texts)) == 1


def test_tokenize_and_detokenize(site: Served) -> None:
    text = "hello wörld 12"
    found = site.ask("/tokenize", {"prompt": text, "return_token_strs": True}).json
    assert found["tokens"] == site.llm.tokenizer.encode(text)
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 128)
    assert site.ask("/detokenize", {"tokens": found["tokens"]}).json["prompt"] == text
    chat = site.ask("/tokenize", {"messages": HELLO}).json
    assert chat["tokens"] == site.llm.tokenizer.chat(HELLO)
    assert {"eos_token", "bos_token", "chat_template"} <= set(site.ask("/tokenizer_info").json)
    assert site.ask("/tokenize", {}).error["param"] == "prompt"
    assert site.ask("/detokenize", {"tokens": [99999]}).status == 400


def test_other_endpoints(site: Served) -> None:
    (card,) = site.ask("/v1/models").json["data"]
    assert (card["id"], card["root"], card["max_model_len"]) == ("tiny", "target", 128), "folders are not shown"
    assert site.ask("/v1/models/tiny").json == card
    assert [site.ask(path).status for path in ("/v1/models/other", "/ready")] == [404, 200]
    assert site.ask("/health").json == {"status": "ok"}
    assert site.ask("/version").json == {"version": outpace.__version__}


def test_the_docs_list_all_paths_and_load_nothing(site: Served) -> None:
    page = site.ask("/docs")
    text = page.body.decode()
    assert page.status == 200
    assert all(f"<code>{path}</code>" in text for path in site.ask("/openapi.json").json["paths"])
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert not re.search(r"(?:src|href)=.?https?:", text)


def test_the_openapi_document_is_complete(site: Served) -> None:
    document = site.ask("/openapi.json").json
    assert document["info"]["version"] == outpace.__version__
    assert document["paths"]["/v1/chat/completions"]["post"]["summary"] == "Answer a conversation"
    found = re.findall(r'"\$ref": ?"#/components/schemas/(\w+)"', json.dumps(document))
    assert {"ChatMessage", "StreamOptions", "OutpaceOptions"} <= set(found) <= document["components"]["schemas"].keys()
    assert "$defs" not in json.dumps(document)


def test_metrics_of_an_answer(site: Served) -> None:
    names = ("generation_tokens_total", "prompt_tokens_total", "spec_decode_num_draft_tokens_total")
    before = [site.figure(name) for name in names]
    found = site.chat("hello hello hello", **GREEDY).json
    site.wait_idle()
    wait_for(lambda: site.figure("prompt_tokens_total") > before[1])
    grown = [site.figure(name) - old for name, old in zip(names, before, strict=True)]
    assert grown == [16, found["usage"]["prompt_tokens"], found["timings"]["draft_n"]]
    page = site.ask("/metrics").body.decode()
    for name in ("num_requests_running", "kv_cache_usage_perc", "time_to_first_token_seconds_bucket"):
        assert f"outpace:{name}" in page
    assert site.figure("request_success_total", finished_reason="length") > 0


def test_metrics_of_drafters(site: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CostModel, "tokens_per_second", lambda *_: 0.0)  # all forced tokens are drafted: time is free

    def drafted() -> float:
        samples = [sample for family in site.service.metrics.registry.collect() for sample in family.samples]
        return sum(sample.value for sample in samples if sample.name == "outpace:draft_tokens_total")

    before, compiled = drafted(), site.figure("grammar_compile_seconds_count")
    forced = {"structured_outputs": {"choice": ["hello hello hello hello"]}, "max_tokens": 60, "temperature": 0}
    counts = [site.chat(**forced, n=1).json["timings"]["draft_n"] for _ in range(6)]
    site.wait_idle()
    assert site.figure("grammar_compile_seconds_count") == compiled + 1
    assert drafted() - before == sum(counts) > 0
    assert site.figure("grammar_compile_seconds_sum") > 0
    assert site.figure("speculation_speedup") > 0
