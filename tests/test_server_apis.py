"""The Messages API, the Responses API, token sources, predicted outputs, and the page."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import HELLO, Answered, Served, served
from test_library import folder
from test_server import plain

import outpace
from outpace.server import responses
from outpace.server.app import PAGE
from outpace.server.messages import MessagesBody, template_messages
from outpace.server.responses import ResponsesBody

FREE = {"ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def site(tiny_folder: str) -> Iterator[Served]:
    with outpace.load(tiny_folder, "layers:0") as llm, served(llm) as site:
        yield site


def named(answered: Answered) -> list[tuple[str, Any]]:
    """Return the events of a stream with event names."""
    found = re.findall(r"event: (.*)\ndata: (.*)\n\n", answered.body.decode())
    return [(name, json.loads(data)) for name, data in found]


def tool_result(content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "a", "content": content}


def message(site: Served, **fields: Any) -> Answered:
    return site.ask("/v1/messages", {"messages": HELLO, "max_tokens": 12, **FREE, **fields})


def test_a_message_equals_the_library_s_answer(site: Served) -> None:
    expected = plain(site, HELLO, max_tokens=12, **FREE)
    whole = message(site).json
    assert whole["content"] == [{"type": "text", "text": expected.text}]
    assert (whole["type"], whole["role"], whole["stop_reason"]) == ("message", "assistant", "max_tokens")
    assert whole["usage"]["output_tokens"] == 12
    count = site.ask("/v1/messages/count_tokens", {"messages": HELLO}).json["input_tokens"]
    assert prompt_tokens(whole["usage"]) == count == len(site.llm.tokenizer.chat(HELLO))
    events = named(message(site, stream=True))
    names = [name for name, _ in events]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert prompt_tokens(events[0][1]["message"]["usage"]) == count
    assert "".join(event["delta"]["text"] for name, event in events if name == "content_block_delta") == expected.text
    assert events[-2][1]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    usage = events[-2][1]["usage"]
    assert (prompt_tokens(usage), usage["output_tokens"]) == (count, 12)
    assert all(event["type"] == name for name, event in events)


def prompt_tokens(usage: dict[str, int]) -> int:
    """Return the tokens of a message's prompt: those that were read and those from the prefix cache."""
    return usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_messages_report_cached_prompt_tokens(site: Served) -> None:
    asked = [{"role": "user", "content": "12 world hello " * 5}]
    first, second = (message(site, messages=asked).json["usage"] for _ in range(2))
    assert first["cache_read_input_tokens"] < second["cache_read_input_tokens"] < prompt_tokens(second)
    assert prompt_tokens(first) == prompt_tokens(second)


def test_messages_with_blocks_and_a_system_text(site: Served) -> None:
    blocks = [{"role": "user", "content": [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]}]
    found = message(site, messages=blocks, system=[{"type": "text", "text": "12"}]).json
    same = [{"role": "system", "content": "12"}, {"role": "user", "content": "hello"}]
    assert found["content"][0]["text"] == plain(site, same, max_tokens=12, **FREE).text


def test_tool_results_become_messages(site: Served) -> None:
    turns = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}]},
        {"role": "user", "content": [tool_result([{"type": "text", "text": "5"}])]},
    ]
    found = template_messages(MessagesBody.model_validate({"messages": turns, "max_tokens": 1}))
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert found[1:] == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "5"},
    ]
    assert message(site, messages=turns).status == 200


def test_system_messages_within_a_conversation(site: Served) -> None:
    turns = [*HELLO, {"role": "system", "content": "12"}]
    assert message(site, messages=turns).json["content"][0]["text"] == plain(site, turns, max_tokens=12, **FREE).text


def test_fields_of_coding_clients(site: Served) -> None:
    """Claude Code sends these with every request."""
    fields = {
        "context_management": {"edits": []},
        "output_config": {"effort": "high"},
        "thinking": {"type": "adaptive"},
    }
    found = message(site, **fields)
    assert found.json["content"] == message(site).json["content"]
    assert found.headers["x-ignored-fields"] == "context_management"


@pytest.mark.parametrize("name", ["output_config", "output_format"])
def test_structured_output_of_the_messages_api(site: Served, name: str) -> None:
    asked = {"type": "json_schema", "schema": {"enum": ["hello world", 12]}}
    fields = {name: {"format": asked} if name == "output_config" else asked}
    given = {"temperature": 1, "ignore_eos": False, "max_tokens": 60, "seed": 4}
    found = [message(site, **fields, **given, outpace={"speculation": how}).json["content"] for how in (True, False)]
    assert found[0] == found[1]
    assert json.loads(found[0][0]["text"]) in ("hello world", 12)


