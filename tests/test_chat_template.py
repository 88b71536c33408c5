"""Chat templates: rendered as transformers does, in a sandbox; what a template raises is shown plainly."""

from __future__ import annotations

from pathlib import Path

import pytest
from files import TEMPLATE, folder_of, set_fields, write_gguf

from outpace.core.errors import UserError
from outpace.models.tokenizer import Tokenizer

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
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    assert set_fields(tiny, chat_template=named).render(USER) == "<|im_start|>Hi<|im_end|>"


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
