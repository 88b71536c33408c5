"""Fields by the names of other servers: honoured, without effect, or refused by name, in every API."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import HELLO, Answered, Served, served
from test_infill import QWEN, file_with

import outpace
from outpace.server.chat_completions import ChatBody
from outpace.server.completions import CompletionBody, InfillBody
from outpace.server.errors import ApiError
from outpace.server.messages import MessagesBody
from outpace.server.request_body import OTHER_FIELDS, OtherField, SamplingBody, validate
from outpace.server.responses import ResponsesBody

NOTE = "<|note|>"  # a special token that does not end an answer
CHAT, COMPLETIONS, INFILL = "/v1/chat/completions", "/v1/completions", "/infill"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
BODIES: dict[str, tuple[type[SamplingBody], dict[str, Any]]] = {
    CHAT: (ChatBody, {"messages": HELLO}),
    COMPLETIONS: (CompletionBody, {"prompt": "hello world"}),
    INFILL: (InfillBody, {"input_prefix": "hello", "input_suffix": " 12"}),
    RESPONSES: (ResponsesBody, {"input": "hello world"}),
    MESSAGES: (MessagesBody, {"messages": HELLO}),
}
LENGTH = {INFILL: "n_predict", RESPONSES: "max_output_tokens"}  # else max_tokens
SAMPLED = {"temperature": 1.0, "seed": 4, "ignore_eos": True}
# Request bodies as these servers document them.
PUBLISHED = {
    "OpenAI": "audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens"
    " messages metadata modalities n parallel_tool_calls prediction presence_penalty prompt_cache_key reasoning_effort"
    " response_format safety_identifier seed service_tier stop temperature tool_choice tools top_logprobs top_p user"
    " verbosity web_search_options best_of echo suffix prompt instructions input conversation max_output_tokens"
    " max_tool_calls previous_response_id reasoning text truncation",
    "vLLM": "use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids include_stop_str_in_output"
    " ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens prompt_logprobs"
    " allowed_token_ids bad_words add_generation_prompt continue_final_message add_special_tokens documents"
    " chat_template chat_template_kwargs mm_processor_kwargs structured_outputs priority request_id cache_salt"
    " logits_processors guided_json guided_regex guided_choice guided_grammar guided_decoding_backend"
    " guided_whitespace_pattern include_reasoning thinking_token_budget vllm_xargs",
    "SGLang": "min_tokens regex ebnf json_schema no_stop_trim stop_regex lora_path session_params separate_reasoning"
    " custom_logit_processor custom_params rid structural_tag input_ids sampling_params",
    "llama.cpp": "dynatemp_range dynatemp_exponent n_predict n_indent n_keep typical_p repeat_penalty repeat_last_n"
    " dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_probability xtc_threshold"
    " mirostat mirostat_tau mirostat_eta grammar json_schema n_probs min_keep t_max_predict_ms id_slot cache_prompt"
    " samplers timings_per_token lora top_n_sigma reasoning_format thinking_forced_open parse_tool_calls n_cmpl",
    "TGI": "do_sample max_new_tokens return_full_text top_n_tokens truncate watermark adapter_id typical_p grammar"
    " inputs parameters tool_prompt",
    "Ollama": "options format think keep_alive system images context num_predict",
    "Mistral": "random_seed safe_prompt prompt_mode n prediction",
    "others": "min_new_tokens stop_strings num_beams num_beam_groups penalty_alpha no_repeat_ngram_size guidance_scale"
    " enable_thinking thinking thinking_budget enable_search extra_body nvext top_a transforms plugins mcp_servers"
    " container tfs epsilon_cutoff eta_cutoff early_stopping diversity_penalty encoder_repetition_penalty"
    " exponential_decay_length_penalty max_length min_length banned_strings negative_prompt disable_reasoning",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = file_with(tmp_path_factory.mktemp("fields"), [*QWEN, NOTE])
    with outpace.load(str(path), "layers:0") as llm, served(llm) as site:
        yield site


def ask(site: Served, path: str, length: int | None = 12, **fields: Any) -> Answered:
    """Request an answer of `length` tokens."""
    limit = {} if length is None else {LENGTH.get(path, "max_tokens"): length}
    return site.ask(path, {**BODIES[path][1], **limit, **fields})


def text_of(found: Answered) -> str:
    """Return the text of any API's whole answer."""
    assert found.status == 200, found.body
    value = found.json
    if "choices" in value:
        choice = value["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])
    content = value["content"] if "content" in value else value["output"][0]["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


@pytest.mark.parametrize("path", BODIES)
def test_other_names_of_fields_are_taken(site: Served, path: str) -> None:
    plain = text_of(ask(site, path, **SAMPLED))
    note = site.llm.tokenizer.id_of(NOTE)
    stop, words = "stop_sequences" if path == MESSAGES else "stop", re.findall("[!-~]", plain)[:1]
    noted = {"logit_bias": {str(note): 100}}
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"stop_sequences": words}, {stop: words}),
        ({"stop_sequences": words, "no_stop_trim": True}, {stop: words, "include_stop_str_in_output": True}),
        ({"repeat_penalty": 3.0}, {"repetition_penalty": 3}),
        ({"banned_strings": words}, {"bad_words": words}),
        ({"logit_bias": [[note, 100]], "skip_special_tokens": False}, {**noted, "skip_special_tokens": False}),
        ({"logit_bias": [[70, False], ["71", 90]]}, {"logit_bias": {"70": -100, "71": 90}}),
        ({"top_k": 2.0}, {"top_k": 2}),
        ({"top_p": 0}, {"temperature": 0}),
    ]
    for given, own in pairs:
        found = text_of(ask(site, path, **{**SAMPLED, **given}))
        assert found == text_of(ask(site, path, **{**SAMPLED, **own})), given
        assert found != plain, given
    assert text_of(ask(site, path, **{"random_seed": 5, **SAMPLED, "seed": None})) != plain
    assert text_of(ask(site, path, **{"random_seed": 4.0, **SAMPLED, "seed": None})) == plain
    for name in ("max_new_tokens", "n_predict", "max_tokens", "max_output_tokens"):
        assert text_of(ask(site, path, None, **SAMPLED, **{name: 12.0})) == plain, name
    assert text_of(ask(site, path, **SAMPLED, **noted)) == ""
    assert text_of(ask(site, path, **SAMPLED, **noted, skip_special_tokens=False)) == NOTE * 12
    ends = {**SAMPLED, "ignore_eos": False, "logit_bias": {str(min(site.llm.tokenizer.stop_ids)): 100}}
    for name, most in (("min_new_tokens", 3), ("min_tokens", 3.0), ("x", 0)):
        assert (text_of(ask(site, path, **ends, **{name: most})) == "") == (most == 0)


