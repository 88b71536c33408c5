"""Write examples of all items, messages and parts that the packages openai and anthropic publish.

python tests/clients/published_types.py > tests/published_types.json   # with the packages below

Each example has all fields of its type. Each object that a field of VARIED may be or may hold is in one of them.
"""

# needs: openai==3.57.0 anthropic==2.14.0
from __future__ import annotations

import collections.abc
import json
import os
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import anthropic
import openai
from anthropic.types import MessageParam
from anthropic.types.beta import BetaMessageParam
from openai.types.chat import ChatCompletionMessageParam
from openai.types.responses import ResponseInputItemParam
from typing_extensions import NotRequired, Required, get_type_hints, is_typeddict

VARIED = ("role", "content", "source", "output", "outputs", "results", "summary", "tool_calls")
DEFINITIONS = ("tools", "tool_changes")  # of tools, which may have any form
VALUES: dict[Any, Any] = {int: 1, float: 0.5, bool: True, object: {"key": "value"}, type(None): None}


def main() -> None:
    kinds = {
        "/v1/chat/completions": (ChatCompletionMessageParam,),
        "/v1/responses": (ResponseInputItemParam,),
        "/v1/messages": (MessageParam, BetaMessageParam),
    }
    found = {path: sorted({json.dumps(one) for kind in own for one in examples(kind)}) for path, own in kinds.items()}
    print(f'{{"openai": "{openai.__version__}", "anthropic": "{anthropic.__version__}",')
    print(",\n".join(f'"{path}": [\n{joined}\n]' for path, own in found.items() if (joined := ",\n".join(own))) + "}")


def examples(kind: Any, name: str = "") -> Iterator[Any]:
    """Yield values of a type, which is that of the field `name`."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Annotated, Required, NotRequired):
        yield from examples(inner[0], name)
    elif origin in (typing.Union, types.UnionType):
        for one in inner:
            yield from () if one is type(None) else examples(one, name)
    elif origin is Literal:
        yield from inner
    elif origin in (dict, collections.abc.Mapping):
        yield {"key": next(examples(inner[1], name))}
    elif typing.IO in (kind, origin) or kind is os.PathLike:  # files are sent in base64
        yield "dGhlIGRhdGE="
    elif inner:  # a list
        yield from ([],) if name in DEFINITIONS else ([one] for one in examples(inner[0], name))
    elif is_typeddict(kind):
        yield from objects(get_type_hints(kind, include_extras=True))
    elif hasattr(kind, "model_fields"):  # a part of an answer, which may be sent back
        yield from objects({name: field.annotation for name, field in kind.model_fields.items()})
    else:
        yield f"the {name}" if kind is str else VALUES[kind]


def objects(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield objects with all fields. All but the first differ from it in one field."""
    first = {name: next(examples(kind, name)) for name, kind in fields.items()}
    yield first
    for name in fields.keys() & set(VARIED):
        yield from ({**first, name: value} for value in [*examples(fields[name], name)][1:])


if __name__ == "__main__":
    main()
