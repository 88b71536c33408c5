"""Fields as client libraries send them: null for no value at every depth, and histories as they keep them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from files import TEMPLATE, set_fields
from serving import Served, served
from test_library import folder

import outpace
from outpace.server.chat_completions import ChatBody, template_messages
from outpace.server.completions import CompletionBody
from outpace.server.messages import MessagesBody
from outpace.server.request_body import Body, validate
from outpace.server.responses import ResponsesBody

REASONING = "{{ reasoning_effort }} {{ enable_thinking }} {% for message in messages %}{{ message }}{% endfor %}"
USER = {"role": "user", "content": "hello world"}
DUMPED = {  # by model_dump() of the OpenAI, LiteLLM and OpenRouter clients, and of the agents that keep them
    **{
        "role": "assistant",
        "content": "hello",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
    },
    **{"tool_calls": None, "reasoning": None, "reasoning_details": None, "provider_specific_fields": None},
}
CALL = {"id": "call_1", "type": "function", "index": 0, "function": {"name": "f", "arguments": '{"x": 1}'}}
BODIES: dict[str, tuple[type[Body], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatBody, {"messages": [USER, DUMPED, USER]}),
    "/v1/completions": (CompletionBody, {"prompt": "hello world"}),
    "/v1/messages": (MessagesBody, {"messages": [USER], "max_tokens": 2}),
    "/v1/responses": (ResponsesBody, {"input": "hello world"}),
}
OTHERS = ("functions", "function_call", "web_search_options", "audio", "verbosity", "reasoning_effort", "guided_json")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Start a server with `--strict`."""
    model = folder(tmp_path_factory.mktemp("served"), "target", max_position_embeddings=512)
    set_fields(Path(model), chat_template=REASONING + TEMPLATE)
    with outpace.load(model) as llm, served(llm, strict=True) as site:
        yield site


@pytest.mark.parametrize("path", BODIES)
def test_null_means_absent(path: str, site: Served) -> None:
    kind, given = BODIES[path]
    asked = {
        "temperature": 0,
        **({} if path == "/v1/messages" else {"max_output_tokens" if "resp" in path else "max_tokens": 2}),
    }
    nulls = dict.fromkeys({*kind.model_fields, *OTHERS} - given.keys() - asked.keys())
    found = site.ask(path, {**given, **asked})
    with_nulls = site.ask(path, {**given, **asked, **nulls})
    assert found.status == with_nulls.status == 200, with_nulls.body
    assert "x-ignored-fields" not in with_nulls.headers
    texts = [
        one.json.get("choices") or one.json.get("content") or one.json["output"][0]["content"]
        for one in (found, with_nulls)
    ]
    assert texts[0] == texts[1]


def test_null_means_absent_inside_of_fields(site: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean", "format": None, "enum": None}},
        "required": ["a"],
    }
    inner = {"name": "it", "description": None, "strict": None, "schema": {**schema, "additionalProperties": False}}
    function = {"name": "f", "description": None, "parameters": None, "strict": None}
    found = site.chat(
        [
            {**USER, "name": None},
            {**DUMPED, "tool_calls": []},
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": None}]},
        ],
        stream_options={"include_usage": None, "continuous_usage_stats": None},
        outpace={"method": None, "nodes": None},
        response_format={"type": "json_schema", "json_schema": inner, "schema": None},
        structured_outputs={"json": None, "regex": None},
        tools=[{"type": "function", "function": function, "cache_control": None}],
        tool_choice="none",
        max_tokens=40,
    )
    assert found.status == 200, found.body
    assert (
        found.choice["message"]["content"].replace(" ", "").replace("\n", "").replace("\t", "").replace("\r", "")[:5]
        == '{"a":'
    )


