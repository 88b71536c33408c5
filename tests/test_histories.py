"""Conversations as clients keep them: items and parts of any type, thoughts, Claude Code's first line, /tokenize."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from files import TEMPLATE
from serving import Answered, Served, served
from test_server_tools import ADD, templated

from outpace.models.text.template_form import text_of
from outpace.models.text.tokenizer import Tokenizer
from outpace.server import chat_completions, messages, responses
from outpace.server.errors import ApiError
from outpace.server.request_body import validate
from outpace.server.tool_calls import parse_arguments

PUBLISHED = json.loads((Path(__file__).parent / "published_types.json").read_text())
USER = {"role": "user", "content": "hello"}
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
MEDIA = ("image", "image_url", "input_image", "input_audio", "input_file", "file")
KNOWN = (  # types that have a meaning of their own here
    *("message", "text", "input_text", "output_text", "refusal", "reasoning", "function_call", "function_call_output"),
    *("reasoning_text", "thinking", "redacted_thinking", "tool_use", "tool_result"),
)
RENDERS_ALL = (
    "{% for tool in tools or [] %}{{ tool['function']['name'] }}{% endfor %}{{ color }}"
    "{% for message in messages %}<|im_start|>{{ message['reasoning_content'] }}{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{{ call['function']['name'] }}{% endfor %}<|im_end|>{% endfor %}"
    "{{ '>' if add_generation_prompt }}"
)
IN_TURN = (  # as Gemma's template
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with templated(tmp_path_factory, RENDERS_ALL) as site:
        yield site


def body_of(path: str, turns: list[Any], **fields: Any) -> dict[str, Any]:
    limit = {"max_output_tokens" if path == RESPONSES else "max_tokens": 1}
    return {"input" if path == RESPONSES else "messages": turns, **limit, **fields}


def plain(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with their contents as text and the arguments of their calls as objects."""

    def with_object(call: dict[str, Any]) -> dict[str, Any]:
        arguments = call["function"].get("arguments") or "{}"
        found = parse_arguments(arguments) if isinstance(arguments, str) else arguments
        return {**call, "function": {**call["function"], "arguments": found}}

    found = [{**message, "content": text_of(message["content"])} for message in given]
    return [
        message | {name: [*map(with_object, message[name])] for name in ("tool_calls",) if name in message}
        for message in found
    ]


