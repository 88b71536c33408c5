"""Conversations reach a chat template in the form that it renders, from the library and from the server alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from files import folder_of, set_fields, write_gguf
from serving import served
from test_library import folder

import outpace
from outpace.core.errors import UserError
from outpace.models.text.tokenizer import Tokenizer

LOOP, END = "{% for m in messages %}[{{ m.role }}]", "{% endfor %}"
TEXT = LOOP + "{{ m.content }}" + END
JOINED = LOOP + "{{ '' + m.content }}" + END  # refuses null and parts
PARTS = LOOP + "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}" + END
FIRST = LOOP + "{{ m.content[0].text }}" + END
EITHER = "{% if m.content is string %}{{ m.content }}{% else %}"
BOTH = LOOP + EITHER + "{% for p in m.content %}{{ p.text }}+{% endfor %}{% endif %}" + END
OF_USERS = "{% if m.role == 'user' %}{% for p in m.content %}{{ p.text }}{% endfor %}{% else %}"
USERS = LOOP + OF_USERS + "{{ m.content | trim }}{% endif %}" + END
NOTHING = LOOP + END


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return folder_of(write_gguf(tmp_path / "tiny.gguf"), tmp_path / "tiny")


@pytest.fixture
def render(tiny: Path) -> Any:
    """A function that renders messages with a template."""
    made: dict[str, Tokenizer] = {}

    def rendered(template: str, messages: list[dict[str, Any]], **values: Any) -> str:
        if template not in made:
            made[template] = set_fields(tiny, chat_template=template)
        made[template].chat(messages, **values)  # no text is lost
        return made[template].render(messages, **values)

    return rendered


@pytest.mark.parametrize(
    ("template", "content", "expected"),
    [
        (TEXT, "hi", "hi"),
        (TEXT, parts("hi"), "hi"),
        (TEXT, parts("hi", "you"), "hi\nyou"),
        (TEXT, [], ""),
        (JOINED, None, ""),
        (JOINED, parts("hi"), "hi"),
        (PARTS, "hi", "hi"),
        (PARTS, parts("hi", " you"), "hi you"),
        (PARTS, "", ""),
        (FIRST, "hi", "hi"),
        (FIRST, parts("hi", "you"), "hi\nyou"),  # it shows the first part only
        (BOTH, "hi", "hi"),
        (BOTH, parts("hi", "you"), "hi+you+"),
        (USERS, "hi", "hi"),
        (USERS, parts("hi"), "hi"),
        (TEXT.replace("m.content", "m.content | tojson"), parts("hi"), '"hi"'),
    ],
)
def test_a_content_is_rendered_as_the_template_takes_it(
    render: Any, template: str, content: Any, expected: str
) -> None:
    for role in ("user", "system", "assistant", "tool"):
        message: dict[str, Any] = {"role": role, "content": content}
        assert render(template, [message]) == f"[{role}]{expected}"
        assert message == {"role": role, "content": content}  # what the caller gave is not changed


@pytest.mark.parametrize(
    ("template", "content"), [(TEXT, "hi"), (PARTS, parts("hi", "you")), (BOTH, "hi"), (BOTH, parts("hi", "you"))]
)
def test_what_a_template_takes_is_rendered_as_transformers_does(
    tiny: Path, render: Any, template: str, content: Any
) -> None:
    messages = [{"role": "user", "content": content}]
    ours = render(template, messages)
    theirs = transformers.AutoTokenizer.from_pretrained(tiny)
    assert ours == theirs.apply_chat_template(messages, tokenize=False)


@pytest.mark.parametrize("content", ["hello", parts("hello"), parts("a", "hello")])
def test_a_text_that_no_form_shows_is_an_error(render: Any, content: Any) -> None:
    for role in ("user", "system", "tool"):
        messages = [{"role": "assistant", "content": "x"}, {"role": role, "content": content}]
        with pytest.raises(UserError, match=rf"text of messages\.1 would be lost.* no content of the role '{role}'"):
            render(NOTHING, messages)


def test_a_part_that_is_no_text_is_refused_by_name(render: Any) -> None:
    image = [*parts("hi"), {"type": "image_url", "image_url": {"url": "https://a.b"}}]
    with pytest.raises(UserError, match=r"content of messages\.0 has a part of type 'image_url', .* text only"):
        render(TEXT, [{"role": "user", "content": image}])
    assert render(PARTS, [{"role": "user", "content": image}]) == "[user]hi"  # the template's own decision


EACH = "{% for c in m.tool_calls %}{{ c.function.name }} ARGS;{% endfor %}"
CALLS = LOOP + "{% if m.tool_calls %}" + EACH + "{% else %}{{ m.content }}{% endif %}" + END
TO_JSON = CALLS.replace("ARGS", "{{ c.function.arguments | tojson }}")
JOINING = CALLS.replace("ARGS", "{{ '' + c.function.arguments }}")
ITEMS = CALLS.replace("ARGS", "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }},{% endfor %}")
BY_NULL = (  # as DeepSeek R1: calls only where the content is null, arguments joined
    LOOP + "{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}{{ c.function.name + ' ' + "
    "c.function.arguments }};{% endfor %}{% elif m.content is not none %}{{ m.content }}{% endif %}" + END
)


def called(arguments: Any, content: Any = None, **more: Any) -> list[dict[str, Any]]:
    call = {"id": "call_1", "type": "function", "function": {"name": "sh", "arguments": arguments}}
    answer = {"role": "assistant", "content": content, "tool_calls": [call], **more}
    return [{"role": "user", "content": "go"}, answer, {"role": "tool", "tool_call_id": "call_1", "content": "a.txt"}]


TEXT_ARGUMENTS = '{"cmd":"ls", "n": 1.50}'  # in the client's own spelling


@pytest.mark.parametrize(
    ("template", "arguments", "expected"),
    [
        (TO_JSON, TEXT_ARGUMENTS, '{"cmd": "ls", "n": 1.5}'),
        (TO_JSON, {"cmd": "ls"}, '{"cmd": "ls"}'),
        (JOINING, TEXT_ARGUMENTS, TEXT_ARGUMENTS),
        (JOINING, {"cmd": "é"}, '{"cmd": "é"}'),
        (CALLS.replace("ARGS", "{{ c.function.arguments }}"), TEXT_ARGUMENTS, TEXT_ARGUMENTS),  # no Python dict
        (ITEMS, TEXT_ARGUMENTS, "cmd=ls,n=1.5,"),
        (TO_JSON, "", "{}"),
        (JOINING, None, "{}"),
        (JOINING, "no json", "no json"),
        (TO_JSON, "no json", '"no json"'),
        (TO_JSON, '{"x": 1e999}', '"{\\"x\\": 1e999}"'),
        (BY_NULL, TEXT_ARGUMENTS, TEXT_ARGUMENTS),
    ],
)
def test_arguments_are_objects_or_text_as_the_template_takes_them(
    render: Any, template: str, arguments: Any, expected: str
) -> None:
    for content in (None, ""):
        assert render(template, called(arguments, content)) == f"[user]go[assistant]sh {expected};[tool]a.txt"


@pytest.mark.parametrize("content", ["Let me look.", parts("Let me look.")])
def test_the_text_of_an_answer_with_calls_is_kept(render: Any, content: Any) -> None:
    apart = "[user]go[assistant]Let me look.[assistant]sh {};[tool]a.txt"
    assert render(BY_NULL, called("{}", content)) == apart
    assert render(JOINING, called("{}", content)) == apart
    both = JOINING.replace("{% if m.tool_calls %}", "{% if m.tool_calls %}{{ m.content }}|")
    assert render(both, called("{}", content)) == "[user]go[assistant]Let me look.|sh {};[tool]a.txt"
    refusing = "{% if m.role == 'assistant' and messages | length > 3 %}{{ raise_exception('no') }}{% endif %}"
    assert "sh {}" in render(JOINING.replace(LOOP, LOOP + refusing), called("{}", content))


FIELDS = ("reasoning_content", "reasoning", "thinking")
IN_PARTS = (
    EITHER
    + "{% for p in m.content %}{% if p.type == 'thinking' %}<think>{{ p.thinking }}</think>{% else %}{{ p.text }}"
    "{% endif %}{% endfor %}{% endif %}"
)


@pytest.mark.parametrize("known", [*FIELDS, None])
def test_thoughts_of_earlier_answers_have_the_name_that_the_template_knows(render: Any, known: str | None) -> None:
    shown = f"{{% if m.{known} %}}<think>{{{{ m.{known} }}}}</think>{{% endif %}}{{{{ m.content }}}}"
    for sent in FIELDS:
        messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "x", sent: "so"}]
        assert render(LOOP + (shown if known else IN_PARTS) + END, messages) == "[user]go[assistant]<think>so</think>x"


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}"
    "{% endif %}{% if m.tool_call_id and m.tool_call_id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
SILENT = (  # shows the last system message only, as DeepSeek R1
    "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.s = m.content %}"
    "{% endif %}{% endfor %}{{ ns.s }}{% for m in messages %}{% if m.role != 'system' %}[{{ m.role }}]{{ m.content }}"
    "{% endif %}{% endfor %}"
)


def test_strict_templates_get_one_system_message_and_short_ids(render: Any) -> None:
    given = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "go"},
        {"role": "system", "content": parts("b")},
        {"role": "tool", "tool_call_id": "call_of_many_characters", "content": "x"},
    ]
    assert render(STRICT, given) == "[system]a\n\nb[user]go[tool]x"
    assert render(SILENT, given) == "a\n\nb[user]go[tool]x"
    assert render(TEXT, given) == "[system]a[user]go[system]b[tool]x"
    with pytest.raises(UserError, match="refuses these messages: never"):
        render("{{ raise_exception('never') }}", given)


@pytest.mark.parametrize("template", [PARTS, TEXT, JOINED, BOTH])
def test_the_server_renders_what_the_library_does(tmp_path: Path, template: str) -> None:
    model = folder(tmp_path, "target", max_position_embeddings=512)
    set_fields(Path(model), chat_template=template + "{# tools #}{{ tools }}")
    with outpace.load(model) as llm, served(llm) as site:
        for content in ("hello world", parts("hello world"), parts("hello", "world")):
            messages = [{"role": "system", "content": content}, {"role": "user", "content": content}]
            expected = llm.tokenizer.chat(messages)
            assert llm.chat(messages, max_tokens=1).prompt_tokens == len(expected)
            assert site.chat(messages, max_tokens=1).json["usage"]["prompt_tokens"] == len(expected)
            assert site.ask("/tokenize", {"messages": messages}).json["tokens"] == expected
        for path, body in (
            ("/v1/messages", {"messages": [{"role": "user", "content": parts("hello")}], "max_tokens": 1}),
            ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]}),
        ):
            count = site.ask(path, body | {"max_output_tokens": 1} if "input" in body else body).json["usage"][
                "input_tokens"
            ]
            assert count == llm.chat("hello", max_tokens=1).prompt_tokens


def test_calls_reach_a_template_that_joins_them_by_every_api(tmp_path: Path) -> None:
    model = folder(tmp_path, "target", max_position_embeddings=512)
    set_fields(Path(model), chat_template=BY_NULL)
    arguments = '{"cmd":  "ls"}'
    with outpace.load(model) as llm, served(llm) as site:
        messages = called(arguments)
        expected = llm.tokenizer.continuation(f"[user]go[assistant]sh {arguments};[tool]a.txt")
        assert llm.tokenizer.chat(messages) == expected
        assert llm.chat(messages, max_tokens=1).prompt_tokens == len(expected)
        assert site.chat(messages, max_tokens=1).json["usage"]["prompt_tokens"] == len(expected)
        items = [
            {"role": "user", "content": "go"},
            {"type": "function_call", "call_id": "c", "name": "sh", "arguments": arguments},
            {"type": "function_call_output", "call_id": "c", "output": "a.txt"},
        ]
        asked = {"input": items, "max_output_tokens": 1}
        assert site.ask("/v1/responses", asked).json["usage"]["input_tokens"] == len(expected)
        blocks = [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "sh", "input": {"cmd": "ls"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "a.txt"}]},
        ]
        usage = site.ask("/v1/messages", {"messages": blocks, "max_tokens": 1}).json["usage"]
        read = usage["input_tokens"] + usage["cache_read_input_tokens"]
        assert read == len(expected) - 1  # one space less in the JSON text


def test_the_form_is_found_once(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = set_fields(tiny, chat_template=BOTH)
    tokenizer.chat(called("{}", "x"))
    template, count = tokenizer._renderer("default"), 0
    original = template.render

    def counted(*messages: Any, **values: Any) -> str:
        nonlocal count
        count += 1
        return original(*messages, **values)

    monkeypatch.setattr(template, "render", counted)
    tokenizer.chat(called("{}", "y"))
    assert count == 1