def test_histories_as_clients_keep_them() -> None:
    given = [
        {"role": "system", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {**USER, "cache_control": {"type": "ephemeral"}},
        {**DUMPED, "content": None, "tool_calls": [CALL], "reasoning": "why"},
        {"role": "tool", "tool_call_id": "call_1", "content": "2", "name": None},
        {**DUMPED, "annotations": [{"type": "url_citation", "url_citation": {"url": "https://a.b", "title": "t"}}]},
        {**DUMPED, "content": None, "refusal": "no"},
        {**DUMPED, "content": [{"type": "refusal", "refusal": "no"}]},
        {
            **DUMPED,
            "content": "",
            "tool_calls": [{**CALL, "function": {"name": "f", "arguments": empty}} for empty in ("", None)],
        },
    ]
    body, ignored = validate(ChatBody, {"messages": given}, is_strict=True)
    assert ignored == []
    assert template_messages(body.messages) == [
        {"role": "system", "content": [{"type": "text", "text": "a"}]},
        {"role": "user", "content": "hello world"},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "why"},
        {"role": "tool", "content": "2", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "hello"},
        {"role": "assistant", "content": "no"},
        {"role": "assistant", "content": [{"type": "text", "text": "no"}]},
        {"role": "assistant", "content": "", "tool_calls": given[-1]["tool_calls"]},
    ]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": [USER, {**DUMPED, "function_call": "f"}]}, "messages.1.function_call is 'f'"),
        ({"audio": {"voice": "alloy"}}, "audio is"),
        ({"web_search_options": {"search_context_size": "low"}}, "web_search_options is"),
        ({"functions": [{"name": "f"}]}, "use tools"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
            "messages.0.content.0.text is None",
        ),
    ],
)
def test_values_that_would_change_the_answer_are_refused(fields: dict[str, Any], words: str, site: Served) -> None:
    found = site.ask("/v1/chat/completions", {"messages": [USER], **fields})
    assert found.status == 400
    assert words in found.error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        ("/v1/chat/completions", {}, " "),
        ("/v1/chat/completions", {"reasoning_effort": "low"}, "low "),
        ("/v1/chat/completions", {"reasoning_effort": "none"}, "none False"),
        (
            "/v1/chat/completions",
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "none True",
        ),
        ("/v1/chat/completions", {"chat_template_kwargs": {"reasoning_effort": "max", "self": 1, "a b": []}}, "max "),
        ("/v1/responses", {"reasoning": {"effort": "high", "summary": None}}, "high "),
        ("/v1/responses", {"reasoning": {"effort": None}}, " "),
        ("/v1/messages", {"thinking": {"type": "disabled"}}, "none False"),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, " True"),
        ("/v1/messages", {"thinking": {"type": "adaptive"}}, " "),
        *[
            (path, fields, expected)
            for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses")
            for fields, expected in (
                ({"enable_thinking": False}, " False"),
                ({"enable_thinking": True, "reasoning_effort": "high"}, "high True"),
                ({"thinking": {"type": "disabled"}}, "none False"),
                ({"thinking": True}, " True"),
                ({"think": False}, "none False"),
                ({"reasoning": {"effort": "minimal"}}, "minimal "),
                ({"reasoning": {"enabled": False}}, "none False"),
                ({"chat_template_kwargs": {"reasoning_effort": "x"}, "enable_thinking": False}, "x False"),
                ({"chat_template_args": {"enable_thinking": 5}, "thinking": False}, "none 5"),
            )
        ],
        ("/v1/messages", {"output_config": {"effort": "medium"}}, "medium "),
    ],
)
def test_the_effort_of_reasoning_reaches_the_template(
    path: str, fields: dict[str, Any], expected: str, site: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[str] = []
    tokenizer = site.llm.tokenizer
    render = type(tokenizer).render
    monkeypatch.setattr(
        type(tokenizer),
        "render",
        lambda own, *given, **more: rendered.append(render(own, *given, **more)) or rendered[-1],
    )
    found = site.ask(path, {**BODIES[path][1], **fields})
    assert found.status == 200, found.body
    assert [text.partition(" {")[0] for text in rendered if "hello world" in text] == [expected]