def converted(path: str, turns: list[Any], **fields: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Return what the chat template gets of a conversation, and the names of what is left out."""
    given = body_of(path, turns, **fields)
    if path == CHAT:
        body, names = validate(chat_completions.ChatBody, given, is_strict=True)
        return plain(chat_completions.template_messages(body.messages)), names
    if path == MESSAGES:
        found, names = validate(messages.MessagesBody, given, is_strict=True)
        return plain(messages.template_messages(found)), names
    items, names = validate(responses.ResponsesBody, given, is_strict=True)
    return plain(responses.template_messages(items)), names


def is_shown(part: dict[str, Any]) -> bool:
    """Return whether a published part wants the model to see more than text."""
    if part["type"] != "document":
        return part["type"] in MEDIA
    source, parts = part["source"], part["source"].get("content")
    return source["type"] not in ("text", "content") or (isinstance(parts, list) and any(map(is_shown, parts)))


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_every_published_type_is_accepted(path: str) -> None:
    """Only what the user shows the model is refused."""
    seen, refused = set(), set()
    for turn in PUBLISHED[path]:
        parts = turn["content"] if isinstance(turn.get("content"), list) else []
        kinds = [turn.get("type", "message"), *(part["type"] for part in parts)]
        if turn.get("role") == "user" and any(map(is_shown, parts)):
            refused |= {*kinds}
            with pytest.raises(ApiError, match=rf"\.1\.content\.0\.type is '{kinds[1]}', but"):
                converted(path, [USER, turn, USER])
            continue
        found, names = converted(path, [USER, turn, USER])
        assert found[0] == found[-1] == USER
        named, given, text = {name.partition("=")[2] for name in names}, json.dumps(turn), json.dumps(found)
        assert {*kinds} - {*KNOWN} <= named, turn
        if "text/plain" not in given:
            assert not re.search("the (encrypted_content|signature|url|data|input_schema)", text), turn
        for shown in re.findall('"(the (?:text|stdout|logs|output))"', given):
            assert shown in text, turn
        seen |= {*kinds}
    assert len(seen) > (2 if path == CHAT else 20), sorted(seen)
    assert refused


@pytest.mark.parametrize(
    ("path", "turn", "message", "names"),
    [
        (
            RESPONSES,
            {"type": "item_of_next_year", "content": [{"type": "text", "text": "a"}, {"type": "image"}]},
            {"role": "assistant", "content": "a"},
            ["input.1=item_of_next_year"],
        ),
        (
            RESPONSES,
            {"type": "shell_call_output", "call_id": "c", "output": [{"stderr": "b", "stdout": "a", "outcome": {}}]},
            {"role": "assistant", "content": "a\nb"},
            ["input.1=shell_call_output"],
        ),
        (RESPONSES, {"type": "web_search_call", "action": {"query": "x"}}, None, ["input.1=web_search_call"]),
        (RESPONSES, {"id": "msg_1"}, None, ["input.1=item_reference"]),
        (
            RESPONSES,
            {"type": "note", "role": "developer", "content": "a"},
            {"role": "system", "content": "a"},
            ["input.1=note"],
        ),
        (
            MESSAGES,
            {"role": "assistant", "content": [{"type": "mcp_tool_result", "content": [{"type": "text", "text": "a"}]}]},
            {"role": "assistant", "content": "a"},
            ["messages.1.content.0=mcp_tool_result"],
        ),
        (
            MESSAGES,
            {"role": "user", "content": [{"type": "x", "text": {"text": "a"}}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "a\nb"},
            ["messages.1.content.0=x"],
        ),
        (
            MESSAGES,
            {"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "a"}, "title": "t"}]},
            {"role": "user", "content": "t\na"},
            ["messages.1.content.0=document"],
        ),
        (
            MESSAGES,
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image"}]}]},
            {"role": "tool", "tool_call_id": "c", "content": ""},
            ["messages.1.content.0.content.0=image"],
        ),
        (
            MESSAGES,
            {"role": "system", "content": [{"type": "tool_addition", "tool": {"name": "f"}}]},
            None,
            ["messages.1.content.0=tool_addition"],
        ),
        (
            CHAT,
            {"role": "assistant", "content": "a", "reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]},
            {"role": "assistant", "content": "a"},
            ["messages.1.reasoning_details.0=reasoning.encrypted"],
        ),
        (
            CHAT,
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "image_url"}, {"type": "text", "text": "a"}]},
            {"role": "tool", "tool_call_id": "c", "content": "a"},
            ["messages.1.content.0=image_url"],
        ),
        (
            CHAT,
            {"role": "user", "content": [{"type": "x", "content": "a", "input": {"text": "b"}}]},
            {"role": "user", "content": "a"},
            ["messages.1.content.0=x"],
        ),
        (
            CHAT,
            {"role": "assistant", "audio": {"id": "a"}, "content": None},
            {"role": "assistant", "content": ""},
            ["messages.1.audio"],
        ),
        (
            CHAT,
            {"role": "assistant", "function_call": {"name": "f", "arguments": '{"x": 1}'}},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
            },
            [],
        ),
        (
            CHAT,
            {"role": "function", "name": "f", "content": "a"},
            {"role": "tool", "name": "f", "tool_call_id": "", "content": "a"},
            [],
        ),
    ],
)
def test_the_text_of_unknown_types_is_kept_and_the_rest_named(
    path: str, turn: dict[str, Any], message: dict[str, Any] | None, names: list[str]
) -> None:
    kept = [] if message is None else [message]
    assert converted(path, [USER, turn, USER]) == ([USER, *kept, USER], names)


def test_calls_of_custom_tools_are_calls() -> None:
    asked = {"name": "patch", "input": "*** Begin"}
    call = {"id": "c", "type": "function", "function": {"name": "patch", "arguments": {"input": "*** Begin"}}}
    expected = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ]
    turns = [
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "custom", "custom": asked}]},
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ]
    assert converted(CHAT, [USER, *turns])[0][1:] == expected
    items = [
        {"type": "custom_tool_call", "call_id": "c", **asked},
        {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "done"}]},
    ]
    found, names = converted(RESPONSES, [USER, *items])
    assert (found[1:], names) == (expected, ["input.1=custom_tool_call", "input.2=custom_tool_call_output"])
    item = {"type": "call_of_next_year", "call_id": "c", "name": "patch", "arguments": {"input": "*** Begin"}}
    assert converted(RESPONSES, [USER, {**item, "output": "done"}])[0][1:] == expected


@pytest.mark.parametrize(
    ("path", "turn", "says"),
    [
        (CHAT, {"role": "user", "content": [{"type": "image_url"}]}, "messages.0.content.0.type is 'image_url'"),
        (CHAT, {"role": "user", "content": [{"type": "video_url"}]}, "messages.0.content.0.type is 'video_url'"),
        (RESPONSES, {"role": "user", "content": [{"type": "input_file"}]}, "input.0.content.0.type is 'input_file'"),
        (RESPONSES, {"type": "input_image", "image_url": "x"}, "input.0.type is 'input_image'"),
        (MESSAGES, {"role": "system", "content": [{"type": "image"}]}, "messages.0.content.0.type is 'image'"),
        (
            MESSAGES,
            {"role": "user", "content": [{"type": "document", "title": "t", "source": {"type": "base64"}}]},
            "messages.0.content.0.type is 'document'",
        ),
        (MESSAGES, {"role": "user"}, "messages.0.content is missing"),
    ],
)
def test_what_the_user_shows_the_model_is_refused(path: str, turn: dict[str, Any], says: str, site: Served) -> None:
    for stream in (False, True):
        found = site.ask(path, body_of(path, [turn], stream=stream))
        assert (found.status, says in found.json["error"]["message"]) == (400, True), found.body


def test_nothing_that_is_kept_locks_a_conversation(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Neither with --strict, nor with a template in which roles must alternate."""
    turns = {
        RESPONSES: [USER, {"type": "compaction", "encrypted_content": "x"}, USER],
        MESSAGES: [USER, {"role": "assistant", "content": [{"type": "server_tool_use", "new": 1}]}, USER, USER],
        CHAT: [USER, {**USER, "new": 1}, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
    }
    with templated(tmp_path_factory, IN_TURN + TEMPLATE) as own, served(own.llm, strict=True) as site:
        for path, given in turns.items():
            for stream in (False, True):
                found = site.ask(path, body_of(path, given, stream=stream))
                assert found.status == 200, found.body
                assert found.headers["x-ignored-fields"]
        assert site.ask(CHAT, body_of(CHAT, turns[CHAT], new=1)).status == 400
        ids = site.ask(CHAT, body_of(CHAT, turns[CHAT], return_token_ids=True)).json["prompt_token_ids"]
        assert site.llm.tokenizer.decode(ids, skip_special=False) == (
            "<|im_start|>hello\nhello<|im_end|><|im_start|>a\nb<|im_end|>"
        )


THOUGHT = "first this"
RESULT = {"role": "tool", "tool_call_id": "c", "content": "5"}
ADDED = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
ITEM = {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"x": 1}'}
BLOCK = {"type": "tool_use", "id": "c", "name": "add", "input": {"x": 1}}
CALLED = {**ADDED, "function": {"name": "add", "arguments": {"x": 1}}}


@pytest.mark.parametrize(
    ("path", "turns"),
    [
        *[
            (CHAT, [{"role": "assistant", name: value, "tool_calls": [ADDED]}, RESULT])
            for name, value in (
                ("reasoning_content", THOUGHT),
                ("reasoning", THOUGHT),
                ("reasoning_text", THOUGHT),
                ("thinking", THOUGHT),
                ("content", [{"type": "thinking", "thinking": THOUGHT}]),
                ("content", [{"type": "thinking", "thinking": [{"type": "text", "text": THOUGHT}]}]),
                ("thinking_blocks", [{"type": "thinking", "thinking": THOUGHT, "signature": "x"}]),
                ("reasoning_details", [{"type": "reasoning.text", "text": THOUGHT, "index": 0}]),
            )
        ],
        *[
            (RESPONSES, [{"type": "reasoning", **fields}, ITEM, {"type": "function_call_output", **output}])
            for output in ({"call_id": "c", "output": "5"},)
            for fields in (
                {"id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": THOUGHT}]},
                {"summary": [{"type": "summary_text", "text": THOUGHT}], "encrypted_content": "x"},
                {"summary": [{"type": "summary_text", "text": "no"}], "content": [{"text": THOUGHT}]},
            )
        ],
        *[
            (MESSAGES, [{"role": "assistant", "content": [*blocks, BLOCK]}, {"role": "user", "content": [result]}])
            for result in ({"type": "tool_result", "tool_use_id": "c", "content": "5"},)
            for blocks in (
                [{"type": "thinking", "thinking": THOUGHT, "signature": "x"}],
                [{"type": "redacted_thinking", "data": "x"}, {"type": "thinking", "thinking": THOUGHT}],
            )
        ],
    ],
)
def test_thoughts_reach_the_template_in_one_form(path: str, turns: list[Any]) -> None:
    own = {"role": "assistant", "content": "", "reasoning_content": THOUGHT, "tool_calls": [CALLED]}
    assert converted(path, [USER, *turns, USER]) == ([USER, own, RESULT, USER], [])


