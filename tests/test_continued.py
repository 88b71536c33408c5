"""Answers that continue the last message: their prompts, in all APIs, and where their thoughts begin."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from files import folder_of, set_fields, tokens, write_gguf
from serving import Served, served
from test_library import folder
from test_server_tools import ADD, FORMAT, WITH_TOOLS
from turns import in_turn

import outpace
from outpace.core.errors import UserError
from outpace.models.text.tokenizer import Tokenizer
from outpace.tools.reasoning import ReasoningParser, Thought, has_begun_text, thought_after

BEGUN = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": " world 12 "}]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMING = CHATML.replace("m.content +", "(m.content | trim) +")
THINKING = (  # as Qwen 3 writes the last answer, and DeepSeek R1 begins a new one
    "{% for m in messages %}<|im_start|>{% if m.role == 'assistant' %}<think>\n\n</think>\n\n"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|><think>\n{% endif %}"
)


def with_template(where: Path, template: str, words: list[str] | None = None) -> Tokenizer:
    fields = {"tokenizer.ggml.tokens": words} if words else {}
    path = folder_of(write_gguf(where / "tiny.gguf", fields), where / "tiny")
    return set_fields(path, chat_template=template)


@pytest.mark.parametrize("template", [CHATML, TRIMMING])
@pytest.mark.parametrize("text", ["1 2", "1 2 ", " \n1 2\n", "1", "", "{% if %}", "ü😀"])
def test_prompts_equal_those_of_transformers(tmp_path: Path, template: str, text: str) -> None:
    ours = with_template(tmp_path, template)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "tiny")
    for content in (text, [{"type": "text", "text": text}]):
        messages = [*BEGUN, {"role": "user", "content": "go"}, {"role": "assistant", "content": content}]
        if isinstance(content, list):
            template = template.replace("m.content", "(m.content if m.content is string else m.content[0].text)")
            ours = set_fields(tmp_path / "tiny", chat_template=template)
            theirs.chat_template = template
        found = ours.render(messages, continue_final_message=True)
        expected = theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
        # Where the template trims, transformers drops the white space at the message's end too; here it is kept.
        assert found.rstrip() == expected.rstrip()
        assert found.endswith(text.lstrip() if template.count("trim") else text)
        assert ours.chat(messages, continue_final_message=True) == ours.continuation(found)


def test_thoughts_in_continued_messages_stay_as_they_are(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, THINKING)
    user = "<|im_start|>hello<|im_end|><|im_start|>"
    for text, prompt in (
        ("so", f"{user}<think>\n\n</think>\n\nso"),
        ("<think>\nso", f"{user}<think>\nso"),
        ("<think>so</think> 12", f"{user}<think>so</think> 12"),
    ):
        assert tokenizer.render([BEGUN[0], {**BEGUN[1], "content": text}], continue_final_message=True) == prompt


@pytest.mark.parametrize(
    ("template", "last", "says"),
    [
        (CHATML, {"role": "user", "content": "x"}, "only a text of the assistant"),
        (CHATML, {"role": "assistant", "content": None}, "only a text of the assistant"),
        (CHATML, {"role": "assistant", "content": [{"type": "image"}]}, "only a text of the assistant"),
        (CHATML, {"role": "assistant", "content": "x", "tool_calls": [{}]}, "without tool calls"),
        ("{{ messages[0].content }}", BEGUN[1], "does not write the last message"),
        ("{{ raise_exception('no') }}", BEGUN[1], "refuses these messages: no"),
    ],
)
def test_messages_that_cannot_be_continued(tmp_path: Path, template: str, last: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        with_template(tmp_path, template).render([BEGUN[0], last], continue_final_message=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = folder(tmp_path_factory.mktemp("served"), "target", max_position_embeddings=512)
    set_fields(Path(model), chat_template=WITH_TOOLS)
    with outpace.load(model, "layers:0") as llm, served(llm) as site:
        yield site


def texts(site: Served, temperature: float, speculation: bool) -> list[str]:
    """Return the text that each API continues the message with."""
    asked = {"messages": BEGUN, "max_tokens": 20, "temperature": temperature, "seed": 4, "ignore_eos": True}
    asked["outpace"] = {"speculation": speculation}
    flags = {"continue_final_message": True, "add_generation_prompt": False}
    by_prefix = [BEGUN[0], {**BEGUN[1], "prefix": True}]
    bodies = asked | flags, asked | {"continue_final_message": True}, asked | {"messages": by_prefix}
    answers = [site.ask("/v1/chat/completions", body) for body in bodies]
    found = [answer.choice["message"]["content"] for answer in answers]
    message = site.ask("/v1/messages", asked).json
    count = site.ask("/v1/messages/count_tokens", {"messages": BEGUN}).json["input_tokens"]
    assert count == message["usage"]["input_tokens"] == answers[0].json["usage"]["prompt_tokens"]
    return [*found, message["content"][0]["text"]]


@pytest.mark.parametrize(("temperature", "speculation"), in_turn((0.0, 0.9), (True, False)))
def test_every_api_continues_the_last_message(site: Served, temperature: float, speculation: bool) -> None:
    options = {"max_tokens": 20, "temperature": temperature, "seed": 4, "ignore_eos": True}
    expected = site.llm.chat(BEGUN, continue_final_message=True, plain=True, **options)
    assert set(texts(site, temperature, speculation)) == {expected.text}
    prompt = "<|im_start|>hello<|im_end|><|im_start|> world 12 "
    tokens = site.llm.tokenizer.continuation(prompt)
    assert site.llm.generate(tokens, **options)[0].tokens == expected.tokens
    assert site.llm.chat(BEGUN, plain=True, **options).tokens != expected.tokens
    found = site.ask("/tokenize", {"messages": BEGUN, "continue_final_message": True}).json
    assert found["tokens"] == tokens


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"add_generation_prompt": True}, "both true"),
        ({"messages": BEGUN[:1]}, "only a text of the assistant"),
        ({"response_format": FORMAT}, "a structured answer needs a whole answer"),
        ({"structured_outputs": {"regex": "a"}}, "a structured answer needs a whole answer"),
        ({"tools": [ADD], "tool_choice": "required"}, "tool_choice 'required' needs a whole answer"),
        ({"chat_template_kwargs": {"continue_final_message": True}}, "chat_template_kwargs may not have"),
    ],
)
def test_fields_that_exclude_a_continued_message_are_refused(site: Served, fields: dict[str, Any], says: str) -> None:
    body = {"messages": BEGUN, "continue_final_message": True, "max_tokens": 9} | fields
    found = site.ask("/v1/chat/completions", body)
    assert found.status == 400
    assert says in found.error["message"]


def test_offered_tools_may_be_called_after_a_continued_text(site: Served) -> None:
    found = site.chat(BEGUN, continue_final_message=True, tools=[ADD], max_tokens=9, ignore_eos=True, temperature=0)
    assert found.status == 200
    assert found.json["usage"]["completion_tokens"] == 9


def test_without_a_generation_prompt_the_template_alone_decides(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, CHATML)
    assert tokenizer.render(BEGUN[:1], add_generation_prompt=False) == "<|im_start|>user\nhello<|im_end|>\n"


@pytest.mark.parametrize(
    ("prompt", "thinks", "continued", "expected"),
    [
        ("assistant\n", False, "", Thought.NONE),
        ("assistant\n", True, "", Thought.OPTIONAL),
        ("assistant\n<think>\n", False, "", Thought.BEGUN),
        ("<think>\n\n</think>\n\n", True, "", Thought.NONE),
        ("assistant\n12", True, "12", Thought.NONE),
        ("assistant\n<think>so", True, "<think>so", Thought.CONTINUED),
        ("<think>so</think>\n", True, "<think>so</think>\n", Thought.NONE),
        ("<think>so</think> 12", True, "<think>so</think> 12", Thought.NONE),
    ],
)
def test_the_template_and_the_message_decide_where_an_answer_begins(
    prompt: str, thinks: bool, continued: str, expected: Thought
) -> None:
    assert thought_after(prompt, thinks, continued) is expected
    assert has_begun_text(continued) == continued.endswith("12")


def test_a_continued_thought_keeps_its_white_space() -> None:
    parser = ReasoningParser(Thought.CONTINUED)
    deltas = [*parser.push(" 12</think>\n\n so"), *parser.finish()]
    assert [(type(delta).__name__, delta.text) for delta in deltas] == [("ThoughtDelta", " 12"), ("TextDelta", "so")]


@pytest.mark.parametrize("speculation", [True, False])
def test_tokens_for_thoughts_alone_force_no_thought(tmp_path: Path, speculation: bool) -> None:
    """Families share their vocabulary with models that do not think."""
    words = [*tokens()[:-2], "<think>", "</think>"]
    types = [3] * 3 + [1] * (len(words) - 5) + [4] * 2
    file = write_gguf(tmp_path / "a.gguf", {"tokenizer.ggml.tokens": words, "tokenizer.ggml.token_type": types})
    with outpace.load(str(file), "layers:0") as llm, served(llm) as site:
        assert llm.tokenizer.id_of("<think>") == len(words) - 2
        asked = {"max_tokens": 60, "seed": 3, "outpace": {"speculation": speculation}}
        message = site.chat(**asked, response_format=FORMAT).choice["message"]
        assert not message.get("reasoning")
        assert json.loads(message["content"])["a"] in (True, False)
        (call, *_) = site.chat(**asked, tools=[ADD], tool_choice="required").choice["message"]["tool_calls"]
        assert call["function"]["name"] == "add"
