"""Chat templates: rendered as transformers does, in a sandbox; what a template raises is shown plainly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from files import TEMPLATE, folder_of, set_fields, write_gguf
from line_interrupts import interrupted_at, places, visited_lines
from processes import children
from turns import one_of

from outpace.core.errors import UserError
from outpace.models.text import chat_template, template_process
from outpace.models.text.chat_template import ChatTemplate
from outpace.models.text.tokenizer import Tokenizer

USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return folder_of(write_gguf(tmp_path / "tiny.gguf"), tmp_path / "tiny")


def test_render(tiny: Path) -> None:
    assert Tokenizer.from_folder(tiny).render(USER) == "<|im_start|>Hi<|im_end|>"
    (tiny / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}\n  {% generation %}\n{{ m | tojson }}\n"
        "{% endgeneration %}\n{% endfor %}\n"
    )
    assert Tokenizer.from_folder(tiny).render(USER) == '<|im_start|>{"role": "user", "content": "Hi"}\n'


def test_template_by_name(tiny: Path) -> None:
    named = [{"name": "tool_use", "template": "{{ tools[0].name }}"}, {"name": "default", "template": TEMPLATE}]
    for form in (named, {entry["name"]: entry["template"] for entry in named}):
        tokenizer = set_fields(tiny, chat_template=form)
        assert tokenizer.render(USER) == "<|im_start|>Hi<|im_end|>"
        assert tokenizer.render(USER, tools=[{"name": "search"}]) == "search"
    tokenizer = set_fields(tiny, chat_template=named[:1])
    assert not tokenizer.has_template
    with pytest.raises(UserError, match="no chat template, only one for tool_use"):
        tokenizer.render(USER)


def test_a_prompt_is_a_users_message_where_a_template_takes_one(tiny: Path) -> None:
    chat = set_fields(tiny, chat_template="{{ messages[0].role }}:{{ messages[0].content }}")
    assert chat.encode_prompt("hello") == chat.encode("user:hello")
    refusing = set_fields(tiny, chat_template="{{ raise_exception('the first message must be of the system') }}")
    assert refusing.encode_prompt("hello") == chat.encode("hello")
    plain = set_fields(tiny, chat_template=None)
    assert plain.encode_prompt("hello") == chat.encode("hello")
    with pytest.raises(UserError, match="half a character"):
        plain.encode_prompt("\ud800")


def test_templates_in_files(tiny: Path) -> None:
    (tiny / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert Tokenizer.from_folder(tiny).render(USER) == "json"
    (tiny / "chat_template.jinja").write_text("jinja")
    assert Tokenizer.from_folder(tiny).render(USER) == "jinja"
    (tiny / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"chat_template\.jinja is not UTF-8"):
        Tokenizer.from_folder(tiny)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ tools is none }} {{ documents is none }} {{ add_generation_prompt }}", "True True True"),
        ("{{ eos_token }}|{{ unknown }}|{{ unknown is defined }}", "<|im_end|>||False"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ {'é': '<&>'} | tojson }}", '{"é": "<&>"}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=2, sort_keys=true) }}", '{\n  "a": 2,\n  "b": 1\n}'),
        ("{%- set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{% macro f(a) %}[{{ a }}]{% endmacro %}{{ f('é😀') }}", "[é😀]"),
    ],
)
def test_equal_to_transformers(tiny: Path, template: str, text: str) -> None:
    assert set_fields(tiny, chat_template=template).render(USER) == text
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tiny / "tokenizer.json"), eos_token="<|im_end|>")
    rendered = theirs.apply_chat_template(USER, chat_template=template, tokenize=False, add_generation_prompt=True)
    assert rendered == text


def test_values_reach_the_template_and_one_process_serves_many_threads() -> None:
    rendering = ChatTemplate("{{ messages[0].content }}{{ more }}")
    assert rendering.render(USER, more=1) == "Hi1"
    assert rendering.render([{"content": "\ud83d half"}], more="\n") == "\ud83d half\n"
    assert rendering.render([{"content": "x" * 1_000_000}], more="") == "x" * 1_000_000
    with pytest.raises(UserError, match="plain JSON values"):
        rendering.render(USER, more=object())

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda number: rendering.render([{"content": str(number)}], more="!"), range(80)))
    assert found == [f"{number}!" for number in range(80)]
    rendering.close()


def process_of(template: ChatTemplate) -> subprocess.Popen[bytes]:
    assert template._process is not None
    return template._process


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_process_ends_with_its_owner() -> None:
    template = ChatTemplate("{{ messages | length }}")
    assert template.render([]) == "0"
    first = process_of(template).pid
    template.close()
    template.close()
    assert not is_running(first)
    assert template.render(USER) == "1"
    second = process_of(template).pid
    del template
    assert not is_running(second)


def test_a_process_that_died_is_replaced() -> None:
    template = ChatTemplate("{{ messages | length }}")
    assert template.render([]) == "0"
    process_of(template).kill()
    process_of(template).wait()
    assert template.render(USER) == "1"
    template.close()


def test_an_interrupt_at_any_line_leaves_no_process() -> None:
    template = ChatTemplate("{{ messages | length }}")

    def work() -> None:
        assert template.render([]) == "0"
        template.close()

    before = children()
    for place in places(visited_lines(work)):
        interrupted_at(place, work)
        assert template.render(USER) == "1", place
        template.close()
        assert children() <= before, place


def test_the_process_ends_when_its_pipe_does() -> None:
    template = ChatTemplate("x")
    template.render([])
    process = process_of(template)
    assert process.stdin is not None
    process.stdin.close()  # as the system does for a parent that was killed
    assert process.wait(20) == 0
    template.close()


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "no chat template"),
        ("{% for %}", "not valid"),
        ("{{ raise_exception('only two roles') }}", "only two roles"),
        ("{{ messages[9].content.x.y }}", "refuses"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses"),
        ("{{ 1 // 0 }}", "refuses"),
    ],
)
def test_templates_that_raise(tiny: Path, template: str | None, words: str) -> None:
    tokenizer = set_fields(tiny, chat_template=template)
    with pytest.raises(UserError, match=words):
        tokenizer.render(USER)


LONG = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
ENDLESS = {
    "loops": LONG + "{% endfor %}" * 3,
    "loops that write": LONG + "x{% endfor %}{% endfor %}{% endfor %}",
    "a long text": "{{ 'a' * 10000000000 }}",
    "a wide text": "{{ 'a' | center(10000000000) }}",
    "a long number": "{{ 10 ** (10 ** 10) }}",
    "doubling": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "nesting": "{% set n = namespace(x=[]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "depth": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
}


@pytest.mark.parametrize("name", one_of(2, ENDLESS))
def test_templates_that_never_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    script = tmp_path / "template_process.py"
    code = Path(template_process.__file__).read_text()
    script.write_text(code.replace("SECONDS = 5 ", "SECONDS = 0.6 "))
    monkeypatch.setattr(chat_template.template_process, "__file__", str(script))
    template = ChatTemplate(ENDLESS[name])
    with pytest.raises(UserError, match="the model's chat template"):
        template.render(USER)
    template.text = "{{ 'fine' }}"
    template.close()
    assert template.render(USER) == "fine"
    template.close()


def test_a_process_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("x")
    template.render([])
    process_of(template).send_signal(signal.SIGSTOP)  # it takes no processor time, so only patience ends it
    monkeypatch.setattr(chat_template, "PATIENCE", 0.2)
    with pytest.raises(UserError, match="stopped"):
        template.render([])
    monkeypatch.undo()
    assert template.render([]) == "x"
    template.close()


@pytest.mark.parametrize(
    "reach",
    [
        "{{ ''.__class__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__ }}",
        "{{ cycler.__init__.__globals__.os.system('touch executed') }}",
        "{{ ('a%s' % 'b').format.__self__ }}{{ '{0.__class__}'.format(1) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ messages.pop() }}",
    ],
)
def test_the_sandbox_holds(tiny: Path, reach: str) -> None:
    try:
        said = set_fields(tiny, chat_template=reach).render(USER)
    except UserError as error:
        said = str(error)
    assert not any(secret in said for secret in ("<class", "<module", "<code", "built-in", "root:", "__main__"))