def test_merged_items_keep_their_thoughts() -> None:
    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}

    empty = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    items = [thought("a"), {"role": "assistant", "content": "b"}, empty, thought("c"), ITEM, thought("d")]
    found, _ = converted(RESPONSES, [USER, *items, {"type": "function_call_output", "call_id": "c", "output": "5"}])
    own = {"role": "assistant", "content": "b", "reasoning_content": "a\nc\nd", "tool_calls": [CALLED]}
    assert found == [USER, own, RESULT]
    blocks = [
        {"type": "thinking", "thinking": "a"},
        {"type": "text", "text": "b"},
        {"type": "thinking", "thinking": "c"},
    ]
    found, _ = converted(MESSAGES, [USER, {"role": "assistant", "content": blocks}])
    assert found[1] == {"role": "assistant", "content": "b", "reasoning_content": "a\nc"}


LINE = "x-anthropic-billing-header: cc_version=2.1.197.aaa; cc_entrypoint=cli; cch=fa690;"
RULES = "You are careful; x-anthropic-billing-header: is a name.\nBe = brief;"


def prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which every rendered prompt is added."""
    found: list[str] = []
    render = Tokenizer.render
    monkeypatch.setattr(Tokenizer, "render", lambda *given, **more: found.append(render(*given, **more)) or found[-1])
    return found


@pytest.mark.parametrize(
    ("path", "turns", "fields"),
    [
        (MESSAGES, [USER], {"system": [{"type": "text", "text": LINE}, {"type": "text", "text": RULES}]}),
        (MESSAGES, [USER], {"system": f"{LINE}\n{RULES}"}),
        (MESSAGES, [{"role": "system", "content": f"{LINE} {RULES}"}, USER], {}),
        (RESPONSES, [USER], {"instructions": f"{LINE}\r\n{RULES}"}),
        (RESPONSES, [{"role": "developer", "content": [{"type": "input_text", "text": LINE + RULES}]}, USER], {}),
        (CHAT, [{"role": "system", "content": LINE}, {"role": "system", "content": RULES}, USER], {}),
        (CHAT, [{"role": "system", "content": [{"type": "text", "text": t} for t in (LINE, RULES)]}, USER], {}),
        (CHAT, [{"role": "system", "content": f"{LINE[:-1]}\n\n{RULES}"}, USER], {}),
    ],
)
def test_claude_code_s_changing_first_line_is_left_out(
    path: str, turns: list[Any], fields: dict[str, Any], site: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = prompts(monkeypatch)
    assert site.ask(path, body_of(path, turns, **fields)).status == 200
    assert seen == [f"<|im_start|>{RULES}<|im_end|><|im_start|>hello<|im_end|>>"]


def test_no_other_line_is_left_out(site: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = prompts(monkeypatch)
    turns = [{"role": "system", "content": f"{RULES}\n{LINE}"}, {"role": "user", "content": f"{LINE}\nhello"}]
    assert site.chat(turns, max_tokens=1).status == 200
    assert seen == ["".join(f"<|im_start|>{turn['content']}<|im_end|>" for turn in turns) + ">"]


def test_the_prefix_cache_survives_the_changing_line(site: Served) -> None:
    def usage(mark: str) -> dict[str, int]:
        system = f"x-anthropic-billing-header: cc_version=2.{mark}; cch={mark};\n{'hello world ' * 20}"
        found: dict[str, int] = site.ask(MESSAGES, body_of(MESSAGES, [USER], system=system)).json["usage"]
        return found

    usage("one")
    second = usage("two")
    assert second["cache_read_input_tokens"] > 5 * second["input_tokens"]


@pytest.mark.parametrize(
    ("turns", "fields"),
    [
        ([USER], {}),
        ([USER], {"tools": [ADD]}),
        ([USER], {"tools": [ADD], "tool_choice": "none"}),
        ([USER], {"tools": [ADD, {"type": "web_search"}], "parallel_tool_calls": False}),
        ([USER], {"chat_template_kwargs": {"color": "red"}, "reasoning_effort": "low"}),
        ([USER, {"role": "assistant", "content": "he"}], {"continue_final_message": True}),
        ([USER, {"role": "assistant", "content": "he", "prefix": True}], {}),
        ([USER], {"add_generation_prompt": False}),
        ([{"role": "system", "content": f"{LINE}\n{RULES}"}, USER], {"tools": [ADD]}),
        ([USER, {"role": "assistant", "content": "", "reasoning": "so", "tool_calls": [ADDED]}, RESULT], {}),
    ],
)
def test_tokenize_has_the_prompt_of_a_chat(turns: list[Any], fields: dict[str, Any], site: Served) -> None:
    prompt = site.chat(turns, max_tokens=1, return_token_ids=True, **fields).json["prompt_token_ids"]
    found = site.ask("/tokenize", {"messages": turns, **fields}).json
    assert (found["tokens"], found["count"]) == (prompt, len(prompt))
    assert found["tokens"] != site.ask("/tokenize", {"messages": [{"role": "user", "content": ""}]}).json["tokens"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": [USER], "tools": [ADD, ADD]}, "two functions named 'add'"),
        ({"messages": [USER], "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs may not have tools"),
        ({"messages": [USER], "tools": [ADD], "tool_choice": "sub"}, "tool_choice is 'sub'"),
        ({"messages": [USER], "documents": [{"text": "a"}], "max_tokens": 5}, "documents is"),
        ({"messages": []}, "messages is []"),
        ({"messages": [USER], "prompt": "hello"}, "give either prompt or messages"),
        ({"messages": None}, "give either prompt or messages"),
    ],
)
def test_tokenize_refuses_what_a_chat_refuses(fields: dict[str, Any], says: str, site: Served) -> None:
    found: Answered = site.ask("/tokenize", fields)
    assert (found.status, says in found.error["message"]) == (400, True), found.body