@pytest.mark.parametrize("path", BODIES)
def test_a_seed_of_minus_one_is_drawn(site: Served, path: str) -> None:
    asked = {"temperature": 3.0, "ignore_eos": True, "top_k": 0, "top_p": 1.0, "min_p": 0}
    for name in ("seed", "random_seed"):
        assert len({text_of(ask(site, path, **asked, **{name: -1})) for _ in range(4)}) > 1
        assert len({text_of(ask(site, path, **asked, **{name: -5})) for _ in range(4)}) == 1


@pytest.mark.parametrize("path", BODIES)
def test_two_values_for_one_field_are_refused(site: Served, path: str) -> None:
    assert text_of(ask(site, path, seed=4, random_seed=4))
    pairs = [({"random_seed": 5}, "seed"), ({"max_new_tokens": 5}, LENGTH.get(path, "max_tokens"))]
    for given, own in pairs:
        found = ask(site, path, **{"seed": 4, **given})
        assert found.status == 400
        (name,) = given
        assert f"{own} is {12 if 'max' in name else 4}, but {name} is 5: give one of them" in str(found.json["error"])
    found = site.ask(CHAT, {"messages": HELLO, "max_tokens": 5, "max_completion_tokens": 6})
    assert found.error["message"] == "max_completion_tokens is 6, but max_tokens is 5: give one of them"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_a_cache_salt_separates_requests(site: Served, path: str) -> None:
    """A request finds what another one of the same salt has stored, and nothing else."""
    content = path + "12 world hello " * 3
    long = {"prompt": content, "input": content, "messages": [{"role": "user", "content": content}]}
    fields = {name: value for name, value in long.items() if name in BODIES[path][1]}
    cached = []
    for salt in ("a", "a", "b", None, None):
        usage = ask(site, path, cache_salt=salt, **fields).json["usage"]
        cached.append(usage["input_tokens_details" if path == RESPONSES else "prompt_tokens_details"]["cached_tokens"])
    assert (cached[0], cached[2], cached[3]) == (0, 0, 0)
    assert cached[1] == cached[4] > 0


