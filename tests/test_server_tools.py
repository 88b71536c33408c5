"""Structured output, tools and reasoning over HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from files import TEMPLATE, set_fields
from serving import Answered, Served, served
from test_library import folder
from test_server_apis import named

import outpace
from outpace.core.errors import UserError
from outpace.server import tool_calls
from outpace.server.options import ServerOptions
from outpace.tools.definitions import FORMATS


def only(name: str, values: list[Any]) -> dict[str, Any]:
    """Return a schema of objects with one field."""
    fields = {"properties": {name: {"enum": values}}, "required": [name]}
    return {"type": "object", **fields, "additionalProperties": False}


PARAMETERS, SCHEMA = only("x", [1, 2]), only("a", [True, False])
ADD = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": PARAMETERS}}
FLIP = {"type": "function", "function": {"name": "flip", "parameters": PARAMETERS}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
TEXT = {"format": {"type": "json_schema", "name": "it", "schema": SCHEMA}}  # in the Responses API
WITH_TOOLS = "{% for tool in tools or [] %}{{ tool['function']['name'] }}{% endfor %}" + TEMPLATE


@contextmanager
def templated(folders: pytest.TempPathFactory, template: str) -> Iterator[Served]:
    model = folder(folders.mktemp("served"), "target", max_position_embeddings=512)
    set_fields(Path(model), chat_template=template)
    with outpace.load(model, "layers:0") as llm, served(llm) as site:
        yield site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with templated(tmp_path_factory, WITH_TOOLS) as site:
        yield site


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model whose template opens a thought."""
    with templated(tmp_path_factory, TEMPLATE + "<think>\n{# </think> #}") as site:
        yield site


def test_a_schema_is_followed(site: Served) -> None:
    asked = {"response_format": FORMAT, "seed": 3, "max_tokens": 60}
    choices = [site.chat(**asked, outpace={"speculation": speculation}).choice for speculation in (True, False)]
    assert choices[0] == choices[1]
    assert choices[0]["finish_reason"] == "stop"
    assert set(json.loads(choices[0]["message"]["content"])) == {"a"}


def test_other_structures_are_followed(site: Served) -> None:
    for structured, allowed in (
        ({"choice": ["hello", "world"]}, {"hello", "world"}),
        ({"regex": "[ab]c"}, {"ac", "bc"}),
    ):
        chat = site.chat(structured_outputs=structured, max_tokens=10).choice["message"]["content"]
        text = site.complete(structured_outputs=structured, max_tokens=10).choice["text"]
        assert {chat, text} <= allowed
    found = site.ask("/v1/responses", {"input": "hello", "text": TEXT}).json
    assert set(json.loads(found["output"][0]["content"][0]["text"])) == {"a"}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "jsn"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strng"}}}},
        {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"tools": [{"type": "function"}]},
        {"tools": "add"},
        {"tools": [ADD, ADD]},
        {"tools": [ADD], "tool_choice": "sometimes"},
        {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
        {"tool_choice": "required"},
        {"tools": [ADD], "tool_choice": "required", "structured_outputs": {"regex": "a"}},
    ],
)
def test_wrong_structures_and_tools_are_refused(site: Served, fields: dict[str, Any]) -> None:
    for stream in (False, True):
        found = site.chat(max_tokens=10, stream=stream, **fields)
        assert found.status == 400, found.body
        assert found.error["message"]
    site.wait_idle()


def called(answered: Answered) -> list[dict[str, Any]]:
    """Return the tool calls of a streamed chat."""
    calls: dict[int, dict[str, Any]] = {}
    for event in answered.events:
        for one in (event["choices"][0]["delta"] if event["choices"] else {}).get("tool_calls", ()):
            call = calls.setdefault(one["index"], {"function": {"name": "", "arguments": ""}})
            call |= {name: one[name] for name in ("id", "type") if name in one}
            for name, text in one["function"].items():
                call["function"][name] += text
    return [calls[number] for number in sorted(calls)]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "flip"}}])
