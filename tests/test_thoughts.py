"""Thoughts of all families: their marks are found, and thought and answer are separated in the library and all APIs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import run_command
from files import folder_of, set_fields, tokens, write_gguf
from scripted import GO, scripted
from serving import Served, served
from test_server_tools import ADD, FORMAT

import outpace
from outpace.models.files.tokenizer_folder import KNOWN_MARKS, THINK, ThoughtMarks
from outpace.models.text.tokenizer import Tokenizer
from outpace.tools.calls import TextDelta, merge_deltas
from outpace.tools.reasoning import ReasoningParser, Thought, ThoughtDelta, thought_after, thought_tokens

SO, ANSWER = "I reason here.", "The answer is 4."
TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant"
PLAIN = f"{TURNS}{GO}"


def shown_as(start: str, end: str, begin: str = "", close: str = "", field: str = "reasoning_content") -> str:
    """A template that shows thoughts of earlier answers between marks."""
    return (
        f"{{% for m in messages %}}{{{{ m.role }}}}: {{% if m.role == 'assistant' %}}{{% if m.{field} %}}"
        f"{start}{{{{ m.{field} }}}}{end}{{% endif %}}{begin}{{{{ m.content }}}}{close}{{% else %}}{{{{ m.content }}}}"
        f"{{% endif %}}\n{{% endfor %}}{{% if add_generation_prompt %}}assistant: {GO}{{% endif %}}"
    )


CHANNELS = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}"
    "<|end|><|start|>assistant{% endif %}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>"
    "{{ m.content }}<|end|>{% endfor %}<|start|>assistant" + GO
)
MESSAGES = (  # a thought is a message of its own
    "{% for m in messages %}{% if m.reasoning %}<|begin|>assistant<|t|>{{ m.reasoning }}<|end|>{% endif %}"
    "<|begin|>{{ m.role }}<|c|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant{% endif %}"
)
MESSAGE_WORDS = ("<|t|>", "<|c|>", "<|begin|>", "<|end|>", "<|return|>")
CHANNEL_WORDS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>")
CHANNEL_LINKS = ("<|channel|>", "analysis", "<|message|>", SO, "<|end|>", "<|start|>")
COMMAND = ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>")
FAMILIES: dict[str, tuple[list[str], tuple[str, ...], str]] = {  # links, special tokens, template
    "text": (["<think>", SO, "</think>", ANSWER], (), PLAIN + "{# </think> #}"),
    "special": (["<think>", SO, "</think>", ANSWER], ("<think>", "</think>"), PLAIN + "{# </think> #}"),
    "brackets": (["[THINK]", SO, "[/THINK]", ANSWER], ("[THINK]", "[/THINK]"), PLAIN + "{# [THINK] [/THINK] #}"),
    "a prefix": (["<seed:think>", SO, "</seed:think>", ANSWER], (), shown_as("<seed:think>", "</seed:think>")),
    "an answer in marks": (
        [COMMAND[0], SO, *COMMAND[1:3], ANSWER, COMMAND[3]],
        COMMAND,
        shown_as(*COMMAND),
    ),
    "any tokens": (["<|a|>", SO, "<|b|>", ANSWER], ("<|a|>", "<|b|>"), shown_as("<|a|>", "<|b|>", field="reasoning")),
    "channels": (
        [*CHANNEL_LINKS, "assistant<|channel|>final<|message|>", ANSWER, "<|return|>"],
        (*CHANNEL_WORDS, "assistant<|channel|>final<|message|>"),
        CHANNELS,
    ),
    "a sentence": (
        ["Here is my thought process:", SO, "Here is my response:", ANSWER],
        (),
        PLAIN + "{# Here is my thought process: #}",
    ),
}


def parts_of(site: Served) -> list[tuple[str, str]]:
    """Return thought and answer in each API, whole and streamed."""
    options = {"max_tokens": 20, "temperature": 0}
    message = site.chat("hi", **options).choice["message"]
    deltas = [event["choices"][0]["delta"] for event in site.chat("hi", **options, stream=True).events]
    asked = {"messages": [{"role": "user", "content": "hi"}], **options}
    blocks = site.ask("/v1/messages", asked).json["content"]
    items = site.ask("/v1/responses", {"input": "hi", "max_output_tokens": 20, "temperature": 0}).json["output"]
    assert [block["type"] for block in blocks] == ["thinking", "text"]
    assert [item["type"] for item in items] == ["reasoning", "message"]
    streamed = ("".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning", "content"))
    return [
        (message["reasoning"], message["content"]),
        tuple(streamed),  # type: ignore[list-item]
        (blocks[0]["thinking"], blocks[1]["text"]),
        (items[0]["content"][0]["text"], items[1]["content"][0]["text"]),
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_thought_and_answer_come_apart_in_every_api_and_in_the_library(tmp_path: Path, name: str) -> None:
    links, special, template = FAMILIES[name]
    with outpace.load(scripted(tmp_path / "a.gguf", links, special, template)) as llm, served(llm) as site:
        assert set(parts_of(site)) == {(SO, ANSWER)}
        result = llm.chat("hi", max_tokens=20)
        assert (result.reasoning, result.text) == (SO, ANSWER)
        stream = llm.stream([{"role": "user", "content": "hi"}], max_tokens=20)
        pieces = list(stream)
        assert "".join(piece.reasoning for piece in pieces) == stream.finish().reasoning == SO
        assert "".join(piece.text for piece in pieces) == ANSWER
        assert stream.finish().tokens == result.tokens
        shown = llm.chat("hi", max_tokens=20, skip_special_tokens=False)
        assert (shown.text, shown.reasoning) == ("".join(links).replace("<|return|>", ""), "")
        (continued,) = llm.generate(llm.tokenizer.continuation(GO), max_tokens=20)
        assert continued.tokens == result.tokens
        assert not continued.reasoning  # only a conversation has one


def test_the_command_line_writes_the_answer_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    links, special, template = FAMILIES["brackets"]
    asked = ("generate", "hi", "--target", scripted(tmp_path / "a.gguf", links, special, template))
    _, out, err = run_command(*asked)
    assert out == f"{ANSWER}\n"
    assert err.startswith(f"{SO}\n")
    found = json.loads(run_command(*asked, "--json")[1])
    assert (found["text"], found["reasoning"]) == (ANSWER, SO)


def test_a_thought_may_be_continued(tmp_path: Path) -> None:
    links, special, template = FAMILIES["brackets"]
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": f"[THINK]{SO}"}]
    with outpace.load(scripted(tmp_path / "a.gguf", links, special, template)) as llm, served(llm) as site:
        result = llm.chat(begun, max_tokens=20, continue_final_message=True)
        assert (result.reasoning, result.text) == ("", ANSWER)
        found = site.chat(begun, max_tokens=20, temperature=0, continue_final_message=True).choice["message"]
        assert (found.get("reasoning", ""), found["content"]) == ("", ANSWER)


def tokenizer_of(where: Path, template: str, special: tuple[str, ...] = ()) -> Tokenizer:
    words = [*tokens(), *special]
    kinds = [3] * 3 + [1] * (len(words) - 3 - len(special)) + [3] * len(special)
    fields = {"tokenizer.ggml.tokens": words, "tokenizer.ggml.token_type": kinds}
    return set_fields(folder_of(write_gguf(where / "a.gguf", fields), where / "a"), chat_template=template)


@pytest.mark.parametrize(
    ("template", "special", "expected"),
    [
        (TURNS, ("<think>", "</think>"), None),  # families share their vocabulary with models that do not think
        ("{{ messages }}{# no <reasoning_effort> #}", (), None),
        ("{{ messages | tojson }}{# reasoning #}", (), None),
        (TURNS + "<think>\n", ("<think>", "</think>"), THINK),
        (TURNS + "{# content.split('</think>')[-1] #}", (), THINK),
        (TURNS + "{# <|begin_of_thought|>..<|end_of_thought|> #}", (), ("<|begin_of_thought|>", "<|end_of_thought|>")),
        (TURNS + "{# '<|inner_prefix|>' '<|inner_suffix|>' #}", (), ("<|inner_prefix|>", "<|inner_suffix|>")),
        (TURNS + "{# ◁think▷ ◁/think▷ #}", (), ("◁think▷", "◁/think▷")),
        (
            TURNS + "{# <think></think><response></response> #}",
            (),
            (*("<think>", "</think>"), ("<response>",), ("</response>",)),
        ),
        (TURNS + "{# <|channel>thought\n<channel|> #}", (), KNOWN_MARKS[1]),
        (TURNS + "{# <|a|> m['reasoning_content'] <|b|> #}", ("<|a|>", "<|b|>"), ("<|a|>", "<|b|>")),
        (shown_as("<|x|>", "<|y|>", "<|z|>"), ("<|x|>", "<|y|>", "<|z|>"), ("<|x|>", "<|y|>", ("<|z|>",))),
        (shown_as("Why: ", "\nSo: ", field="thinking"), (), ("Why:", "So:")),
        (MESSAGES, MESSAGE_WORDS, ("<|t|>", "<|end|>", ("<|begin|>assistant", "<|c|>"), ("<|end|>",))),
    ],
)
def test_marks_are_found_by_the_template(
    tmp_path: Path, template: str, special: tuple[str, ...], expected: Any
) -> None:
    tokenizer = tokenizer_of(tmp_path, template, special)
    assert tokenizer.thought_marks == (ThoughtMarks(*expected) if isinstance(expected, tuple) else expected)


CHANNEL_MARKS, FRAMED = KNOWN_MARKS[0], ThoughtMarks(*COMMAND[:2], (COMMAND[2],), (COMMAND[3],))
HEAD, TURN, FINAL = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant", "<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("marks", "text", "expected"),
    [
        (CHANNEL_MARKS, f"{HEAD}so{TURN}{FINAL}Hi <b", [ThoughtDelta("so"), TextDelta("Hi <b")]),
        (CHANNEL_MARKS, f"{HEAD}a{TURN}{HEAD}b{TURN}{FINAL}c<|end|>", [ThoughtDelta("a\nb"), TextDelta("c")]),
        (CHANNEL_MARKS, f"<|channel|>commentary<|message|>a{TURN}{FINAL}b", [TextDelta("a\nb")]),
        (CHANNEL_MARKS, f"{FINAL}Hi", [TextDelta("Hi")]),
        (CHANNEL_MARKS, f"{HEAD}so{TURN}<|channel|>fi", [ThoughtDelta("so")]),  # cut within a mark
        (CHANNEL_MARKS, "Hi <|end|>", [TextDelta("Hi <|end|>")]),  # no mark began it
        (FRAMED, f"{COMMAND[0]}so{COMMAND[1]}\n{COMMAND[2]} Hi{COMMAND[3]}", [ThoughtDelta("so"), TextDelta("Hi")]),
        (FRAMED, f"Hi{COMMAND[3]}", [TextDelta(f"Hi{COMMAND[3]}")]),
        (KNOWN_MARKS[1], "<|channel>thought\nso<channel|>Hi", [ThoughtDelta("so"), TextDelta("Hi")]),
        (
            KNOWN_MARKS[2],
            "Here is my thought process: so\nHere is my response: Hi",
            [ThoughtDelta("so\n"), TextDelta("Hi")],
        ),
        (KNOWN_MARKS[2], "Here is my thought", [TextDelta("Here is my thought")]),
    ],
)
def test_all_marks_are_read_for_every_split_of_the_text(marks: ThoughtMarks, text: str, expected: list[Any]) -> None:
    for pieces in ([*text], *((text[:cut], text[cut:]) for cut in range(len(text)))):
        parser = ReasoningParser(Thought.OPTIONAL, marks)
        assert merge_deltas([*(one for piece in pieces for one in parser.push(piece)), *parser.finish()]) == expected


@pytest.mark.parametrize(
    ("marks", "prompt", "continued", "expected"),
    [
        (ThoughtMarks("[THINK]", "[/THINK]"), "[/INST][THINK]", "", Thought.BEGUN),
        (ThoughtMarks("[THINK]", "[/THINK]"), "[/INST]", "", Thought.OPTIONAL),
        (ThoughtMarks("[THINK]", "[/THINK]"), "[THINK]so", "[THINK]so", Thought.CONTINUED),
        (ThoughtMarks("[THINK]", "[/THINK]"), "[THINK]so[/THINK]Hi", "[THINK]so[/THINK]Hi", Thought.NONE),
        (FRAMED, f"<|user|>{COMMAND[0]}{COMMAND[1]}{COMMAND[2]}", "", Thought.NONE),
        (KNOWN_MARKS[1], "model\n<|channel>thought\n<channel|>", "", Thought.NONE),
        (CHANNEL_MARKS, "<|message|>hello<|end|><|start|>assistant", "", Thought.OPTIONAL),
        (CHANNEL_MARKS, f"hello<|end|><|start|>assistant{HEAD}{TURN}", "", Thought.NONE),
    ],
)
def test_the_prompt_begins_or_closes_a_thought(
    marks: ThoughtMarks, prompt: str, continued: str, expected: Thought
) -> None:
    assert thought_after(prompt, True, continued, marks) is expected


def test_tokens_of_thoughts_are_counted_by_any_marks() -> None:
    pieces = ["<|channel|>", "analysis", "<|message|>", "so", "<|end|>", "<|start|>", "assistant", FINAL, "Hi"]
    assert thought_tokens([piece.encode() for piece in pieces], False, CHANNEL_MARKS) == 5
    assert thought_tokens([b"caf\xc3", b"\xa9[/THINK]", b"x"], True, ThoughtMarks("[THINK]", "[/THINK]")) == 2


STRUCTURED = {"brackets": ["[THINK]", SO, "[/THINK]"], "channels": [*CHANNEL_LINKS, "assistant"]}


@pytest.mark.parametrize("name", STRUCTURED)
@pytest.mark.parametrize("opened", [False, True])
def test_structures_and_calls_follow_a_thought(tmp_path: Path, name: str, opened: bool) -> None:
    links, (_, special, template) = STRUCTURED[name], FAMILIES[name]
    start = {"brackets": "[THINK]", "channels": "<|message|>"}[name] if opened else GO
    if opened:
        begun = "".join(links[: links.index(start) + 1])
        template, links = template.replace(GO, begun), links[links.index(start) + 1 :]
    answer, call = '{"a": true}', '{"name": "add", "arguments": {"x": 1}}'
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 0}
    for written, fields in ((answer, {"response_format": FORMAT}), (call, {"tools": [ADD], "tool_choice": "required"})):
        file = tmp_path / f"{len(fields)}.gguf"
        model = scripted(file, [*links, written], special, "{{ tools }}" + template, start)
        with outpace.load(model) as llm, served(llm, tool_parser="json") as site:
            found = site.chat("hi", **options, **fields).choice["message"]
            assert found["reasoning"] == SO
            if written == answer:
                result = llm.chat("hi", max_tokens=40, response_format=FORMAT)
                assert (result.reasoning, result.text) == (SO, found["content"]) == (SO, answer)
            else:
                assert found["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"x": 1}'}