@pytest.mark.parametrize("name", sorted({name for text in PUBLISHED.values() for name in text.split()}))
def test_a_field_of_another_server_is_never_merely_ignored(name: str) -> None:
    """It is a field of the API, or it is renamed, has no effect, or is refused, with the field to use instead."""
    other = OTHER_FIELDS.get(name, OtherField())
    for path, (kind, body) in BODIES.items():
        if kind.model_fields.keys() & {name, *(other.own if other.is_same else ())}:
            continue
        given = {**body, **({"max_tokens": 5} if path == MESSAGES else {}), "presence_penalty": 1, name: {"zq": 1}}
        if other.neutral is None:
            assert validate(kind, given, is_strict=True)[1] == []
            continue
        with pytest.raises(ApiError) as raised:
            validate(kind, given, is_strict=False)
        assert (raised.value.status, raised.value.code, raised.value.param) == (400, "unsupported_field", name)
        assert raised.value.message.startswith(f"{name} is {{'zq': 1}}, but this API does not support it")


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        (CHAT, {"web_search_options": {}}, "web_search_options is {}"),
        (CHAT, {"guided_json": {}}, "guided_json is {}, but this API does not support it; use structured_outputs"),
        (MESSAGES, {"guided_choice": ["a"]}, "use output_config.format"),
        (RESPONSES, {"response_format": {"type": "json_object"}}, "use text.format"),
        (RESPONSES, {"truncate_prompt_tokens": 5}, "use truncation"),
        (CHAT, {"truncation": "auto"}, "truncation is 'auto'"),
        (CHAT, {"do_sample": False}, "use temperature"),
        (COMPLETIONS, {"enable_thinking": True}, "enable_thinking is True"),
        (INFILL, {"thinking": {"type": "enabled"}}, "thinking is {'type': 'enabled'}"),
        (CHAT, {"thinking": {"type": "off"}}, "thinking"),
        (
            CHAT,
            {"thinking": {"type": "enabled"}, "enable_thinking": False},
            "enable_thinking is False, but thinking is",
        ),
        (CHAT, {"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "but reasoning_effort is 'high'"),
        (RESPONSES, {"reasoning": {"max_tokens": 9}}, "reasoning.max_tokens is 9: it must be null"),
        (CHAT, {"repeat_last_n": 64, "repeat_penalty": 1.1}, "repeat_last_n is 64"),
        (CHAT, {"add_special_tokens": True}, "add_special_tokens is True"),
        (CHAT, {"min_new_tokens": -1}, "min_new_tokens is -1: it must be greater"),
        (COMPLETIONS, {"top_k": 2.5}, "top_k is 2.5"),
        (COMPLETIONS, {"logit_bias": [[5, 1], ["5", 2]]}, "it names a token twice"),
        (COMPLETIONS, {"cache_salt": ""}, "cache_salt is '': it must have at least 1 character"),
    ],
)
def test_values_that_would_change_the_answer_are_refused(
    site: Served, path: str, fields: dict[str, Any], says: str
) -> None:
    for stream in (False, True):
        found = ask(site, path, **fields, stream=stream)
        assert found.status == 400, found.body
        assert says in found.json["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
def test_values_that_change_nothing_are_accepted(site: Served, path: str) -> None:
    """llama.cpp's own page sends most of these with every request."""
    plain = text_of(ask(site, path, temperature=0))
    same: dict[str, Any] = {
        **{"mirostat": 0, "mirostat_tau": 5, "dry_multiplier": 0.0, "dry_base": 1.75, "xtc_probability": 0},
        **{"xtc_threshold": 0.1, "typical_p": 1.0, "dynatemp_range": 0, "repeat_last_n": 64, "top_n_sigma": -1},
        **{"best_of": 1, "use_beam_search": False, "do_sample": True, "reasoning_format": "auto", "priority": 3},
        **{"enable_thinking": False, "think": False, "modalities": ["text"], "truncation": "disabled"},
        **{"reasoning_budget": -1, "thinking_budget": -1},
    }
    assert text_of(ask(site, path, temperature=0, **same)) == plain


@pytest.mark.parametrize("name", ["thinking_budget", "reasoning_budget", "max_thinking_tokens", "repetition_detection"])
def test_a_budget_of_no_thoughts_is_refused(site: Served, name: str) -> None:
    """A budget of 0 turns thinking off in other servers."""
    value: Any = {"max_pattern_size": 4} if name == "repetition_detection" else 0
    found = ask(site, "/v1/chat/completions", **{name: value})
    assert (found.status, found.error["param"]) == (400, name), found.body


def test_prompts_are_counted_as_they_are_answered(site: Served) -> None:
    for path, fields in (("/tokenize", {}), ("/v1/messages/count_tokens", {"max_tokens": 9, "stop_sequences": ["a"]})):
        assert site.ask(path, {"messages": HELLO, "think": False, "max_new_tokens": 9, **fields}).status == 200
        for name, value in (("documents", [{"text": "a"}]), ("chat_template", "a"), ("enable_thinking", "no")):
            found = site.ask(path, {"messages": HELLO, name: value})
            assert (found.status, name in found.json["error"]["message"]) == (400, True), found.body


def test_no_limit_of_length(site: Served) -> None:
    """As in llama.cpp, -1 means as many tokens as the context has."""
    for path in BODIES:
        found = ask(site, path, -1, **SAMPLED).json
        usage = found.get("usage", found)
        names = ("completion_tokens", "output_tokens", "tokens_predicted")
        assert next(usage[name] for name in names if name in usage) > 80


def test_a_prompt_without_special_tokens(tmp_path: Path) -> None:
    path = file_with(tmp_path, QWEN, add_bos_token=True)
    with outpace.load(str(path)) as llm, served(llm) as site:
        counts = [
            site.complete("hello", max_tokens=1, **fields).json["usage"]["prompt_tokens"]
            for fields in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}, {"add_bos_token": False})
        ]
    assert counts == [3, 3, 2, 2]