def test_a_too_long_prompt_has_the_sentence_of_the_messages_api(site: Served) -> None:
    turns = [{"role": "user", "content": "hello " * 600}]
    count, most = len(site.llm.tokenizer.chat(turns)), site.service.max_model_len
    found = message(site, messages=turns)
    error = {"type": "invalid_request_error", "message": f"prompt is too long: {count} tokens > {most} maximum"}
    assert (found.status, found.json["error"]) == (400, error)


def test_items_of_a_turn_become_one_message() -> None:
    def call(number: int) -> dict[str, Any]:
        return {"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": f'{{"x": {number}}}'}

    items = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "world"},
        *(call(number) for number in (1, 2)),
        {"role": "assistant", "content": "12"},
        *({"type": "function_call_output", "call_id": f"c{number}", "output": "5"} for number in (1, 2)),
        {"role": "assistant", "content": "34"},
    ]
    calls = [
        {"id": f"c{number}", "type": "function", "function": {"name": "f", "arguments": f'{{"x": {number}}}'}}
        for number in (1, 2)
    ]
    assert responses.template_messages(ResponsesBody.model_validate({"input": items})) == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "world\n12", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
        {"role": "tool", "tool_call_id": "c2", "content": "5"},
        {"role": "assistant", "content": "34"},
    ]


def test_stop_sequences(site: Served) -> None:
    text = plain(site, HELLO, max_tokens=12, **FREE).text
    found = message(site, stop_sequences=[text[3:5]]).json
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", text[3:5])
    assert found["content"][0]["text"] == text[: text.find(text[3:5])]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": None}, "max_tokens is None"),
        ({"messages": []}, "messages is []"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0.type is 'image'"),
        ({"system": [{"type": "image"}]}, "system.0.type is 'image'"),
        ({"output_config": {"format": {"type": "xml"}}}, "'xml'"),
        ({"output_config": {"format": {}}}, "must be an object with a type"),
        (
            {"output_config": {"format": {"type": "json_object"}}, "output_format": {"type": "text"}},
            "output_config.format and output_format both",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools.0"),
        ({"stop": ["x"]}, "stop_sequences"),
        ({"stop_sequences": [str(number) for number in range(17)]}, "stop_sequences has 17 strings, at most 16"),
    ],
)
def test_errors_have_the_format_of_the_messages_api(site: Served, fields: dict[str, Any], says: str) -> None:
    found = message(site, **fields)
    assert (found.status, found.json["type"], found.json["error"]["type"]) == (400, "error", "invalid_request_error")
    assert says in found.json["error"]["message"]
    assert found.json["request_id"] == found.headers["x-request-id"]


def response(site: Served, **fields: Any) -> Answered:
    return site.ask("/v1/responses", {"input": "hello world", "max_output_tokens": 12, **FREE, **fields})


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"reasoning": {"effort": "low", "summary": "auto", "more": 5}}, "reasoning.more"),
        ({"stream_options": {"include_obfuscation": False, "more": 1}}, "stream_options.more"),
        (
            {"tools": [{"type": "function", "name": "f", "more": 1}], "tool_choice": "none"},
            "tools.0.more",
        ),
        ({"return_rounds": True}, "return_rounds"),
        ({"response_fields": ["a"]}, "response_fields"),
    ],
)
def test_unknown_fields_of_the_responses_api_are_named(site: Served, fields: dict[str, Any], ignored: str) -> None:
    found = response(site, **fields)
    assert (found.status, found.headers.get("x-ignored-fields")) == (200, ignored)


def test_an_effort_is_a_text(site: Served) -> None:
    found = response(site, reasoning={"effort": 5})
    assert (found.status, found.error["param"]) == (400, "reasoning")


def test_a_response_equals_the_library_s_answer(site: Served) -> None:
    expected = plain(site, HELLO, max_tokens=12, **FREE).text
    whole = response(site).json
    assert whole["output"][0]["content"][0]["text"] == expected
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["usage"]["output_tokens"] == 12
    events = named(response(site, stream=True))
    names = [name for name, _ in events]
    begins = ["created", "in_progress", "output_item.added", "content_part.added"]
    ends = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert names[:4] + names[-4:] == [f"response.{name}" for name in begins + ends]
    assert set(names[4:-4]) == {"response.output_text.delta"}
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
    assert "".join(event["delta"] for name, event in events if name == "response.output_text.delta") == expected
    final = events[-1][1]["response"]
    assert final["output"][0]["content"][0]["text"] == expected
    assert {event["item_id"] for _, event in events if "item_id" in event} == {final["output"][0]["id"]}
    assert final["id"] == events[0][1]["response"]["id"]


