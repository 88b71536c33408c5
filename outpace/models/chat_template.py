"""Renders a model's chat template, a Jinja text from its files, in a sandbox and with what transformers offers it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from outpace.core.errors import UserError


def render(template: str, messages: Sequence[Mapping[str, Any]], **values: Any) -> str:
    """The text of the conversation; UserError if the template is not valid or raises, with its own words."""
    import jinja2

    try:
        return _compiled(template)(messages=[dict(message) for message in messages], **values)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"the model's chat template is not valid: {error}") from error
    except UserError:
        raise
    except Exception as error:  # a template runs the model maker's code: whatever it raises is bad input
        raise UserError(f"the model's chat template refuses these messages: {error}") from error


@lru_cache(maxsize=8)
def _compiled(template: str) -> Callable[..., str]:
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks the assistant's part for training; here it only shows what it holds."""

        tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template).render


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes <, > and & for web pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