def test_a_long_conversation_is_shortened_on_request(site: Served) -> None:
    """The oldest turns are left out, so that the rest fits; instructions and the last turn stay."""
    turns = [{"role": role, "content": f"{number} " * 6} for number in range(20, 29) for role in ("user", "assistant")]
    turns.append({"role": "user", "content": "hello"})
    asked = {"input": turns, "instructions": "world", "temperature": 0}
    found = ask(site, RESPONSES, 30, **asked)
    assert (found.status, found.error["code"]) == (400, "context_length_exceeded")
    whole = ask(site, RESPONSES, 30, truncation="auto", **asked).json
    system, most = {"role": "system", "content": "world"}, site.service.max_model_len - 30
    fitting = [turns[place:] for place in range(0, len(turns), 2)]
    kept = next(some for some in fitting if len(site.llm.tokenizer.chat([system, *some])) <= most)
    assert 1 < len(kept) < len(turns)
    assert whole["usage"]["input_tokens"] == len(site.llm.tokenizer.chat([system, *kept]))
    assert whole["truncation"] == "auto"
    same = ask(site, RESPONSES, 30, **{**asked, "input": kept}).json
    assert same["output"][0]["content"] == whole["output"][0]["content"]
    short = {**asked, "input": "hello"}
    texts = [ask(site, RESPONSES, truncation=how, **short).json["output"][0]["content"] for how in ("auto", "disabled")]
    assert texts[0] == texts[1]
    endless = ask(site, RESPONSES, truncation="auto", input="hello " * 300)
    assert endless.error["code"] == "context_length_exceeded"
