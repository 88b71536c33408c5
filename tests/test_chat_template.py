"""Chat templates: rendered as transformers does, in a sandbox; what a template raises is shown plainly."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from files import TEMPLATE, folder_of, set_fields, write_gguf

from outpace.core.errors import UserError
from outpace.models.text import chat_template
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
        (
            "{% for i in range(3) %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% endfor %}",
            "1/3False 2/3False 3/3True ",
        ),
        ("{% for i in [1, [2, [3]]] recursive %}{{ loop(i) if i is iterable else i }},{% endfor %}", "1,2,3,,,"),
        (
            "{{ 'a' ~ 1 ~ none }} {{ '%s-%05d' % ('b', 7) }} {{ '{:>4}|{}'.format(8, 1700000000) }}",
            "a1None b-00007    8|1700000000",
        ),
        ("{{ 'ab' | center(6) }}|{{ ['a', 'b'] | join(', ') }}|{{ 'x\\ny' | indent(2) }}", "  ab  |a, b|x\n  y"),
        ("{{ 2 * 3 + 2 ** 5 }} {{ [1] * 2 + [3] }} {{ 'ab'.replace('a', 'cc').upper() }}", "38 [1, 1, 3] CCB"),
    ],
)
def test_equal_to_transformers(tiny: Path, template: str, text: str) -> None:
    assert set_fields(tiny, chat_template=template).render(USER) == text
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tiny / "tokenizer.json"), eos_token="<|im_end|>")
    rendered = theirs.apply_chat_template(USER, chat_template=template, tokenize=False, add_generation_prompt=True)
    assert rendered == text


def test_values_reach_the_template_in_any_thread() -> None:
    rendering = ChatTemplate("{{ messages[0].content }}{{ more }}")
    assert rendering.render(USER, more=1) == "Hi1"
    assert rendering.render([{"content": "\ud83d half"}], more="\n") == "\ud83d half\n"
    assert rendering.render([{"content": "x" * 1_000_000}], more="") == "x" * 1_000_000
    with pytest.raises(UserError, match="plain JSON values"):
        rendering.render(USER, more=object())

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda number: rendering.render([{"content": str(number)}], more="!"), range(80)))
    assert found == [f"{number}!" for number in range(80)]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "no chat template"),
        ("{% for %}", "not valid"),
        ("{{ raise_exception('only two roles') }}", "only two roles"),
        ("{{ messages[9].content.x.y }}", "refuses"),
        ("{% for m in 5 %}{% endfor %}", "refuses"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses"),
        ("{{ 1 // 0 }}", "refuses"),
    ],
)
def test_templates_that_raise(tiny: Path, template: str | None, words: str) -> None:
    tokenizer = set_fields(tiny, chat_template=template)
    with pytest.raises(UserError, match=words):
        tokenizer.render(USER)


NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
NAMED = "{% set n = namespace(x='a', y=7, z=[]) %}{% for i in range(60) %}"
ENDLESS = {
    "loops": (NESTED + "{% endfor %}" * 3, "more than 20000 steps"),
    "loops that write": (NESTED + "x{% endfor %}{% endfor %}{% endfor %}", "more than 20000 steps"),
    "a filtered loop": ("{% for a in range(99999) if a < 0 %}{% endfor %}", "more than 20000 steps"),
    "a recursive loop": ("{% for a in range(99) recursive %}{{ loop(range(99)) }}{% endfor %}", "refuses"),
    "loops of a recursive loop": (
        "{% for a in range(999) recursive %}{% if loop.depth < 3 %}{{ loop(range(999)) }}{% endif %}{% endfor %}",
        "more than 20000 steps",
    ),
    "a long range": ("{% for a in range(10 ** 9) %}{% endfor %}", "Range too big"),
    "calls of filters": ("{{ range(99999) | map('trim') | list | length }}", "more than 20000 steps"),
    "recursion": ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "recursion"),
    "branching": (
        "{% macro f(x) %}{% if x %}{{ f(x - 1) }}{{ f(x - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "more than 20000 steps",
    ),
    "a long text": ("{{ 'a' * 10000000000 }}", "more than 16777216 characters"),
    "a long list": ("{% set x = [1] * 10000000000 %}", "more than 16777216 characters"),
    "a long constant": ("{{ 'a' | center(10000000000) }}", "pads"),
    "a wide text": ("{{ messages[0].role | center(10000000000) }}", "pads"),
    "many wide texts": ("{% for a in range(99) %}{{ 'a' | center(1000000) }}{% endfor %}", "characters"),
    "a method that pads": ("{{ 'a'.rjust(10000000000) }}", "pads"),
    "zeros": ("{{ 'a'.zfill(10000000000) }}", "pads"),
    "mapped": ("{{ ['a'] | map('center', 10000000000) | list }}", "pads"),
    "indented": ("{{ [1] | tojson(indent=10000000000) }}", "pads"),
    "a wide format": ("{{ '%10000000000d' % 1 }}", "pads"),
    "a width that is given": ("{{ '%*d' % (10000000000, 1) }}", "pads"),
    "a format's width": ("{{ '{:>{}}'.format(1, 10000000000) }}", "pads"),
    "a format of texts": ("{% set x = 'a' * 9999999 %}{{ '{0}{0}{0}'.format(x) }}", "characters"),
    "replaced": ("{% set x = 'a' * 99999 %}{{ x | replace('a', x) }}", "characters"),
    "joined": ("{% set x = 'a' * 99999 %}{{ x.join([1] * 99999) }}", "characters"),
    "a long number": ("{{ 10 ** (10 ** 10) }}", "bits"),
    "squares": (NAMED + "{% set n.y = n.y * n.y %}{% endfor %}", "bits"),
    "doubling": (NAMED + "{% set n.x = n.x ~ n.x %}{% endfor %}", "characters"),
    "adding": (NAMED + "{% set n.x = n.x + n.x %}{% endfor %}", "characters"),
    "blocks": (NAMED + "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}", "characters"),
    "nesting": (NAMED + "{% set n.z = [n.z, n.z] %}{% endfor %}{{ n.z }}", "characters"),
    "nesting as JSON": (NAMED + "{% set n.z = [n.z, n.z] %}{% endfor %}{{ n.z | tojson }}", "characters"),
    "nesting joined": (NAMED + "{% set n.z = [n.z, n.z] %}{% endfor %}{{ 'a' ~ n.z }}", "characters"),
    "nesting formatted": (NAMED + "{% set n.z = [n.z, n.z] %}{% endfor %}{{ '%s' % n.z }}", "characters"),
    "depth": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recursion"),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_templates_that_never_end(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(chat_template, "MAX_STEPS", 20_000)
    template, words = ENDLESS[name]
    rendering = ChatTemplate(template)
    for _ in range(2):  # counts start anew
        with pytest.raises(UserError, match=f"the model's chat template .*{words}"):
            rendering.render(USER)


def test_steps_and_characters_of_one_conversation_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_STEPS", 100)
    template = ChatTemplate("{% for m in messages %}{{ m.role | upper }}{% endfor %}")
    for _ in range(3):
        assert template.render(USER * 50) == "USER" * 50
    with pytest.raises(UserError, match="takes more than 100 steps"):
        template.render(USER * 51)
    monkeypatch.setattr(chat_template, "MAX_LENGTH", 100)
    assert template.render(USER * 25) == "USER" * 25
    with pytest.raises(UserError, match="writes more than 100 characters"):
        template.render(USER * 26)


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