def test_a_forced_call(site: Served, choice: Any) -> None:
    asked = {"tools": [ADD, FLIP], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 100, "seed": 1}
    whole = site.chat(**asked).json["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] is None
    (call,) = whole["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert call["function"]["name"] in ("add", "flip") if choice == "required" else "flip"
    assert json.loads(call["function"]["arguments"])["x"] in (1, 2)
    stream = site.chat(**asked, stream=True)
    (found,) = called(stream)
    assert found["function"] == call["function"]
    last = [event["choices"][0] for event in stream.events if event["choices"]][-1]
    assert last["finish_reason"] == "tool_calls"


def test_calls_in_messages_and_responses(site: Served) -> None:
    tool = {"name": "add", "input_schema": PARAMETERS}
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 100, "tools": [tool]}
    body |= {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "seed": 1}
    whole = site.ask("/v1/messages", body).json
    (block,) = whole["content"]
    assert (block["type"], block["name"], whole["stop_reason"]) == ("tool_use", "add", "tool_use")
    assert block["input"]["x"] in (1, 2)
    events = named(site.ask("/v1/messages", {**body, "stream": True}))
    streamed = "".join(e["delta"]["partial_json"] for name, e in events if name == "content_block_delta")
    assert json.loads(streamed) == block["input"]
    flat = {"type": "function", "name": "add", "parameters": PARAMETERS}
    body = {"input": "hello", "tools": [flat], "tool_choice": "required", "parallel_tool_calls": False, "seed": 1}
    (item,) = site.ask("/v1/responses", body).json["output"]
    assert (item["type"], item["name"]) == ("function_call", "add")
    events = named(site.ask("/v1/responses", {**body, "stream": True}))
    done = next(event for name, event in events if name == "response.function_call_arguments.done")
    assert done["arguments"] == item["arguments"]
    assert json.loads(done["arguments"])["x"] in (1, 2)


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a choice without the random ids of its calls."""
    calls = [{**call, "id": ""} for call in choice["message"].get("tool_calls", ())]
    return {**choice, "message": {**choice["message"], "tool_calls": calls}}


def test_an_answer_is_a_call_or_has_the_requested_form(site: Served) -> None:
    flat = {"type": "function", "name": "add", "parameters": PARAMETERS}
    has_called = set()
    for seed in range(10):
        asked = {"tools": [ADD], "parallel_tool_calls": False, "seed": seed, "max_tokens": 400}
        asked |= {"response_format": FORMAT} if seed % 2 else {"structured_outputs": {"json": SCHEMA}}
        plain, choice = (site.chat(**asked, outpace={"speculation": found}).choice for found in (False, True))
        assert without_ids(plain) == without_ids(choice)
        calls = called(site.chat(**asked, stream=True))
        assert [call["function"] for call in calls] == [
            call["function"] for call in choice["message"].get("tool_calls", ())
        ]
        body = {"input": "hello world", "tools": [flat], "parallel_tool_calls": False, "text": TEXT, "seed": seed}
        (item,) = site.ask("/v1/responses", {**body, "max_output_tokens": 400}).json["output"]
        if calls:
            assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
            assert json.loads(calls[0]["function"]["arguments"])["x"] in (1, 2)
            assert item["arguments"] == calls[0]["function"]["arguments"]
        else:
            assert choice["finish_reason"] == "stop"
            assert set(json.loads(choice["message"]["content"])) == {"a"}
            assert item["content"][0]["text"] == choice["message"]["content"]
        has_called.add(bool(calls))
    assert has_called == {False, True}
    forced = site.chat(tools=[ADD], tool_choice="required", response_format=FORMAT, max_tokens=100).choice
    assert forced["message"]["tool_calls"]


@pytest.mark.parametrize("stop", ['{"x"', '": '])
def test_a_call_that_a_stop_string_cuts_is_not_complete(site: Served, stop: str) -> None:
    asked = {"tools": [ADD], "tool_choice": "required", "max_tokens": 100, "seed": 1}
    whole = site.chat(**asked, stop=stop).choice
    streamed = site.chat(**asked, stop=stop, stream=True)
    last = [event["choices"][0] for event in streamed.events if event["choices"]][-1]
    assert [call["function"] for call in called(streamed)] == [
        call["function"] for call in whole["message"].get("tool_calls", ())
    ]
    assert whole["finish_reason"] == last["finish_reason"] == "stop"
    tool = {"name": "add", "input_schema": PARAMETERS}
    body = {"messages": [{"role": "user", "content": "hello world"}], "max_tokens": 100, "tools": [tool], "seed": 1}
    found = site.ask("/v1/messages", {**body, "tool_choice": {"type": "any"}, "stop_sequences": [stop]}).json
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", stop)
    flat = {"type": "function", "name": "add", "parameters": PARAMETERS}
    body = {"input": "hello world", "tools": [flat], "tool_choice": "required", "stop": stop, "seed": 1}
    found = site.ask("/v1/responses", body).json
    if [item["type"] for item in found["output"]] == ["function_call"]:
        assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "stop"})
        assert found["output"][0]["status"] == "incomplete"


def test_tool_parser_selects_the_form_of_calls(site: Served) -> None:
    asked = {"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 100, "seed": 1}
    expected = {
        "hermes": "<tool_call>",
        "tools": "<tools>",
        "mistral": "[TOOL_CALLS]",
        "xml": "<tool_call>\n<function=add>",
        "openai": "<|channel|>commentary to=functions.add",
    }
    for parser in ("auto", *FORMATS):
        with served(site.llm, tool_parser=parser) as other:
            found = other.chat(**asked, return_sources=True).choice
        (call,) = found["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["x"] in (1, 2)
        assert "".join(found["token_texts"]).startswith(expected.get(parser, '{"name": "add", "'))
    with pytest.raises(UserError, match=r"unknown tool_parser 'hermse', allowed are auto, hermes, .*did you mean"):
        ServerOptions(tool_parser="hermse")


def test_tools_that_the_template_ignores(thinking: Served) -> None:
    found = thinking.chat(tools=[ADD], max_tokens=5)
    assert (found.status, found.error["code"]) == (400, "tools_not_supported")
    assert "--tool-prompt" in found.error["message"]
    assert thinking.chat(tools=[ADD], tool_choice="none", max_tokens=5).status == 200
    bare = thinking.chat(max_tokens=5).json["usage"]["prompt_tokens"]
    with served(thinking.llm, tool_prompt=True) as site:
        found = site.chat(tools=[ADD], max_tokens=5)
        assert found.status == 200
        assert found.json["usage"]["prompt_tokens"] > bare


@pytest.mark.parametrize("speculation", [True, False])
def test_a_schema_is_followed_after_a_thought(
    thinking: Served, speculation: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_calls, "thought_rules", lambda *_: 'thought: /[a-z]{1,9}/ "</think>" /[ \\n]*/')
    asked = {"response_format": FORMAT, "max_tokens": 200, "seed": 3, "outpace": {"speculation": speculation}}
    whole = thinking.chat(**asked).json
    message, usage = whole["choices"][0]["message"], whole["usage"]
    assert json.loads(message["content"])["a"] in (True, False)
    assert re.fullmatch("[a-z]{1,9}", message["reasoning"])
    thought = len(thinking.llm.tokenizer.continuation(f"{message['reasoning']}</think>"))
    assert 2 <= usage["completion_tokens_details"]["reasoning_tokens"] <= thought
    streamed = thinking.chat(**asked, stream=True, stream_options={"include_usage": True}).events
    assert streamed[-1]["usage"] == {**usage, "prompt_tokens_details": streamed[-1]["usage"]["prompt_tokens_details"]}
    deltas = [event["choices"][0]["delta"] for event in streamed if event["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]
    body = {"input": "hello world", "text": TEXT, "max_output_tokens": 200, "seed": 3}
    found = thinking.ask("/v1/responses", body).json
    assert [item["type"] for item in found["output"]] == ["reasoning", "message"]
    details = found["usage"]["output_tokens_details"]
    assert details["reasoning_tokens"] == usage["completion_tokens_details"]["reasoning_tokens"]


def test_a_wrong_structure_after_a_thought_is_refused(thinking: Served) -> None:
    found = thinking.chat(response_format={"type": "nothing"})
    assert (found.status, found.error["param"]) == (400, "response_format")


def test_arguments_are_numbers_that_json_can_hold() -> None:
    for number in ("1e999", "-1e999", "NaN", "Infinity"):
        text = f'{{"x": {number}}}'
        assert tool_calls.parse_arguments(text) == text
    assert tool_calls.parse_arguments('{"x": 1e300}') == {"x": 1e300}


STRICT = (  # Qwen3.5 and Mistral check these
    "{% for message in messages %}"
    "{% if message['role'] == 'system' and not loop.first %}{{ raise_exception('not first') }}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}"
    "{% if call['id']|length != 9 %}{{ raise_exception('ids must have length 9') }}{% endif %}{% endfor %}"
    "{% if message['tool_call_id'] and message['tool_call_id']|length != 9 %}{{ raise_exception('ids') }}{% endif %}"
    "{% endfor %}"
)


def test_strict_templates_get_one_system_message_and_short_ids(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Coding clients send system messages within a conversation, and calls with the server's ids."""
    call = {"id": "call_1234567890", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    turns = [
        {"role": "user", "content": "hello"},
        {"role": "system", "content": "12"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1234567890", "content": "5"},
        {"role": "developer", "content": "world"},
    ]
    with templated(tmp_path_factory, STRICT + WITH_TOOLS) as site:
        found = site.chat([{"role": "system", "content": "34"}, *turns], return_token_ids=True, max_tokens=1).json
        kept = [{**turn} for turn in turns if turn["role"] in ("user", "assistant", "tool")]
        kept[1]["tool_calls"], kept[2]["tool_call_id"] = [{**call, "id": "123456789"}], "123456789"
        expected = site.llm.tokenizer.chat([{"role": "system", "content": "34\n\n12\n\nworld"}, *kept])
        assert found["prompt_token_ids"] == expected
    with templated(tmp_path_factory, "{{ raise_exception('no ' ~ messages[0]['role']) }}") as site:
        refused = site.chat(turns, max_tokens=1)
        assert (refused.status, "no user" in refused.error["message"]) == (400, True)