def test_responses_with_items_and_instructions(site: Served) -> None:
    user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}
    found = response(site, input=[{"role": "developer", "content": "12"}, user], instructions="world").json
    same = [{"role": "system", "content": text} for text in ("world", "12")] + [{"role": "user", "content": "hello"}]
    assert found["output"][0]["content"][0]["text"] == plain(site, same, max_tokens=12, **FREE).text


def test_log_probabilities_of_a_response(site: Served) -> None:
    found = response(site, top_logprobs=2, include=["message.output_text.logprobs"]).json
    logprobs = found["output"][0]["content"][0]["logprobs"]
    assert len(logprobs) == 12
    assert all(len(entry["top_logprobs"]) == 2 for entry in logprobs)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"store": True}, "store is True"),
        ({"previous_response_id": "resp_1"}, "previous_response_id is 'resp_1'"),
        ({"background": True}, "background is True"),
        ({"input": []}, "input is an empty list"),
        ({"input": [{"content": "x"}]}, "input.0.role is missing"),
        ({"input": 5}, "input is 5"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content"),
    ],
)
def test_errors_of_responses(site: Served, fields: dict[str, Any], says: str) -> None:
    found = response(site, **fields)
    assert found.status == 400
    assert says in found.error["message"]


def test_sources_agree_with_accepted_tokens(site: Served) -> None:
    asked = {"max_tokens": 24, "return_sources": True, "return_rounds": True, **FREE}
    whole = site.chat("hello hello hello hello", **asked).json
    choice = whole["choices"][0]
    assert len(choice["sources"]) == len(choice["token_texts"]) == 24
    assert sum(source != "target" for source in choice["sources"]) == whole["timings"]["draft_n_accepted"]
    assert set(choice["sources"]) <= {"target", "model", "ngram", "prediction"}
    assert len(choice["rounds"]) >= sum(source == "target" for source in choice["sources"])
    for one in choice["rounds"]:
        assert len(one["tokens"]) == len(one["parents"]) == len(one["sources"])
        assert one["path"][0] == 0
        assert one["plan"] is None or one["plan"]["tokens"] >= 1.0
        assert [one["parents"][node] for node in one["path"][1:]] == one["path"][:-1]
    events = site.chat("hello hello hello hello", stream=True, **asked).events
    sources = [one for event in events for one in event["choices"][0].get("sources", ())]
    assert len(sources) == 24
    assert sum(source != "target" for source in sources) == events[-1]["timings"]["draft_n_accepted"]


def test_a_prediction_is_counted_exactly(tmp_path: Path) -> None:
    model = folder(tmp_path, "target")
    with outpace.load(model, method="speculative", drafter="prediction") as llm, served(llm) as site:
        text = plain(site, HELLO, max_tokens=24, **FREE).text
        for content, count in ((text, "accepted"), ([{"type": "text", "text": "never this"}], "rejected")):
            found = site.chat(max_tokens=24, prediction={"type": "content", "content": content}, **FREE).json
            assert found["choices"][0]["message"]["content"] == text
            details = found["usage"]["completion_tokens_details"]
            assert details["accepted_prediction_tokens"] == found["timings"]["draft_n_accepted"]
            assert details[f"{count}_prediction_tokens"] > 0
        assert site.chat(prediction={"type": "other"}).status == 400


def test_the_page_needs_no_other_server(site: Served) -> None:
    found = site.ask("/")
    assert found.headers["content-type"].startswith("text/html")
    policy = found.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "require-trusted-types-for 'script'" in policy
    text = found.body.decode()
    libraries = re.findall(r'<script src="(.*?)"></script>', PAGE.read_text(encoding="utf-8"))
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == len(libraries) + 1 == text.lower().count("<script") == text.lower().count("</script")
    for script in scripts:
        assert f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in policy
    assert set(re.findall(r"https?://[^\s\"'`]+", PAGE.read_text(encoding="utf-8"))) <= {"http://www.w3.org/2000/svg"}


def test_the_page_s_libraries_have_their_licences_and_versions() -> None:
    versions = dict(re.findall(r"(marked|dompurify)@([\d.]+)", (Path(__file__).parents[1] / "Makefile").read_text()))
    for name, file, licence in (("marked", "marked.umd.js", "MIT"), ("dompurify", "purify.min.js", "Apache License")):
        folder = PAGE.parent / "vendor"
        assert re.search(rf"(?i){name} v?{re.escape(versions[name])} ", (folder / file).read_text()[:200])
        assert licence in (folder / f"LICENSE-{name}").read_text()
